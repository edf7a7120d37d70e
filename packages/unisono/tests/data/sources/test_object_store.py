"""An object store: rows from a server that speaks S3, as users have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.checkpoint import stores
from packages.unisono.tests.data.sources.servers import hurried
from packages.unisono.tests.data.sources.written import plain, rows, write
from unisono.data.sources import open_source
from unisono.runtime.errors import DataError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

ROWS = rows(29)


@pytest.fixture(scope="module")
def storage() -> Iterator[dict[str, Any]]:
    """Options of fsspec for a store of our own; credentials that open nothing else."""
    with stores.serving() as server:
        yield server.options


@pytest.fixture
def bucket(storage: dict[str, Any]) -> Any:
    """An empty bucket called `rows`."""
    import s3fs

    system = s3fs.S3FileSystem(**storage, skip_instance_cache=True)
    if system.exists("rows"):
        system.rm("rows", recursive=True)
    system.mkdir("rows")
    return system


@pytest.mark.parametrize(
    "name", ["Parquet, three files", "Arrow stream", "Arrow file, zstd", "JSONL, gzip", "saved data set"]
)
def test_an_object_store_gives_what_local_files_give(
    tmp_path: Path, bucket: Any, storage: dict[str, Any], name: str
) -> None:
    folder = write(name, tmp_path / "here", ROWS)
    bucket.put(str(folder), "rows/here", recursive=True)
    types = {"id": "int64", "tokens": "list<int64>"}
    local = open_source(folder, expect=types)
    remote = open_source("s3://rows/here", expect=types, storage=storage)
    assert [plain(record) for record in remote] == ROWS
    assert remote.fingerprint == local.fingerprint
    assert remote.blocks.tolist() == local.blocks.tolist()
    assert [file.file.name for file in remote.shards] == [file.file.name for file in local.shards]


def test_globs_and_lists_of_objects(tmp_path: Path, bucket: Any, storage: dict[str, Any]) -> None:
    for name in ("b", "a", "c"):
        bucket.pipe(f"rows/in/{name}.jsonl", b'{"text": "%s"}\n' % name.encode())
    assert list(open_source("s3://rows/in/*.jsonl", "text", storage=storage)) == ["a", "b", "c"]
    assert list(open_source(["s3://rows/in/c.jsonl", "s3://rows/in/a.jsonl"], "text", storage=storage)) == ["c", "a"]
    for missing in ("s3://rows/none.jsonl", "s3://rows/in/*.parquet", "s3://no-such-bucket/in"):
        with pytest.raises(DataError, match=r"data\.path: s3://.* (does not exist|matches nothing)"):
            open_source(missing, storage=storage)


def test_an_object_that_is_overwritten_has_another_fingerprint(bucket: Any, storage: dict[str, Any]) -> None:
    bucket.pipe("rows/a.jsonl", b'{"text": "a"}\n')
    before = open_source("s3://rows/a.jsonl", storage=storage)
    bucket.pipe("rows/a.jsonl", b'{"text": "b"}\n')
    after = open_source("s3://rows/a.jsonl", storage=storage)
    assert after[0] == {"text": "b"}
    with pytest.raises(DataError, match=r"a\.jsonl has changed: its content differs"):
        after.check_same(before.manifest)


def test_a_store_that_goes_away_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    server = stores.Server()
    options, system = server.options, server.system()
    system.mkdir("leaving")
    folder = write("Parquet", tmp_path / "here", rows(400))
    system.put(str(folder), "leaving/here", recursive=True)
    source = open_source("s3://leaving/here", storage=options, cache_mb=0)
    assert plain(source[0]) == rows(1)[0]
    server.stop()
    with hurried(source.shards[0].file, 2.0), pytest.raises(DataError, match=r"s3://leaving/here/rows\.parquet"):
        source[399]
