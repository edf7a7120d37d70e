"""Checkpoints in a store are whole or absent, whatever fails on their way there, and nothing waits for them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.checkpoint import stores
from tests.checkpoint.saved import save
from tests.runs import configuration
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import store_lock, upload, upload_process
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.upload import Uploads
from unisono.checkpoint.remote.upload_process import (
    CheckpointUploader,
    TakenOverError,
    UploadWorker,
    description_object,
)
from unisono.runtime.errors import ConfigError, DataError, RunError, UploadError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

MANIFEST = "checkpoints/step-00000004/manifest.json"
SHARD = "checkpoints/step-00000004/rank-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore(f"file://{tmp_path}/store/run")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint, of step 4."""
    folder = tmp_path / "run"
    save(folder / "checkpoints", 4)
    (folder / "assets").mkdir()
    (folder / "assets" / "vocabulary").write_text("a b c")
    (folder / "config.yaml").write_text("recipe: test\n")
    (folder / "events.jsonl").write_text("{}\n")
    return folder


def order(path: Path) -> dict[str, Any]:
    checkpoint = commit.read_manifest(path)
    return {"path": str(path), "name": path.name, "step": checkpoint.step, "files": checkpoint.files, "metric": None}


def bring(upload: CheckpointUploader, run: Path, step: int = 4) -> None:
    path = run / "checkpoints" / f"step-{step:08d}"
    upload.commit(path, path.name, commit.read_manifest(path).files)


def there(store: ObjectStore) -> list[str]:
    """Names of checkpoints whose manifest is in the store."""
    names = store.names("checkpoints")
    return [name for name in names if store.get(f"checkpoints/{name}/manifest.json") is not None]


class Asked:
    """What a store is asked to write and remove, in order; it can be made to fail."""

    def __init__(self, fail: str = "") -> None:
        self.asked: list[str] = []
        self.fail = fail
        self._patches = [mock.patch.object(ObjectStore, name, self._noted(name)) for name in ("put", "send", "remove")]

    def _noted(self, what: str) -> Callable[..., Any]:
        original = getattr(ObjectStore, what)

        def act(store: ObjectStore, name: str, *arguments: Any) -> Any:
            if self.fail and name.endswith(self.fail):
                raise DataError(f"{store.url_of(name)} cannot be written: the line is cut")
            self.asked.append(f"{what} {name}")
            return original(store, name, *arguments)

        return act

    def __enter__(self) -> Asked:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


# what describes the run ---------------------------------------------------------------------------------------------


def test_every_configuration_that_the_run_has_had_is_described(store: ObjectStore, run: Path) -> None:
    sender = CheckpointUploader(store, run, None, Retention(2))
    for number in (1, 2):
        (run / f"config.{number:04d}.yaml").write_text(f"recipe: test  # {number}\n")
        bring(sender, run)
    (run / "config.old.yaml").write_text("somebody's own\n")
    bring(sender, run)
    described = json.loads(store.get("run.json") or b"")
    assert [name for name in described if name.startswith("config")] == [
        "config.yaml", "config.0001.yaml", "config.0002.yaml",
    ]  # fmt: skip
    for name in ("config.0001.yaml", "config.0002.yaml"):
        assert store.get(description_object(name, described[name]["sha256"])) == (run / name).read_bytes()


# one checkpoint -----------------------------------------------------------------------------------------------------


def test_the_manifest_goes_last_and_before_it_everything_that_a_restore_needs(store: ObjectStore, run: Path) -> None:
    with Asked() as asked:
        bring(CheckpointUploader(store, run, None, Retention(2)), run)
    assert [line.rpartition("/")[2] for line in asked.asked] == [
        "config.yaml", "vocabulary", "put run.json", "rank-00000.safetensors", "manifest.json", "put checkpoints.json",
    ]  # fmt: skip
    assert store.get(MANIFEST) == (run / MANIFEST).read_bytes()
    assert store.get(SHARD) == (run / SHARD).read_bytes()
    assert "events.jsonl" not in json.loads(store.get("run.json") or b"{}")


def test_a_checkpoint_whose_upload_was_interrupted_is_not_there_and_only_the_rest_is_sent(
    store: ObjectStore, run: Path
) -> None:
    with Asked(fail="manifest.json"), pytest.raises(DataError, match="line is cut"):
        bring(CheckpointUploader(store, run, None, Retention(2)), run)
    assert (there(store), store.get(SHARD)) == ([], (run / SHARD).read_bytes())
    again = CheckpointUploader(store, run, None, Retention(2))  # of another process
    bring(again, run)
    assert (there(store), again.sent) == (["step-00000004"], 0)


