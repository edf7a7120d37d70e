"""A run comes back from its store whole, or the start is refused; what is damaged there is never loaded."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from packages.unisono.tests.checkpoint import stores
from packages.unisono.tests.checkpoint.saved import flip_bit, is_of, load, save
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.runs import checkpoints
from unisono.checkpoint.core import commit, manifest
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import restore, store_lock
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.restore import Restore
from unisono.checkpoint.remote.upload_process import CheckpointUploader
from unisono.cli import main
from unisono.runtime.errors import CheckpointError, DataError

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of these tests lives on elsewhere, so none is waited for."""
    monkeypatch.setattr(store_lock, "HEARTBEAT_TIMEOUT", 0.02)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """A run elsewhere, whose checkpoints of steps 4, 6 and 8 are in the store."""
    folder = tmp_path / "there"
    (folder / "assets").mkdir(parents=True)
    (folder / "assets" / "vocabulary").write_text("a b c")
    for step in (4, 6, 8):
        save(folder / "checkpoints", step)
    (folder / "config.yaml").write_text("recipe: test\n")
    (folder / "fingerprint.json").write_text("{}")
    store = ObjectStore(f"file://{tmp_path}/store/run")
    store_lock.claim(store, folder)
    sender = CheckpointUploader(store, folder, None, Retention(9))
    for path in commit.find_checkpoints(folder / "checkpoints"):
        sender.commit(path, path.name, commit.read_manifest(path).files)
    return folder


@pytest.fixture
def store(there: Path) -> ObjectStore:
    return ObjectStore(f"file://{there.parent}/store/run")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here"


def begun(store: ObjectStore, here: Path, exact: bool = False) -> Restore:
    found = Restore(store, here, exact)
    here.mkdir(exist_ok=True)
    found.begin(False, nullcontext)
    return found


def damage(store: ObjectStore, step: int, fault: str, name: str = "rank-00000.safetensors") -> None:
    at = f"checkpoints/step-{step:08d}/{name}"
    content = bytearray(store.get(at) or b"")
    content[-1] ^= 1
    store.remove(at)
    if fault != "missing":
        store.put(at, bytes(content[:-1] if fault == "shorter" else content))


def test_the_newest_checkpoint_comes_with_what_describes_the_run(store: ObjectStore, here: Path, there: Path) -> None:
    found = begun(store, here)
    assert (here / "config.yaml").read_text() == "recipe: test\n"
    assert (here / "assets" / "vocabulary").read_text() == "a b c"
    assert [commit.read_manifest(path).step for path in restore.find_partial(here)] == [8]
    assert checkpoints(here) == [], "its files are not there yet, so it has no name"
    found.finish()
    assert is_of(commit.find_checkpoints(here / "checkpoints")[-1], 8)
    assert restore.find_partial(here) == []
    assert store_lock.read_local(here)["run"] == store_lock.read_local(there)["run"]
    (line,) = [json.loads(line) for line in (here / "events.jsonl").read_text().splitlines() if line]
    assert (line["step"], line["restored"], line["passed_over"]) == (8, "step-00000008", {})


def test_a_folder_gets_what_it_lacks_and_is_else_left_alone(store: ObjectStore, there: Path) -> None:
    before = sorted(path.name for path in there.rglob("*"))
    with mock.patch.object(ObjectStore, "fetch", side_effect=AssertionError):
        begun(store, there).finish()
    assert sorted(path.name for path in there.rglob("*")) == before
    shutil.rmtree(there / "checkpoints" / "step-00000008")
    begun(store, there).finish()
    assert checkpoints(there) == [4, 6, 8]


