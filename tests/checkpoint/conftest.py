"""One S3 server for all tests of this folder, and the environment that leads to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint import stores


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
