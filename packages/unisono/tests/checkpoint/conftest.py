"""What tests of this folder share: a checkpoint of two ranks, one S3 server, and the environment that leads to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from packages.unisono.tests.checkpoint import stores
from packages.unisono.tests.checkpoint.saved import STATE, Threads, shards
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.remote.object_store import ObjectStore


@pytest.fixture(scope="session")
def server() -> Iterator[stores.Server]:
    with stores.serving() as server:
        yield server


@pytest.fixture
def environment(server: stores.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import s3fs

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # they remember the endpoint of the environment
    yield
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """That of one run, in a folder."""
    return ObjectStore(f"file://{tmp_path}/store/run")


@pytest.fixture
def of_two(tmp_path: Path) -> Path:
    """A checkpoint of step 4, written by two ranks."""
    group = Threads(2)
    first, second = group.run(
        lambda: commit.save_checkpoint(tmp_path / "two", Snapshot(4, shards(4, group.rank, 2), STATE), group, keep=2)
    )
    assert first == second
    return Path(first)