@pytest.mark.parametrize("fault", ["missing", "shorter", "a bit"])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    store: ObjectStore, here: Path, capfd: pytest.CaptureFixture[str], fault: str, name: str
) -> None:
    damage(store, 8, fault, name)
    begun(store, here).finish()
    assert checkpoints(here) == [6]
    assert is_of(commit.find_checkpoints(here / "checkpoints")[-1], 6)
    told = capfd.readouterr().err
    if (name, fault) == ("manifest.json", "missing"):
        assert told == "", "a checkpoint without a manifest is none"
        return
    assert "WARNING: step-00000008 was skipped: " in told
    assert f"checkpoints/step-00000008/{name}" in told
    assert json.loads((here / "events.jsonl").read_text())["passed_over"].keys() == {"step-00000008"}


@pytest.mark.parametrize("names", [["rank-00000.safetensors"], ["rank-00000.safetensors", "manifest.json"]])
def test_the_files_of_another_step_with_or_without_its_manifest_are_passed_over(
    store: ObjectStore, here: Path, names: list[str]
) -> None:
    for name in names:
        content = store.get(f"checkpoints/step-00000006/{name}") or b""
        assert len(content) == store.size(f"checkpoints/step-00000008/{name}"), "or its size would tell"
        store.put(f"checkpoints/step-00000008/{name}", content)
    begun(store, here).finish()
    assert checkpoints(here) == [6]


def test_exact_passes_over_nothing(store: ObjectStore, here: Path) -> None:
    damage(store, 8, "shorter")
    with pytest.raises(CheckpointError, match=r"step-00000008/rank.* has \d+ bytes instead of \d+.*run\.resume=exact"):
        begun(store, here, exact=True)
    damage(store, 8, "a bit")
    with pytest.raises(CheckpointError, match=r"run\.resume=exact"):
        begun(store, here, exact=True).finish()
    assert checkpoints(here) == []


def test_where_no_checkpoint_is_whole_nothing_begins_anew(store: ObjectStore, here: Path) -> None:
    for step in (4, 6, 8):
        damage(store, step, "a bit")
    found = begun(store, here)
    with pytest.raises(CheckpointError, match=r"has checkpoints, but none is intact: step-00000008.*step-00000004"):
        found.finish()
    assert checkpoints(here) == []


NEWEST = "checkpoints/step-00000008"


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json"])
def test_what_is_damaged_here_is_brought_again_and_nothing_is_lost(store: ObjectStore, there: Path, name: str) -> None:
    damaged = flip_bit(there / NEWEST / name)
    kept, why = restore.refetch(store, there / NEWEST)
    assert (kept, why) == (there / "checkpoints" / "damaged-step-00000008", "")
    assert kept is not None and (kept / name).read_bytes() == damaged
    assert is_of(there / NEWEST, 8)
    assert restore.find_partial(there) == []


def test_only_what_is_damaged_here_is_fetched(store: ObjectStore, there: Path) -> None:
    (there / NEWEST / "manifest.json").unlink()
    with mock.patch.object(ObjectStore, "read", side_effect=AssertionError("it was read again")):
        kept, _ = restore.refetch(store, there / NEWEST)
    assert kept is not None
    assert is_of(there / NEWEST, 8)
    flip_bit(there / NEWEST / "rank-00000.safetensors")
    assert (kept / "rank-00000.safetensors").read_bytes() == store.get(f"{NEWEST}/rank-00000.safetensors")


