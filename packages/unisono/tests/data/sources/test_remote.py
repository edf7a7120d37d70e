"""Files behind URLs: the same rows as from local files, and errors within a deadline."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from packages.unisono.tests.data.sources.servers import hurried, serving
from packages.unisono.tests.data.sources.written import FORMATS, opened, plain, rows, write
from unisono.data.sources import find, open_source
from unisono.runtime import remote
from unisono.runtime.errors import DataError

ROWS = rows(29)


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty object store in memory."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize("name", FORMATS)
def test_a_url_gives_what_local_files_give(tmp_path: Path, memory: Any, name: str) -> None:
    local = opened(write(name, tmp_path / "rows", ROWS))
    memory.put(str(tmp_path / "rows"), "/bucket/rows", recursive=True)
    remote = opened("memory://bucket/rows")
    assert [plain(remote[row]) for row in range(29)] == ROWS
    assert [plain(r) for block in range(len(remote.blocks)) for r in remote.read_block(block)] == ROWS
    assert remote.fingerprint == local.fingerprint, "a copy of the data is the same data"
    assert remote.lengths is not None
    assert remote.lengths.tolist() == [len(row["tokens"]) for row in ROWS]
    copy = pickle.loads(pickle.dumps(remote))
    assert plain(copy[17]) == ROWS[17]


def test_the_order_and_the_rules_are_those_of_local_files(tmp_path: Path, memory: Any) -> None:
    folder = tmp_path / "root"
    for name in ("b/z.txt", "a/b/c/d.txt", "c.txt", "a/b.txt", "B.txt", "a.md", ".hidden/x.txt", "a/.x.txt", ".y.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    memory.put(str(folder), "/bucket/root", recursive=True)
    local, remote = find(folder), find("memory://bucket/root")
    assert [file.name for file in remote.files] == [file.name for file in local.files]
    assert [file.name for file in local.files][:2] == ["root/B.txt", "root/a/b/c/d.txt"]
    assert remote.ignored == local.ignored == ("a.md",)
    single = find("memory://bucket/root/a/b.txt")
    assert [file.name for file in single.files] == [f.name for f in find(folder / "a" / "b.txt").files]
    matched = open_source("memory://bucket/root/*.txt", "text")
    assert list(matched) == list(open_source(f"{folder}/*.txt", "text")) == ["B.txt", "c.txt"]
    named = open_source(["memory://bucket/root/c.txt", f"file://{folder}/B.txt"], "text")
    assert list(named) == ["c.txt", "B.txt"]


@pytest.mark.needs("datasets")
def test_the_splits_of_a_saved_data_set_are_found_behind_a_url(tmp_path: Path, memory: Any) -> None:
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_dict({"text": [name]}) for name in ("test", "train")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    memory.put(str(tmp_path / "saved"), "/saved", recursive=True)
    assert list(open_source("memory://saved", "text")) == ["train"]
    assert list(open_source("memory://saved", "text", split="test")) == ["test"]
    with pytest.raises(DataError, match=r"memory://saved has the splits test, train; choose one by data\.split"):
        open_source("memory://saved", split="trian")


def test_damage_is_found_behind_a_url(tmp_path: Path, memory: Any) -> None:
    for name in ("Parquet", "Arrow stream", "Arrow file", "JSONL, gzip"):
        folder = write(name, tmp_path / name, ROWS)
        path = next(folder.iterdir())
        memory.pipe(f"/cut/{path.name}", path.read_bytes()[:-30])
        with pytest.raises(DataError, match=rf"memory://cut/{path.name} cannot be"):
            opened(f"memory://cut/{path.name}")


@pytest.mark.parametrize("place", ["nowhere", "nowhere/*.parquet", "bucket/none.parquet"])
def test_a_url_that_does_not_exist_is_named(memory: Any, place: str) -> None:
    memory.pipe("/bucket/a.parquet", b"x")
    with pytest.raises(DataError, match=r"data\.path: memory://.* (does not exist|matches nothing)"):
        open_source(f"memory://{place}")


def test_a_protocol_nobody_knows_and_one_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"ftpx://a/b: .*use s3, gs"):
        open_source("ftpx://a/b")

    def absent(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(DataError, match=r"s3://a/b: s3:// needs a package that is not installed.*pip install s3fs"):
        open_source("s3://a/b")


def test_an_object_that_became_shorter_is_named(tmp_path: Path, memory: Any) -> None:
    write("Parquet", tmp_path / "rows", ROWS)
    content = (tmp_path / "rows" / "rows.parquet").read_bytes()
    memory.pipe("/rows.parquet", content)
    source = opened("memory://rows.parquet", cache_mb=0)
    memory.pipe("/rows.parquet", b"PAR1" + bytes(20))
    with pytest.raises(DataError, match=r"memory://rows\.parquet.*changed since it was opened"):
        [source[row] for row in range(29)]


def test_large_reads_are_made_of_pieces(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the deadline is one of progress."""
    monkeypatch.setattr(remote, "PIECE_BYTES", 10)
    memory.pipe("/a.txt", b"0123456789" * 10 + b"end")
    asked: list[int] = []
    read = type(memory).cat_file

    def counted(self: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        asked.append(end - start if end else 0)
        return bytes(read(self, path, start=start, end=end, **more))

    monkeypatch.setattr(type(memory), "cat_file", counted)
    source = open_source("memory://a.txt", "text")
    assert source[0] == "0123456789" * 10 + "end"
    assert max(asked) == 10


# servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Parquet", "Arrow stream", "JSONL"])
@pytest.mark.needs("aiohttp")
def test_a_web_server_gives_rows(tmp_path: Path, name: str) -> None:
    folder = write(name, tmp_path / "rows", ROWS)
    path = next(folder.iterdir())
    with serving(folder) as server:
        source = opened(f"{server.url}/{path.name}")
        assert [plain(record) for record in source] == ROWS
        assert (source.remote, opened(path).remote) == (True, False)
        with pytest.raises(DataError, match=r"data\.path: http://.*/none\.parquet does not exist"):
            open_source(f"{server.url}/none.parquet")


@pytest.mark.parametrize("mode", ["silent", "half", "broken", "gone"])
@pytest.mark.needs("aiohttp")
def test_a_server_that_goes_away_while_it_is_read_is_an_error(tmp_path: Path, mode: str) -> None:
    folder = write("Parquet", tmp_path / "rows", rows(400))
    with serving(folder) as server:
        source = opened(f"{server.url}/rows.parquet", cache_mb=0)
        assert plain(source[0]) == rows(1)[0]
        before = server.requests
        if mode == "gone":
            server.shutdown()
            server.server_close()
        server.mode = mode
        with hurried(source.shards[0].file, 1.0), pytest.raises(DataError, match=r"http://.*rows\.parquet"):
            source[399]
        assert server.requests > before
        if mode != "gone":
            server.mode = "well"
            assert plain(source[399]) == rows(400)[399], "and it can come back"


@pytest.mark.needs("aiohttp")
def test_a_server_that_never_answers_is_an_error_at_the_start(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.mode = "silent"
        with pytest.raises(DataError, match=r"no answer within 0\.5 s; check the server"):
            open_source(f"{server.url}/a.parquet", deadline=0.5)


@pytest.mark.needs("aiohttp")
def test_a_stream_whose_server_goes_away_is_an_error(tmp_path: Path) -> None:
    from unisono.data.sources import ColumnRequest, records

    (tmp_path / "a.jsonl").write_text('{"text": "%s"}\n' % ("x" * 1000) * 3000)
    with serving(tmp_path) as server:
        found = find(f"{server.url}/a.jsonl")
        reading = records(found.files[0], ColumnRequest.parse(["text"]))
        assert next(reading) == {"text": "x" * 1000}
        server.mode = "silent"
        with hurried(found.files[0], 1.0), pytest.raises(DataError, match=r"a\.jsonl: no answer within 1 s"):
            list(reading)


@pytest.mark.needs("aiohttp")
def test_forked_workers_read_for_themselves(tmp_path: Path) -> None:
    """Clients of object stores keep threads that a fork would lose."""
    folder = write("Parquet", tmp_path / "rows", ROWS)
    with serving(folder) as server:
        source = opened(f"{server.url}/rows.parquet", cache_mb=0)
        source[0]
        threading.Thread(target=lambda: None).start()
        for method in ("fork", "spawn"):
            context: Any = multiprocessing.get_context(method)
            results = context.SimpleQueue()
            worker = context.Process(target=_in_worker, args=(source, results))
            worker.start()
            worker.join(60)
            assert worker.exitcode == 0
            assert results.get() == ROWS


def _in_worker(source: Any, results: Any) -> None:
    results.put([plain(source[row]) for row in range(len(source))])
