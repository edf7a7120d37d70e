"""Prepared rows that tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.data.numbers import Numbers
from unisono.data.prepare.preparation import prepare


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten shards, made by one worker without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "numbers"
    made = prepare(Numbers(300), folder, shard_mb=1)
    assert made is not None
    assert len({entry["sha256"] for entry in made.manifest["shards"]}) == len(made.manifest["shards"]) == 10
    return folder
