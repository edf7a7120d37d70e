"""Checkpoints of nodes that have a folder of their own each (`launch.shared_folder=false`): whole in the store alone.

The first rank of each node sends the files that the ranks there have written. Once all nodes have, rank 0 sends the
manifest, which makes them a checkpoint. So a save lasts until its upload has ended, and no node ever has a whole
checkpoint of its own writing. What it wrote it keeps, as a download that has begun: the next start fetches what other
nodes have written, and verifies all of it (`unisono.checkpoint.remote.restore`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import NAME as MANIFEST
from unisono.checkpoint.core.manifest import folder_name, parse_step
from unisono.checkpoint.remote import restore, store_lock, upload
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.config import CONFIG_FILE
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import Checkpoint
from unisono.runtime.errors import CheckpointError, RunError, UploadError
from unisono.runtime.files import fsync_path, remove_folder, write_whole


@dataclass(frozen=True)
class StoredParts:
    """Commits the checkpoints of a run in its store; see `unisono.checkpoint.core.commit.NodeParts`.

    Attributes:
        store: of the run.
        folder: of the run, on this node.
        settings: the `checkpoint` group of the configuration.
        ranks: those of this node.
        start: this one, which must still own the store; the folder's record may be of a later one by then.
    """

    store: ObjectStore
    folder: Path
    settings: Checkpoint
    ranks: range
    start: str | None

    @classmethod
    def of_run(cls, run: ResolvedRun, rank: int) -> StoredParts | None:
        """Those of the node of a rank; None where all nodes share a folder."""
        if run.config.launch.shared_folder:
            return None
        start = store_lock.read_local(run.directory).get("start")
        return cls(_store_of(run), run.directory, run.config.checkpoint, run.ranks_of_folder(rank), start)

    def send(self, path: Path, name: str, files: Mapping[str, Any]) -> None:
        """Upload this node's files of a checkpoint, each read back.

        Raises:
            UploadError: if one could not be uploaded.
        """
        self._run_process({"name": name, "path": str(path.resolve()), "files": dict(files), "part": True})

    def commit(self, path: Path, name: str, files: Mapping[str, Any], metric: Mapping[str, float] | None) -> None:
        """Upload a checkpoint's manifest and the run's description, and remove checkpoints that need not be kept.

        Raises:
            UploadError: if they could not be uploaded.
        """
        measured = dict(metric) if metric else None
        self._run_process({"name": name, "path": str(path.resolve()), "sent": dict(files), "metric": measured})

    def keep(self, path: Path, name: str, manifest: bytes) -> Path:
        """Keep a folder as this node's part of a finished checkpoint, and remove earlier ones; returns it."""
        (path / MANIFEST).write_bytes(manifest)
        kept = path.with_name(f"{commit.PARTIAL}{name}")
        for old in path.parent.glob(f"{commit.PARTIAL}*"):
            remove_folder(old)
        path.rename(kept)
        fsync_path(kept.parent)
        return kept

    def _run_process(self, order: dict[str, Any]) -> None:
        """Have a process of its own, of the lowest priority, carry out one order."""
        process = upload.start_process(self.settings, self.store, self.folder, self.start, beats=False)
        try:
            with contextlib.suppress(BrokenPipeError):  # it says why below
                upload.write_line(process, {**order, "step": parse_step(order["name"])})
                upload.write_line(process, {"end": True})
            assert process.stdout is not None
            for line in process.stdout:
                report = json.loads(line)
                if "uploaded" in report:
                    return
                if "stopped" in report:
                    raise RunError(f"this run was continued elsewhere: {report['why']}. Stop one of the two")
                if "failed" in report:
                    raise UploadError(f"{self.store.url}: {report['why']}")
            code = process.wait()
            raise UploadError(f"the upload process exited with code {code}; see {self.folder / 'logs' / 'upload.log'}")
        finally:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def follow(run: ResolvedRun, owner: Mapping[str, str]) -> None:
    """Make this node's folder, which it holds, one of the run that node 0 has resolved and whose store it has claimed.

    Args:
        run: in the folder of this node.
        owner: what node 0's folder records of the store (`unisono.checkpoint.remote.store_lock`).

    Raises:
        ConfigError: if this node cannot read and write the store.
        RunError: if it sees another one than node 0, or the folder belongs to another run.
    """
    store = _store_of(run)
    upload.check_store(store)
    if (store_lock.read_owner(store) or {}).get("start") != owner["start"]:
        raise RunError(
            f"checkpoint.upload.url: {store.url} on this node is not the store of node 0. All nodes have to reach the "
            "same one"
        )
    here = store_lock.read_local(run.directory)
    if (run.directory / CONFIG_FILE).is_file() and here.get("run") != owner["run"]:
        raise RunError(
            f"{run.directory} on this node already holds another run of this name. Move it away, or choose another "
            "run.name"
        )
    write_whole(run.directory / store_lock.LOCAL_FILE, json.dumps(dict(owner), indent=1) + "\n", lasting=True)


def fetch(run: ResolvedRun, sha256: str) -> None:
    """Have the checkpoint from which a run resumes whole in this node's folder, from its store.

    Args:
        run: in the folder of this node.
        sha256: of the checkpoint's manifest on node 0.

    Raises:
        CheckpointError: if the store does not have it intact.
    """
    assert run.resume is not None
    path = run.directory / placement.NAME / run.resume.candidates[0].name
    with contextlib.suppress(CheckpointError):
        if commit.open_checkpoint(path).sha256 == sha256:
            return
    kept, why = restore.refetch(_store_of(run), path)
    if kept is None:
        raise CheckpointError(
            f"node 0 resumes from {path.name}, which this node could not get: {why}. If it was written on one node, "
            "start the run there once more, with launch.nodes=1, so that it is uploaded"
        )


def complete_newest(run: ResolvedRun) -> None:
    """Have the newest checkpoint of a run that has ended whole in this folder, to be exported and evaluated.

    Raises:
        CheckpointError: if the store does not have it intact.
    """
    step = commit.find_newest_step(run.directory / placement.NAME)
    if step is None:
        return
    path = run.directory / placement.NAME / folder_name(step)
    if not (path / MANIFEST).is_file() and (why := restore.refetch(_store_of(run), path)[1]):
        raise CheckpointError(f"{path.name} could not be fetched whole: {why}")


def _store_of(run: ResolvedRun) -> ObjectStore:
    store = upload.open_store(run.config)
    assert store is not None  # or the configuration is refused
    return store
