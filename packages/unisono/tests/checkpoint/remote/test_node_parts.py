"""Nodes with folders of their own: a checkpoint is whole in the store or absent, and each node keeps what it wrote."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests.checkpoint.saved import STATE, Threads, flip_bit, shards
from unisono.checkpoint.core import commit, resume
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.resume_point import NewestCheckpoint
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.exchange import export
from unisono.checkpoint.remote import node_parts, store_lock, upload
from unisono.checkpoint.remote.node_parts import StoredParts
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.checkpoint.remote.upload_process import CheckpointUploader
from unisono.config.resolved_run import Candidate, ResolvedRun, ResumePoint
from unisono.config.schema.run import RunConfig
from unisono.data.ledger import Ledger, merge_marks
from unisono.launch.nodes import own_folder
from unisono.launch.resolving import resolve
from unisono.runtime.communication import consensus
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, RunError, SaveError, UploadError

NAME = "step-00000004"
OWNER = {"run": "one", "start": "now", "host": "", "process": "", "folder": ""}


@dataclass(frozen=True)
class Parts(StoredParts):
    """The same without processes: orders are carried out here, or fail."""

    fails: bool = False
    waits_for: Callable[[], Any] = lambda: None

    def _run_process(self, order: dict[str, Any]) -> None:
        self.waits_for()
        if self.fails:
            raise UploadError("the store does not answer")
        uploader = CheckpointUploader(self.store, self.folder, None, Retention(2))
        try:
            if order.get("part"):
                uploader.send(Path(order["path"]), order["name"], order["files"])
            else:
                uploader.check_sent(order["name"], order["sent"])
                uploader.commit(Path(order["path"]), order["name"], {}, order["metric"])
        except DataError as error:
            raise UploadError(str(error)) from error


def make_config(**groups: Any) -> RunConfig:
    return RunConfig.model_validate({"recipe": "a", "train": {"steps": 1}, "optim": {"kind": "sgd"}, **groups})


def nodes_config(folder: Path, **launch: Any) -> RunConfig:
    """Two nodes of a process each, with a folder for each and a store for both."""
    given = {"nodes": 2, "node_rank": 0, "rendezvous": "127.0.0.1:1", "shared_folder": False, **launch}
    return make_config(
        run={"name": "run", "dir": str(folder)}, layout={"world_size": 2, "strategy": "ddp", "device": "cpu"},
        checkpoint={"upload": {"url": f"file://{folder.parent}/store"}}, launch=given,
    )  # fmt: skip


def saved(
    tmp_path: Path,
    store: ObjectStore,
    step: int = 4,
    fails: bool = False,
    other: ObjectStore | None = None,
    allowed: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """A checkpoint of two nodes, whose parts are kept in `0` and `1`; `other` is the store that node 1 sees."""
    group = Threads(2)
    config = nodes_config(tmp_path / "0")

    def save() -> Any:
        folder = tmp_path / str(group.rank) / "run"
        folder.mkdir(parents=True, exist_ok=True)
        mine = range(group.rank, group.rank + 1)
        seen = other if other is not None and group.rank == 1 else store
        parts = Parts(seen, folder, config.checkpoint, mine, None, fails=fails and group.rank == 1)
        may = partial(allowed, group.rank)
        snapshot = Snapshot(step, shards(step, group.rank, 2), STATE)
        try:
            return commit.save_checkpoint(folder / "checkpoints", snapshot, group, 2, parts=parts, allowed=may)
        except SaveError as error:
            return error

    return group.run(save)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_store_has_it_whole_and_each_node_its_part(tmp_path: Path, store: ObjectStore) -> None:
    paths = saved(tmp_path, store)
    assert is_of_two(tmp_path / "store" / "run" / "checkpoints" / NAME, 4)
    assert [path.name for path in paths] == [f".fetching-{NAME}"] * 2
    assert [names(path) for path in paths] == [["manifest.json", f"rank-0000{n}.safetensors"] for n in range(2)]
    assert not any(commit.find_checkpoints(path.parent) for path in paths), "a part is no checkpoint"


def test_a_later_one_replaces_the_part(tmp_path: Path, store: ObjectStore) -> None:
    saved(tmp_path, store)
    for path in saved(tmp_path, store, step=6):
        assert [each.name for each in path.parent.iterdir()] == [".fetching-step-00000006"]
        assert commit.find_newest_step(path.parent) == 6


def test_it_is_absent_on_all_nodes_where_one_could_not_send_its_part(tmp_path: Path, store: ObjectStore) -> None:
    errors = saved(tmp_path, store, fails=True)
    assert "rank 1 could not upload its part of the checkpoint: the store does not answer" in str(errors[0])
    assert [error.transient for error in errors] == [True, True], "so that it is tried again"  # type: ignore[attr-defined]
    assert not (tmp_path / "store" / "run" / "checkpoints" / NAME / "manifest.json").exists()
    assert [list((tmp_path / str(node) / "run" / "checkpoints").iterdir()) for node in range(2)] == [[], []]


def test_it_is_absent_where_a_node_has_sent_its_part_elsewhere(tmp_path: Path, store: ObjectStore) -> None:
    elsewhere = ObjectStore(f"file://{tmp_path}/elsewhere/run")
    errors = saved(tmp_path, store, other=elsewhere)
    assert f"{NAME}/rank-00001.safetensors is missing" in str(errors[0])
    assert not (tmp_path / "store" / "run" / "checkpoints" / NAME / "manifest.json").exists()


def test_an_upload_may_take_longer_than_ranks_wait_for_each_other(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: while the store is slow, the ranks tell each other again and again that they are still there."""
    monkeypatch.setattr(consensus, "_SIGN_OF_LIFE", 0.01)
    signs, several, config = list[str](), threading.Event(), nodes_config(tmp_path / "0")

    class Watched(Threads):
        def gather(self, value: Any, what: str) -> list[Any]:
            signs.append(what)
            if all(signs.count(f"all ranks to {act} the checkpoint") > 6 for act in awaited):
                several.set()
            return super().gather(value, what)

    group, awaited = Watched(2), ["upload its part of"]

    def save() -> Any:
        folder = tmp_path / str(group.rank) / "run"
        folder.mkdir(parents=True)

        def wait() -> None:
            assert several.wait(10), "the other rank still waits for the same word"
            if "finish" not in awaited:
                awaited.append("finish")
                several.clear()

        mine = range(group.rank, group.rank + 1)
        waits = wait if group.rank == 0 else lambda: None
        parts = Parts(store, folder, config.checkpoint, mine, None, waits_for=waits)
        snapshot = Snapshot(4, shards(4, group.rank, 2), STATE)
        return commit.save_checkpoint(folder / "checkpoints", snapshot, group, 2, parts=parts)

    assert [path.name for path in group.run(save)] == [f".fetching-{NAME}"] * 2