def test_a_folder_without_a_manifest_makes_room_for_the_checkpoint(store: ObjectStore, there: Path) -> None:
    (there / NEWEST / "manifest.json").unlink()
    begun(store, there).finish()
    assert is_of(there / NEWEST, 8)
    assert (there / "checkpoints" / "damaged-step-00000008" / "rank-00000.safetensors").is_file()


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("absent", "has no checkpoint step-00000008"),
        ("damaged there too", "is damaged: its content is not what was written"),
        ("shorter there", "is damaged: it has"),
        ("another history", "belongs to another history of this run"),
        ("silent", "no answer for 60 s"),
    ],
)
def test_a_store_that_cannot_help_says_why_and_leaves_the_folder(
    store: ObjectStore, there: Path, case: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "another history":
        shutil.rmtree(there / NEWEST)
        state = {"step": 8, "random": True}
        save(there / "checkpoints", 8, state=state)
    flip_bit(there / NEWEST / "rank-00000.safetensors")
    before = {path: path.read_bytes() for path in sorted(there.rglob("*")) if path.is_file()}
    if case == "absent":
        store.remove(f"{NEWEST}/manifest.json")
    elif case in ("damaged there too", "shorter there"):
        damage(store, 8, "shorter" if case == "shorter there" else "flipped")
    elif case == "silent":
        monkeypatch.setattr(ObjectStore, "get", mock.Mock(side_effect=DataError(f"{store.url}: no answer for 60 s")))
    kept, why = restore.refetch(store, there / NEWEST)
    assert kept is None
    assert told in why
    assert {path: path.read_bytes() for path in sorted(there.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("late", ["the list", "the index", "the index says more"])
def test_neither_a_late_list_nor_a_late_index_decides(store: ObjectStore, here: Path, late: str) -> None:
    if late == "the index":
        store.put("checkpoints.json", b'{"step-00000004": null}')
    if late == "the index says more":
        store.put("checkpoints.json", b'{"step-00000004": 7, "step-00000099": null, "../../elsewhere": null}')
    with mock.patch.object(ObjectStore, "names", return_value=[]) if late == "the list" else nullcontext():
        begun(store, here).finish()
    assert checkpoints(here) == [8]


def test_what_was_brought_before_an_interruption_is_not_brought_again(store: ObjectStore, here: Path) -> None:
    found = begun(store, here)
    assert found.partial is not None
    original = ObjectStore.fetch

    def interrupted(store: ObjectStore, name: str, file: Path, size: int, sha256: str) -> None:
        original(store, name, file, size, sha256)
        raise DataError(f"{store.url_of(name)}: no answer for 60 s")

    with mock.patch.object(ObjectStore, "fetch", interrupted), pytest.raises(DataError, match="no answer"):
        found.finish()
    assert (checkpoints(here), found.skipped) == ([], {}), "a store that does not answer damages nothing"
    again = begun(store, here)
    with mock.patch.object(ObjectStore, "read", side_effect=AssertionError("it was read again")):
        again.finish()
    assert checkpoints(here) == [8]


def test_a_description_that_leads_out_of_the_folder_is_refused(store: ObjectStore, here: Path) -> None:
    described = json.loads(store.get("run.json") or b"")
    store.put("run.json", json.dumps({"../outside": described["config.yaml"]}).encode())
    with pytest.raises(DataError, match="lies outside a run's folder"):
        begun(store, here)
    assert not (here.parent / "outside").exists()


def test_a_manifest_whose_files_lead_out_of_the_folder_is_passed_over(store: ObjectStore, here: Path) -> None:
    at = "checkpoints/step-00000008/manifest.json"
    content = json.loads(store.get(at) or b"")
    content["files"] = {"../../outside": next(iter(content["files"].values()))}
    content.pop("sha256")
    store.put(at, manifest.encode({**content, "sha256": manifest.digest(content)}))
    found = begun(store, here)
    found.finish()
    assert (checkpoints(here), list(found.skipped)) == ([6], ["step-00000008"])
    assert not list(here.parent.rglob("outside"))


class KilledError(BaseException):
    pass


def test_whenever_an_upload_is_killed_the_newest_whole_checkpoint_is_found_and_the_rest_is_sent_later(
    there: Path, tmp_path: Path
) -> None:
    """Before every single write and removal of an upload that replaces one checkpoint by another."""
    paths = commit.find_checkpoints(there / "checkpoints")[:2]
    found: list[int] = []
    for instant in range(100):
        store = ObjectStore(f"memory://killed-{instant}")
        sender = CheckpointUploader(store, there, None, Retention(1))
        sender.commit(paths[0], paths[0].name, commit.read_manifest(paths[0]).files)
        (there / "config.yaml").write_text(f"recipe: test  # {instant}\n")  # described anew
        calls = iter(range(1000))
        originals = {name: getattr(ObjectStore, name) for name in ("put", "send", "remove")}

        def killed(name: str, instant: int = instant, calls: Any = calls, originals: Any = originals) -> Any:
            def act(*arguments: Any) -> Any:
                if next(calls) == instant:
                    raise KilledError
                return originals[name](*arguments)

            return act

        whole = True
        with ExitStack() as patched:
            for name in originals:
                patched.enter_context(mock.patch.object(ObjectStore, name, killed(name)))
            try:
                sender.commit(paths[1], paths[1].name, commit.read_manifest(paths[1]).files)
            except KilledError:
                whole = False
        store_lock.claim(store, there)
        (there / store_lock.LOCAL_FILE).unlink()
        here = tmp_path / f"here {instant}"
        begun(store, here).finish()
        found += checkpoints(here)
        assert is_of(commit.find_checkpoints(here / "checkpoints")[-1], found[-1])
        assert (here / "config.yaml").read_text().startswith("recipe: test")
        again = CheckpointUploader(store, there, None, Retention(1))
        again.commit(paths[1], paths[1].name, commit.read_manifest(paths[1]).files)
        restored = restore.find_newest(store, tmp_path / f"again {instant}", -1, {})
        assert restored is not None and restored.step == 6 and store.names("checkpoints") == ["step-00000006"]
        if whole:
            break
    assert found == sorted(found) and set(found) == {4, 6} and len(found) > 6


# a whole run --------------------------------------------------------------------------------------------------------

STEPS = 6
WORDS = (
    "train", "small.py:Small", "train.global_batch=8", "run.name=a", f"train.steps={STEPS}", "layout.world_size=2",
    "checkpoint.every=1", "task.dropout=0.2", "layout.threads=1",
)  # fmt: skip


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Train in a folder, which stands for a host of its own."""
    folder.mkdir(exist_ok=True)
    jobs.task_file(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return main.main([*WORDS, *words])


def final(folder: Path) -> dict[str, str]:
    """A hash of every array of a run's last checkpoint: which rank has written it may differ."""
    path = commit.find_checkpoints(folder / "runs" / "a" / "checkpoints")[-1]
    assert commit.open_checkpoint(path).step == STEPS
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in load(path).items()}


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_run_that_is_killed_and_loses_its_folder_ends_as_if_it_never_stopped(
    server: stores.Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert trained(tmp_path / "never stopped", monkeypatch) == 0
    upload = f"checkpoint.upload.url=s3://{stores.BUCKET}/runs"
    first, second, store = tmp_path / "first", tmp_path / "second", server.store("runs/a")
    first.mkdir()
    jobs.task_file(first)
    with jobs.started([jobs.UNISONO, *WORDS, upload, "task.hangs=1"], first) as running:  # in the third step
        jobs.wait_for(lambda: store.get("checkpoints/step-00000001/manifest.json") is not None, 120)
        os.kill(running.pid, signal.SIGKILL)
        assert jobs.all_gone(first, 10), "what uploads ends with its run"
    shutil.rmtree(first)
    capfd.readouterr()

    assert trained(second, monkeypatch, upload, "run.allow_change=[task.hangs]") == 0
    told = capfd.readouterr().out
    assert f"restored step-00000001 from {store.url}\n" in told and "resuming after step 1\n" in told
    assert f"uploaded step {STEPS} to {store.url}" in told
    made = [event["step"] for event in jobs.events(second / "runs" / "a") if "loss" in event and not event.get("eval")]
    assert made == list(range(2, STEPS + 1))
    assert final(second) == final(tmp_path / "never stopped")
    assert any(name.startswith("optimizer/") for name in final(second)) and len({*final(second).values()}) > 4
    assert server.parts() == []
    assert f"step-{STEPS:08d}" in store.names("checkpoints")
    for name in store.names("checkpoints"):  # every one that has a manifest is whole
        at = f"checkpoints/{name}"
        if (manifest := store.get(f"{at}/manifest.json")) is not None:
            for file, written in json.loads(manifest)["files"].items():
                assert store.sha256(f"{at}/{file}", written["size"]) == written["sha256"]

    # The same name on other hosts: another run, and one that must not be continued.
    assert trained(tmp_path / "third", monkeypatch, upload, "optim.lr=0.5") == 2
    assert "already holds another run:\n  optim.lr: " in capfd.readouterr().err
    assert trained(tmp_path / "fourth", monkeypatch, upload, "run.resume=never") == 2
    assert "already holds a run, and run.resume=never" in capfd.readouterr().err
    assert store.get(f"checkpoints/step-{STEPS:08d}/manifest.json") is not None


def test_a_store_that_cannot_be_used_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the task's file, which it has to import
    assert trained(tmp_path, monkeypatch, "checkpoint.upload.url=dropbox://runs") == 2
    assert "dropbox:// needs a package that is not installed" in capfd.readouterr().err
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as closed:  # nobody listens
        closed.bind(("127.0.0.1", 0))
        words = (f"checkpoint.upload.options={{endpoint_url: 'http://127.0.0.1:{closed.getsockname()[1]}'}}",)
        words += ("checkpoint.upload.deadline=2", "checkpoint.upload.url=s3://bucket/runs")
        assert trained(tmp_path, monkeypatch, *words) == 2
    told = capfd.readouterr().err
    assert "checkpoint.upload.url: s3://bucket/runs/a/" in told and "Nothing was started" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.py"]


# a run that has to go -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("environment")
def test_a_run_that_has_to_go_waits_for_its_upload_as_long_as_the_deadline_lets_it(
    server: stores.Server, tmp_path: Path
) -> None:
    jobs.task_file(tmp_path)
    marks = tmp_path / "marks"
    marks.mkdir()
    words = [jobs.UNISONO, *WORDS, "run.name=b", "train.steps=3000", "checkpoint.every=null", "task.sleep=0.01"]
    words += [f"task.marks={marks}", f"checkpoint.upload.url=s3://{stores.BUCKET}/runs"]
    with jobs.started(words, tmp_path) as process:
        jobs.training(marks, 2, 120)
        process.terminate()
        _, told = process.communicate(timeout=90)
    assert process.returncode == 75, told
    (saved,) = commit.find_checkpoints(tmp_path / "runs" / "b" / "checkpoints")
    assert f"preempted after step {commit.read_manifest(saved).step} of 3000, which is saved." in told
    assert server.store("runs/b").get(f"checkpoints/{saved.name}/manifest.json") is not None


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_finished_run_that_has_to_go_waits_for_its_upload_no_longer_than_the_deadline(
    server: stores.Server, tmp_path: Path
) -> None:
    jobs.task_file(tmp_path)
    words = [jobs.UNISONO, *WORDS, "run.name=c", "task.sleep=0.05", "launch.preempt_deadline=6"]
    words += [f"checkpoint.upload.url=s3://{stores.BUCKET}/runs", "checkpoint.upload.required=true"]
    store, run = server.store("runs/c"), tmp_path / "runs" / "c"
    last = f"step-{STEPS:08d}"
    try:
        with jobs.started(words, tmp_path, **server.environment) as process:
            jobs.wait_for(lambda: (run / "checkpoints" / "step-00000002").exists(), 120)
            server.stop()
            jobs.wait_for(lambda: (run / "checkpoints" / last).exists(), 60)
            time.sleep(3)
            process.terminate()
            began = time.monotonic()
            output, told = process.communicate(timeout=60)
            seconds = time.monotonic() - began
            assert jobs.all_gone(tmp_path, 5)
    finally:
        server.start()
    assert "waiting for the upload of step 6" in output
    assert f"the checkpoint of step 6 is not in {store.url}" in output
    assert store.get(f"checkpoints/{last}/manifest.json") is None
    assert process.returncode == 75, told
    assert f"preempted after step {STEPS} of {STEPS}, which is saved. Resume with:\n  unisono train " in told
    assert "did not meet" not in told and "passed before all ranks" not in told
    assert seconds < 6 + 4, "the end of the processes included, on a busy machine"