@pytest.mark.parametrize(
    ("fault", "manifest"),  # where the manifest is there, content is not read back but by a restore
    [("missing", True), ("shorter", True), ("missing", False), ("shorter", False), ("a bit", False)],
)
def test_an_object_that_is_not_what_was_written_is_sent_again(
    store: ObjectStore, run: Path, fault: str, manifest: bool
) -> None:
    bring(CheckpointUploader(store, run, None, Retention(2)), run)
    content = bytearray(store.get(SHARD) or b"")
    store.remove(SHARD)
    content[-1] ^= 1
    if fault != "missing":
        store.put(SHARD, bytes(content[:-1] if fault == "shorter" else content))
    if not manifest:
        store.remove(MANIFEST)
    again = CheckpointUploader(store, run, None, Retention(2))
    bring(again, run)
    assert again.sent == len(content)
    assert store.get(SHARD) == (run / SHARD).read_bytes()


def test_what_arrives_as_something_else_has_no_manifest(store: ObjectStore, run: Path) -> None:
    def damaging(store: ObjectStore, name: str, file: Path, sent: Any = None) -> None:
        store.put(name, file.read_bytes()[:-1] + b"!")

    with (
        mock.patch.object(ObjectStore, "send", damaging),
        pytest.raises(DataError, match=r"config\.yaml is damaged: its content is not what was written"),
    ):
        bring(CheckpointUploader(store, run, None, Retention(2)), run)
    assert there(store) == []


def test_a_file_that_is_damaged_here_is_told_as_that_and_never_gets_a_manifest(store: ObjectStore, run: Path) -> None:
    content = bytearray((run / SHARD).read_bytes())
    content[-1] ^= 1
    (run / SHARD).write_bytes(content)
    with pytest.raises(
        upload_process.DamagedError, match=r"run/checkpoints/step-00000004/rank-00000\.safetensors is damaged"
    ):
        bring(CheckpointUploader(store, run, None, Retention(2)), run)
    assert there(store) == []


def test_a_checkpoint_of_another_past_is_taken_back_before_its_files_change(store: ObjectStore, run: Path) -> None:
    bring(CheckpointUploader(store, run, None, Retention(2)), run)
    shutil.rmtree(run / "checkpoints")
    save(run / "checkpoints", 4, state={"another": "past"})
    with Asked(fail="checkpoints.json") as asked, pytest.raises(DataError):
        bring(CheckpointUploader(store, run, None, Retention(2)), run)
    assert asked.asked[0] == f"remove {MANIFEST}"
    assert asked.asked[-1] == f"put {MANIFEST}"


def test_older_checkpoints_go_from_the_store_manifest_first_when_the_new_one_is_there(
    store: ObjectStore, run: Path
) -> None:
    sender = CheckpointUploader(store, run, None, Retention(2))
    for step in (4, 6, 8):
        if step > 4:
            save(run / "checkpoints", step)
        with Asked() as asked:
            bring(sender, run, step)
    assert there(store) == ["step-00000006", "step-00000008"]
    removed = [line for line in asked.asked if line.startswith("remove")]
    assert removed == [f"remove {MANIFEST}", f"remove {SHARD}"]
    assert asked.asked.index("put checkpoints/step-00000008/manifest.json") < asked.asked.index(removed[0])


def test_a_changed_configuration_is_described_anew_and_the_old_one_goes(store: ObjectStore, run: Path) -> None:
    sender = CheckpointUploader(store, run, None, Retention(2))
    bring(sender, run)
    (run / "config.yaml").write_text("recipe: other\n")
    save(run / "checkpoints", 6)
    bring(sender, run, 6)
    described = json.loads(store.get("run.json") or b"")
    assert (
        store.get(upload_process.description_object("config.yaml", described["config.yaml"]["sha256"]))
        == b"recipe: other\n"
    )
    assert len(store.names("description")) == 2


# whose it is --------------------------------------------------------------------------------------------------------


