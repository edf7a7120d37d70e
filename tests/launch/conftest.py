"""A host with other devices than the one that runs the tests."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.engines.torch import devices


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A host with other accelerators than this one."""

    def has(kind: str, count: int) -> None:
        monkeypatch.setattr(devices, "accelerators", lambda: (kind, count))

    return has
