"""Real data, which is not part of the project: tests that need it are skipped where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

_DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def real(name: str) -> Path:
    """A file or folder of real data, in the data folder beside the project; the test is skipped where it is absent."""
    path = _DATA / name
    if not path.exists():
        pytest.skip(f"needs real data that is not part of the project: ../shared/data/{name}")
    return path
