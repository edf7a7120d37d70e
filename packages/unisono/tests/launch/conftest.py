"""What tests of launchers share: the small task in a folder, and a host with other devices than this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.launch import jobs
from unisono.engines.torch import devices


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the small task, and one for the marks of its processes."""
    jobs.task_file(tmp_path)
    (tmp_path / "marks").mkdir()
    return tmp_path


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with other accelerators than this one."""

    def has(kind: str, count: int) -> None:
        monkeypatch.setattr(devices, "accelerators", lambda: (kind, count))

    return has