def test_a_place_belongs_to_one_run(store: ObjectStore, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
    store_lock.claim(store, mine)
    store_lock.check_owner(store, mine, fresh=False)
    store_lock.claim(store, mine)  # the next start of the same run
    assert store_lock.read_local(mine)["start"] == (store_lock.read_owner(store) or {})["start"]
    told = rf"belongs to another run: process {os.getpid()} on .* wrote it from .*mine"
    with pytest.raises(RunError, match=told):
        store_lock.check_owner(store, other, fresh=False)
    (other / store_lock.LOCAL_FILE).write_text(json.dumps({"run": "another"}))
    with pytest.raises(RunError, match=told):
        store_lock.check_owner(store, other, fresh=True)
    with pytest.raises(RunError, match="was just claimed by another run"):
        store_lock.claim(store, other)


def test_an_owner_of_another_form_is_refused(store: ObjectStore, tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"run": "x"}'):
        store.put(store_lock.OWNER, content)
        with pytest.raises(RunError, match=r"owner\.json is not a valid owner record"):
            store_lock.check_owner(store, tmp_path, fresh=True)


def test_a_run_that_lives_elsewhere_is_not_taken_over_and_one_that_is_gone_is(
    store: ObjectStore, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    store_lock.claim(store, there)
    start = store_lock.read_local(there)["start"]
    store_lock.write_heartbeat(store, start, 1)
    number = iter(range(2, 100))
    original = ObjectStore.get

    def beating(store: ObjectStore, name: str) -> bytes | None:
        if name == store_lock.ALIVE:
            store_lock.write_heartbeat(store, start, next(number))
        return original(store, name)

    with (
        mock.patch.object(ObjectStore, "get", beating),
        pytest.raises(RunError, match="still trains elsewhere: process"),
    ):
        store_lock.check_owner(store, here, fresh=True, patience=1.0)
    assert store_lock.check_owner(store, here, fresh=True, patience=0.2) is not None  # no sign of life
    store_lock.write_heartbeat(store, start, None)
    began = time.monotonic()
    assert store_lock.check_owner(store, here, fresh=True, patience=60.0) is not None  # it has said its last
    assert time.monotonic() - began < 30
    store_lock.adopt(here, store_lock.read_owner(store) or {})
    store_lock.claim(store, here)
    assert store_lock.find_new_owner(store, start) is not None


def test_a_start_that_was_taken_over_finishes_no_checkpoint(store: ObjectStore, run: Path) -> None:
    store_lock.claim(store, run)
    first = CheckpointUploader(store, run, store_lock.read_local(run)["start"], Retention(2))
    bring(first, run)
    store_lock.claim(store, run)
    save(run / "checkpoints", 6)
    with pytest.raises(TakenOverError, match=r"process \d+ on"):
        bring(first, run, 6)
    assert there(store) == ["step-00000004"]
    bring(CheckpointUploader(store, run, store_lock.read_local(run)["start"], Retention(2)), run, 6)
    assert there(store) == ["step-00000004", "step-00000006"]


# one after the other ------------------------------------------------------------------------------------------------


def worked(store: ObjectStore, run: Path, orders: list[dict[str, Any]], failures: int = 0) -> list[dict[str, Any]]:
    """Reports of a worker that has these orders, and whose first attempts fail."""
    reports: list[dict[str, Any]] = []
    sender = CheckpointUploader(store, run, None, Retention(9))
    original = sender.commit
    attempts = iter(range(1000))

    def commit(*arguments: Any) -> None:
        if next(attempts) < failures:
            raise DataError("the line is cut, as key sk-aaaaaaaaaaaaaaaaaaaaaaaa knows")
        original(*arguments)

    with mock.patch.object(sender, "commit", commit):
        worker = UploadWorker(sender, store, reports.append, pause=0.01)
        for each in orders:
            worker.order(each)
        worker.order({"end": True})
        worker.run()
    return reports


def test_of_those_that_wait_the_newest_is_uploaded(store: ObjectStore, run: Path) -> None:
    orders = [order(run / "checkpoints" / "step-00000004")]
    orders += [order(save(run / "checkpoints", step)) for step in (6, 8)]
    reports = worked(store, run, orders)
    assert [(key, report[key]) for report in reports for key in ("left", "uploaded") if key in report] == [
        ("left", "step-00000004"), ("left", "step-00000006"), ("uploaded", "step-00000008"),
    ]  # fmt: skip


def test_what_fails_is_tried_again_after_longer_and_longer_pauses_and_tells_no_secret(
    store: ObjectStore, run: Path
) -> None:
    reports = worked(store, run, [order(run / "checkpoints" / "step-00000004")], failures=3)
    assert [report.get("again") for report in reports] == [0.01, 0.02, 0.04, None]
    assert "line is cut" in reports[0]["why"] and "sk-aaaa" not in reports[0]["why"]
    assert (reports[-1]["uploaded"], there(store)) == ("step-00000004", ["step-00000004"])


def test_a_damaged_file_is_told_once_and_holds_nothing_up(store: ObjectStore, run: Path) -> None:
    (run / SHARD).write_bytes(bytes((run / SHARD).stat().st_size))
    first = order(run / "checkpoints" / "step-00000004")
    reports = worked(store, run, [first])
    assert [next(iter(report)) for report in reports] == ["failed", "left"]


# beside a run -------------------------------------------------------------------------------------------------------


class Beside:
    """The uploads of a run, with a process of their own; `lines` and `notes` are what they said."""

    def __init__(self, folder: Path, server: stores.Server, name: str, **settings: Any) -> None:
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
    folder.mkdir()
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
    folder.mkdir()
    first = Beside(folder, server, name)
    server.stop()
    try:
        first.uploads.enqueue(save(folder / "checkpoints", 4, keep=1))
        process = first.uploads._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)  # it is taken up once by the run itself
        first.until("exited with code -9")
        assert first.uploads._process is not process
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
    folder.mkdir()
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
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "run"
    folder.mkdir()
    beside = Beside(folder, server, uuid.uuid4().hex)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", full)
            patch.setattr(shutil, "copyfile", full)
            beside.uploads.enqueue(save(folder / "checkpoints", 4))
        beside.until("WARNING: upload of step 4 failed: [Errno 28] No space left on device")
        beside.end()
        beside.until("WARNING: the checkpoint of step 4 is not in s3://")
    finally:
        beside.uploads.close()
