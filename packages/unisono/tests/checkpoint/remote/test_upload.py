"""Checkpoints in a store are whole or absent, whatever fails on their way there, and nothing waits for them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packages.unisono.tests.checkpoint.saved import flip_bit, save
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import store_lock, upload_process
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.upload_process import (
    CheckpointUploader,
    TakenOverError,
    UploadWorker,
    description_object,
)
from unisono.runtime.errors import DataError, RunError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")

MANIFEST = "checkpoints/step-00000004/manifest.json"
SHARD = "checkpoints/step-00000004/rank-00000.safetensors"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with one checkpoint, of step 4."""
    folder = tmp_path / "run"
    folder.mkdir()
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
    flip_bit(run / SHARD)
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
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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

    monkeypatch.setattr(store_lock, "HEARTBEAT_TIMEOUT", 1.0)
    with (
        mock.patch.object(ObjectStore, "get", beating),
        pytest.raises(RunError, match="still trains elsewhere: process"),
    ):
        store_lock.check_owner(store, here, fresh=True)
    monkeypatch.setattr(store_lock, "HEARTBEAT_TIMEOUT", 0.2)
    assert store_lock.check_owner(store, here, fresh=True) is not None  # no sign of life
    store_lock.write_heartbeat(store, start, None)
    monkeypatch.setattr(store_lock, "HEARTBEAT_TIMEOUT", 60.0)
    began = time.monotonic()
    assert store_lock.check_owner(store, here, fresh=True) is not None  # it has said its last
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
