"""Objects by name in any store, and what goes wrong on the way."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packages.unisono.tests.checkpoint import stores
from unisono.checkpoint.remote import object_store as module
from unisono.checkpoint.remote.object_store import ObjectError, ObjectStore
from unisono.runtime.errors import DataError
from unisono.runtime.remote import remote_options

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(params=["s3", "file", "memory"])
def store(request: Any, server: stores.Server, tmp_path: Path) -> ObjectStore:
    name = uuid.uuid4().hex
    if request.param == "s3":
        return server.store(name)
    return ObjectStore(f"file://{tmp_path}/not/there/yet" if request.param == "file" else f"memory://{name}")


def written(path: Path, size: int) -> tuple[Path, str]:
    content = os.urandom(size)
    path.write_bytes(content)
    return path, hashlib.sha256(content).hexdigest()


def test_small_objects_come_back_and_go(store: ObjectStore) -> None:
    assert (store.get("a/b.json"), store.size("a/b.json"), store.names("a")) == (None, None, [])
    store.put("a/b.json", b"one")
    store.put("a/b.json", b"three")
    store.put("a/c.json", b"")
    assert (store.get("a/b.json"), store.size("a/b.json"), store.names("a")) == (b"three", 5, ["b.json", "c.json"])
    store.remove("a/b.json")
    store.remove("a/b.json")
    assert (store.get("a/b.json"), store.names("a")) == (None, ["c.json"])


def test_an_object_is_created_once(store: ObjectStore) -> None:
    assert store.create("owner", b"first") is True
    assert store.create("owner", b"second") is False
    assert store.get("owner") == b"first"


@pytest.mark.parametrize("size", [0, 1, 20_000_001])
def test_a_file_of_any_size_arrives_whole_and_is_brought_back(store: ObjectStore, tmp_path: Path, size: int) -> None:
    file, sha256 = written(tmp_path / "file", size)
    sent: list[int] = []
    store.send("x/file", file, sent.append)
    assert sum(sent) == size
    assert len(sent) == -(-size // module.PIECE_BYTES)
    assert store.sha256("x/file", size) == sha256
    assert store.sha256("x/file", size + 1) is None
    store.fetch("x/file", tmp_path / "back", size, sha256)
    assert (tmp_path / "back").read_bytes() == file.read_bytes()
    assert store.abort_parts() == 0


def test_what_was_brought_before_is_not_brought_again(store: ObjectStore, tmp_path: Path) -> None:
    file, sha256 = written(tmp_path / "file", 1000)
    store.send("file", file)
    with mock.patch.object(ObjectStore, "read", side_effect=AssertionError("it was read again")):
        store.fetch("file", file, 1000, sha256)
        with pytest.raises(AssertionError, match="read again"):
            store.fetch("file", tmp_path / "elsewhere", 1000, sha256)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "is missing"), (b"abc", "has 3 bytes instead of 4"), (b"abcd", "its content is")],
)
def test_an_object_that_is_not_what_was_written_is_refused_by_name(
    store: ObjectStore, tmp_path: Path, content: bytes | None, told: str
) -> None:
    if content is not None:
        store.put("file", content)
    with pytest.raises(ObjectError, match=told) as caught:
        store.fetch("file", tmp_path / "file", 4, hashlib.sha256(b"abce").hexdigest())
    assert store.url_of("file") in str(caught.value)
    assert not (tmp_path / "file").exists()


def test_what_the_checksum_of_s3_finds_damaged_is_damaged(server: stores.Server, tmp_path: Path) -> None:
    """It was an error of the request, which ended a start instead of passing over the checkpoint."""
    from moto.s3.models import s3_backends

    store = server.store("damaged")
    store.put("file", b"abce")
    (backend,) = (regions["aws"] for regions in s3_backends.values())
    backend.buckets[stores.BUCKET].keys["damaged/file"].value = b"abcd"
    with pytest.raises(ObjectError, match="its content is not what was written"):
        store.get("file")
    with pytest.raises(ObjectError, match="its content is not what was written"):
        store.fetch("file", tmp_path / "file", 4, hashlib.sha256(b"abce").hexdigest())


def test_an_upload_in_parts_that_fails_leaves_no_object_and_no_part(server: stores.Server, tmp_path: Path) -> None:
    store, (file, sha256) = server.store(uuid.uuid4().hex), written(tmp_path / "file", 20_000_000)

    def fail(sent: int) -> None:
        if server.parts():
            raise OSError("the line is cut")

    with pytest.raises(OSError, match="cut"):
        store.send("file", file, fail)
    assert (server.parts(), store.size("file")) == ([], None)
    store.send("file", file)
    assert store.sha256("file", 20_000_000) == sha256


def test_parts_of_a_killed_upload_are_aborted_and_those_of_others_are_not(server: stores.Server) -> None:
    name, system = uuid.uuid4().hex, server.system()
    for key in (f"{name}/checkpoints/file", f"{name}-other/file"):
        system.call_s3("create_multipart_upload", Bucket=stores.BUCKET, Key=key)
    assert server.store(name).abort_parts() == 1
    (left,) = server.parts()
    assert left["Key"] == f"{name}-other/file"
    assert server.store(f"{name}-other").abort_parts() == 1


def test_a_server_that_is_away_or_silent_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    file, _ = written(tmp_path / "file", 1000)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        store = ObjectStore(
            "s3://bucket/run", remote_options({"key": "a", "secret": "b", "endpoint_url": endpoint}, 1.0)
        )
        for act in (lambda: store.put("a", b""), lambda: store.send("a", file), lambda: store.get("a")):
            began = time.monotonic()
            with pytest.raises(DataError, match="no answer within 1 s"):
                act()
            assert time.monotonic() - began < 20


@pytest.mark.parametrize("name", ["alive.json", "checkpoints", "link"])
def test_a_store_that_is_a_folder_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    """A heartbeat was written through a link of its name, over a file of the user, and a pipe took a minute."""
    prefix, private = tmp_path / "runs" / "a", tmp_path / "private"
    if name == "link":
        private.mkdir()
        prefix.parent.mkdir()
        prefix.symlink_to(private)
    else:
        prefix.mkdir(parents=True)
        private.mkdir() if name == "checkpoints" else os.mkfifo(private)
        (prefix / name).symlink_to(private) if name == "checkpoints" else private.rename(prefix / name)
    store = ObjectStore(f"file://{prefix}")
    asked = "checkpoints/a.json" if name == "checkpoints" else "alive.json"
    for ask in (lambda: store.put(asked, b"1"), lambda: store.get(asked), lambda: store.create(asked, b"1")):
        with pytest.raises(DataError, match=r"is a (link|pipe), and a store's objects are files in its own folder"):
            ask()
    assert not private.is_dir() or list(private.iterdir()) == []


def test_the_folder_of_all_runs_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "backup").symlink_to(tmp_path / "disk")
    ObjectStore.for_run(f"file://{tmp_path / 'backup'}", "a").put("checkpoints/a.json", b"1")
    assert (tmp_path / "disk" / "a" / "checkpoints" / "a.json").read_bytes() == b"1"
