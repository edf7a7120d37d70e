"""One S3 server for all tests of this folder: s3fs remembers the first endpoint that the environment has named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint import stores


@pytest.fixture(scope="session")
def server() -> Iterator[stores.Server]:
    with stores.serving() as server:
        yield server
