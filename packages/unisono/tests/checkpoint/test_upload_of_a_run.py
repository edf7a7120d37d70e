"""Uploads beside a run that trains, and before it starts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.checkpoint import stores
from packages.unisono.tests.checkpoint.remote.test_upload import there
from packages.unisono.tests.checkpoint.saved import save
from packages.unisono.tests.runs import configuration
from unisono.checkpoint.remote import store_lock, upload
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.upload import Uploads
from unisono.runtime.errors import ConfigError, UploadError
from unisono.runtime.untrusted import safe_writing

# beside a run -------------------------------------------------------------------------------------------------------


class Beside:
    """The uploads of a run, with a process of their own; `lines` and `notes` are what they said."""

    def __init__(self, folder: Path, server: stores.Server, name: str, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        given = {"upload": {"url": f"s3://{stores.BUCKET}", "deadline": 3.0, "timeout": 60.0, **settings}}
        self.config = configuration(checkpoint=given, run={"name": name})
        self.folder, self.lines, self.notes = folder, list[str](), list[tuple[int, dict[str, Any]]]()
        if not store_lock.read_local(folder):
            store_lock.claim(server.store(name), folder)  # which may take its time on a busy machine
        self.uploads = Uploads(self.config, folder, True, self.lines.append, lambda *note: self.notes.append(note))

    def end(self) -> None:
        while self.uploads.wait():
            pass
        self.uploads.finish()

    def until(self, text: str, seconds: float = 60.0) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.uploads.check()
            if found := [line for line in self.lines if text in line]:
                return found[0]
            time.sleep(0.02)
        raise AssertionError(f"{text!r} is not among {self.lines}")


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_server_that_dies_is_told_and_what_waits_is_uploaded_when_it_is_back(
    server: stores.Server, tmp_path: Path
) -> None:
    name, folder = uuid.uuid4().hex, tmp_path / "run"
    beside = Beside(folder, server, name)
    store = server.store(name)
    try:
        beside.uploads.enqueue(save(folder / "checkpoints", 4, keep=1))
        assert "MB sent" in beside.until("uploaded step 4 to s3://")
        server.stop()
        beside.uploads.enqueue(save(folder / "checkpoints", 6, keep=1))
        line = beside.until("upload of step 6 failed", 90)
        assert line.startswith("WARNING") and "not uploaded since step 4" in line and "retrying in 1 s" in line
        save(folder / "checkpoints", 8, keep=1)  # retention takes step 6 away, here
        assert not (folder / "checkpoints" / "step-00000006").exists()
        server.start()
        beside.until("uploaded step 6 to s3://", 90)
        beside.end()
    finally:
        beside.uploads.close()
    assert there(store) == ["step-00000004", "step-00000006"]
    assert [path.name for path in (folder / "uploading").iterdir()] == []
    notes = [(step, note["upload"]) for step, note in beside.notes]
    assert [note for note in notes if note[0] == 4][-1] == (4, "there")  # a busy server may fail the first time
    assert notes[-1] == (6, "there")
    assert (6, "failed") in notes
    assert json.loads(store.get(store_lock.ALIVE) or b"")["number"] is None, "it has said its last"


@pytest.mark.usefixtures("environment")
def test_an_upload_that_is_killed_is_taken_up_by_the_next_start(server: stores.Server, tmp_path: Path) -> None:
    name, folder = uuid.uuid4().hex, tmp_path / "run"
    first = Beside(folder, server, name)
    server.stop()
    try:
        first.uploads.enqueue(save(folder / "checkpoints", 4, keep=1))
        process = first.uploads._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        first.until("exited with code -9")
    finally:
        first.uploads.close()  # as a killed run leaves it
        server.start()
    assert there(server.store(name)) == []
    shutil.rmtree(folder / "checkpoints")  # the links alone are left
    second = Beside(folder, server, name)
    try:
        second.until("uploaded step 4 to s3://")
    finally:
        second.uploads.close()
    assert there(server.store(name)) == ["step-00000004"]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("required", [False, True])
def test_a_run_whose_last_checkpoint_is_not_there_in_the_end_says_so(
    server: stores.Server, tmp_path: Path, required: bool
) -> None:
    folder = tmp_path / "run"
    beside = Beside(folder, server, uuid.uuid4().hex, timeout=1.0, required=required)
    told = r"the checkpoint of step 4 is not in s3://.* \(nothing uploaded since the start\); it is complete in "
    server.stop()
    try:
        beside.uploads.enqueue(save(folder / "checkpoints", 4))
        began = time.monotonic()
        if required:
            with pytest.raises(UploadError, match=told):
                beside.end()
        else:
            beside.end()
            beside.until("WARNING: the checkpoint of step 4 is not in s3://")
        assert time.monotonic() - began < 30
        assert (4, {"upload": "missing"}) in beside.notes
    finally:
        beside.uploads.close()
        server.start()


# before the start ---------------------------------------------------------------------------------------------------


def test_a_store_is_tried_before_the_start_and_nothing_is_left_in_it(server: stores.Server, store: ObjectStore) -> None:
    remote = server.store(uuid.uuid4().hex)
    for each in (store, remote):
        upload.check_store(each)
        assert each.names("") == []


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("s3://no-such-bucket/run", r"s3://no-such-bucket/run does not exist .* create the bucket first"),
        ("nothing://bucket/run", r"nothing://.*use s3, gs"),
        ("dropbox://bucket/run", r"dropbox:// needs a package that is not installed"),
        ("file:///proc/nothing/run", r"file:///proc/nothing/run.* (cannot be written|does not exist)"),
    ],
)
def test_a_store_that_cannot_be_written_is_refused(server: stores.Server, url: str, told: str) -> None:
    where = server.store("x").where if url.startswith("s3") else ObjectStore("x").where
    with pytest.raises(ConfigError, match=told):
        upload.check_store(ObjectStore(url, where))


def test_memory_is_no_store() -> None:
    with pytest.raises(ValueError, match="lies in the memory of one process"):
        configuration(checkpoint={"upload": {"url": "memory://runs"}})


@pytest.mark.usefixtures("environment")
def test_a_checkpoint_that_cannot_be_kept_for_its_upload_ends_nothing(
    server: stores.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "run"
    beside = Beside(folder, server, uuid.uuid4().hex)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", full)
            patch.setattr(safe_writing, "copy_inside", full)
            beside.uploads.enqueue(save(folder / "checkpoints", 4))
        beside.until("WARNING: upload of step 4 failed: [Errno 28] No space left on device")
        beside.end()
        beside.until("WARNING: the checkpoint of step 4 is not in s3://")
    finally:
        beside.uploads.close()