def test_an_old_manifest_goes_before_the_files_that_it_names(tmp_path: Path, store: ObjectStore) -> None:
    store.put(f"checkpoints/{NAME}/manifest.json", b"of another history of this run")
    saved(tmp_path, store, fails=True)
    assert store.get(f"checkpoints/{NAME}/manifest.json") is None
    assert store.get(f"checkpoints/{NAME}/rank-00000.safetensors") is not None


def test_a_node_whose_folder_has_gone_to_another_start_removes_nothing_there(
    tmp_path: Path, store: ObjectStore
) -> None:
    left = tmp_path / "1" / "run" / "checkpoints" / ".writing-step-00000002-of-the-new-start"
    left.mkdir(parents=True)

    def lost(rank: int) -> None:
        if rank == 1:
            raise RunError("this run was taken over")

    errors = saved(tmp_path, store, allowed=lost)
    assert "rank 1 could not create a folder for the checkpoint: this run was taken over" in str(errors[0])
    assert left.is_dir() and store.names("checkpoints") == []


def test_a_part_that_cannot_be_kept_is_no_failed_save(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim: once its manifest is in the store, a checkpoint is finished, whatever the disks say."""

    def full(*_: Any) -> Path:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        changed.setattr(StoredParts, "keep", full)
        paths = saved(tmp_path, store)
    assert is_of_two(tmp_path / "store" / "run" / "checkpoints" / NAME, 4)
    assert all(path.name.startswith(f".writing-{NAME}") for path in paths)
    assert "this node's part of it could not be kept: [Errno 28] No space left on device" in caplog.text
    for path in saved(tmp_path, store, step=6):
        assert [each.name for each in path.parent.iterdir()] == [".fetching-step-00000006"]


@pytest.mark.slow
def test_what_becomes_of_an_order_in_a_process_of_its_own(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: the process says how its order ended, and each end is an error of its own."""
    folder = tmp_path / "run"
    folder.mkdir()
    path = commit.save_checkpoint(folder / "checkpoints", Snapshot(4, shards(4), STATE), SingleProcess(), 2)
    files = commit.read_manifest(path).files
    store.put("owner.json", json.dumps({**OWNER, "start": "mine"}).encode())
    (folder / "upload.json").write_text(json.dumps({**OWNER, "start": "of another start, which has the folder now"}))
    parts = StoredParts(store, folder, make_config().checkpoint, range(1), "mine")
    parts.send(path, NAME, files)
    assert store.names(f"checkpoints/{NAME}") == ["rank-00000.safetensors"]
    parts.commit(path, NAME, files, {"loss": 1.0})
    assert store.get(f"checkpoints/{NAME}/manifest.json") == (path / "manifest.json").read_bytes()
    with pytest.raises(RunError, match=r"this run was continued elsewhere: process .* Stop one of the two"):
        replace(parts, start="an earlier one").send(path, "step-00000006", files)
    flip_bit(path / "rank-00000.safetensors")
    with pytest.raises(UploadError, match=r"rank-00000\.safetensors is damaged: its content is not what was written"):
        parts.send(path, "step-00000006", files)
    start = upload.start_process

    def killed(*arguments: Any, **settings: Any) -> Any:
        process = start(*arguments, **settings)
        process.kill()
        return process

    monkeypatch.setattr(upload, "start_process", killed)
    with pytest.raises(UploadError, match=r"the upload process exited with code -9; see .*upload\.log"):
        parts.send(path, NAME, files)


@pytest.mark.parametrize("lost", [False, True])
def test_a_start_fetches_what_the_node_does_not_have(tmp_path: Path, store: ObjectStore, lost: bool) -> None:
    saved(tmp_path, store)
    if lost:
        shutil.rmtree(tmp_path / "1")
    run = resumed(tmp_path, 1)
    sha256 = commit.read_manifest(tmp_path / "0" / "run" / "checkpoints" / f".fetching-{NAME}").sha256
    (tmp_path / "1" / "run" / "checkpoints").mkdir(parents=True, exist_ok=True)
    node_parts.fetch(run, sha256)
    assert is_of_two(run.directory / "checkpoints" / NAME, 4)
    assert [each.name for each in (run.directory / "checkpoints").iterdir()] == [NAME]


def test_a_checkpoint_that_no_other_node_can_get_is_refused(tmp_path: Path, store: ObjectStore) -> None:
    run = resumed(tmp_path, 1)
    (run.directory / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"node 0 resumes from step-00000004, which this node could not get: .* "):
        node_parts.fetch(run, "0" * 64)


def test_node_0_has_the_last_one_whole_in_the_end(tmp_path: Path, store: ObjectStore) -> None:
    saved(tmp_path, store)
    node_parts.complete_newest(resumed(tmp_path, 0))
    assert is_of_two(tmp_path / "0" / "run" / "checkpoints" / NAME, 4)


@pytest.mark.parametrize("stale_alone", [False, True])
def test_the_ledger_of_a_rank_is_that_of_the_node_where_it_was(tmp_path: Path, stale_alone: bool) -> None:
    """The claim: where nodes have changed places, a file that a rank once wrote on another one is no fault."""
    runs = [resumed(tmp_path, node) for node in range(2)]
    for run in runs:
        run.directory.mkdir(parents=True)
    marks = []
    for node, start in ((0, "of an earlier place"), (1, "of the checkpoint")):
        with Ledger(runs[node].directory, 1, 2, 0, start) as ledger:
            ledger.flush()
            marks.append(ledger.mark())
    if stale_alone:
        shutil.rmtree(runs[1].directory / "ledger")
    checkpoint = SimpleNamespace(state={"ledger": merge_marks(None, marks[1:])}, path=Path(NAME))
    group = Threads(2)

    def check() -> Any:
        try:
            return resume._check_ledger(runs[group.rank], checkpoint, group)  # type: ignore[arg-type]
        except CheckpointError as error:
            return str(error)

    for found in group.run(check):
        assert ("rank-00001.jsonl" in found) if stale_alone else found == []


def test_a_part_is_not_passed_over(tmp_path: Path, store: ObjectStore) -> None:
    """The claim: neither a start without the store nor an export takes an older checkpoint, or none, for the newest."""
    run = resumed(tmp_path, 0)
    saved(tmp_path, store)
    (run.directory / "config.yaml").write_text("{}")
    with pytest.raises(RunError, match="has only a part of the newest checkpoint, of step 4; start the run again"):
        export.find_checkpoint(run.directory)
    alone = make_config(run={"name": "run", "dir": str(tmp_path / "0")})
    told = r"run has a part of step-00000004, whose other files are in the store of this run; set checkpoint\.upload"
    with pytest.raises(RunError, match=told):
        resolve._refuse_part_without_store(alone, run.directory, NewestCheckpoint(None))
    resolve._refuse_part_without_store(run.config, run.directory, NewestCheckpoint(None))
    older = commit.save_checkpoint(run.directory / "checkpoints", Snapshot(2, shards(2), STATE), SingleProcess(), 2)
    with pytest.raises(RunError, match=r"of step 4; .* from its store, or choose an older one: step=2"):
        export.find_checkpoint(run.directory)
    assert export.find_checkpoint(run.directory, 2) == older
    newer = commit.save_checkpoint(run.directory / "checkpoints", Snapshot(6, shards(6), STATE), SingleProcess(), 2)
    assert export.find_checkpoint(run.directory) == newer
    resolve._refuse_part_without_store(alone, run.directory, NewestCheckpoint(commit.read_manifest(newer)))


def test_the_process_that_shows_that_the_run_lives_is_started_again(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(given: Any, store: Any, folder: Any, start: str) -> Any:
        started.append(start)
        return SimpleNamespace(poll=lambda: -9, stdout=['{"ended": true}'])

    monkeypatch.setattr(upload, "start_process", start)
    (tmp_path / "upload.json").write_text(json.dumps(OWNER))
    uploads = upload.Uploads(nodes_config(tmp_path), tmp_path, True, print, print)
    (tmp_path / "upload.json").write_text(json.dumps({**OWNER, "start": "a later one"}))
    uploads.enqueue(tmp_path / "a part")
    assert started == ["now", "now"], "with the id of this start, whoever has the folder by then"


# whose folder it is -------------------------------------------------------------------------------------------------


def test_the_folder_of_node_0_is_no_folder_of_another_node(tmp_path: Path) -> None:
    run = resumed(tmp_path, 0)
    run.directory.mkdir(parents=True)
    (run.directory / "nodes.token").write_text("of this start")
    with pytest.raises(RunError, match=r"is the folder of node 0, but launch\.shared_folder=false: leave that out"):
        own_folder.take_over(run, run.config, {}, "of this start", None)  # type: ignore[arg-type]


def test_a_node_that_sees_another_store_than_node_0_is_refused(tmp_path: Path) -> None:
    run = resumed(tmp_path, 1)
    run.directory.mkdir(parents=True)
    with pytest.raises(RunError, match="on this node is not the store of node 0"):
        node_parts.follow(run, {"run": "one", "start": "now"})
    assert not list(run.directory.iterdir())


def test_a_folder_that_holds_another_run_is_refused(tmp_path: Path, store: ObjectStore) -> None:
    store.put("owner.json", json.dumps(OWNER).encode())
    run = resumed(tmp_path, 1)
    run.directory.mkdir(parents=True)
    (run.directory / "config.yaml").write_text("{}")
    (run.directory / "upload.json").write_text(json.dumps({"run": "another"}))
    with pytest.raises(RunError, match="on this node already holds another run of this name"):
        node_parts.follow(run, OWNER)
    (run.directory / "upload.json").write_text(json.dumps({"run": "one"}))
    node_parts.follow(run, OWNER)
    assert store_lock.read_local(run.directory) == OWNER


def test_nodes_that_share_no_folder_need_a_token_and_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_TOKEN", raising=False)
    config = nodes_config(tmp_path)
    with pytest.raises(ConfigError, match=r"launch\.shared_folder=false needs UNISONO_TOKEN"):
        own_folder.check_token(config)
    own_folder.check_token(nodes_config(tmp_path, shared_folder=True))
    monkeypatch.setenv("UNISONO_TOKEN", "a" * 64)
    own_folder.check_token(config)


@pytest.mark.parametrize(
    ("launch", "checkpoint", "told"),
    [
        ({"nodes": 2}, {}, r"launch\.shared_folder=false needs checkpoint\.upload\.url"),
        ({"nodes": 2}, {"final": "hf", "upload": {"url": "file:///store"}}, "checkpoint.final=hf writes one folder"),
        ({"nodes": 1, "node_rank": None, "rendezvous": None}, {}, "is for several nodes, but launch.nodes=1"),
    ],
)
def test_settings_that_cannot_work_are_refused(launch: Any, checkpoint: Any, told: str) -> None:
    given = {"node_rank": 0, "rendezvous": "127.0.0.1:1", "shared_folder": False, **launch}
    with pytest.raises(ValueError, match=told):
        make_config(launch=given, checkpoint=checkpoint)


def test_the_ranks_of_a_folder_are_those_of_its_node(tmp_path: Path) -> None:
    config = nodes_config(tmp_path)
    four = config.model_copy(update={"layout": config.layout.model_copy(update={"world_size": 4})})
    own = ResolvedRun(four, tmp_path)
    assert [own.ranks_of_folder(rank) for rank in range(4)] == [range(2), range(2), range(2, 4), range(2, 4)]
    shared = four.model_copy(update={"launch": four.launch.model_copy(update={"shared_folder": True})})
    assert replace(own, config=shared).ranks_of_folder(3) == range(4)


def resumed(tmp_path: Path, node: int) -> ResolvedRun:
    """A run that resumes from step 4, in the folder of a node; its store is that of the fixture."""
    config = nodes_config(tmp_path / str(node))
    assert upload.open_store(config) == ObjectStore(f"file://{tmp_path}/store/run")
    return ResolvedRun(config, tmp_path / str(node) / "run", ResumePoint((Candidate(NAME, 4),)))


def is_of_two(path: Path, step: int) -> bool:
    """Whether a checkpoint of two ranks is whole."""
    manifest: Mapping[str, Any] = json.loads((path / "manifest.json").read_text())
    assert set(manifest["files"]) == {"rank-00000.safetensors", "rank-00001.safetensors"}
    return commit.open_checkpoint(path).step == step
