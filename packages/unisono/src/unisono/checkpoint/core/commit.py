"""The commit protocol on disk: a checkpoint is complete or absent, and never overwritten.

Every rank writes its pieces into one temporary folder, hashes them while writing, and flushes them to disk. When all
ranks have finished, rank 0 writes the manifest, flushes everything and renames the folder; only then may older
checkpoints be removed. A folder without a manifest or with a temporary name is not a checkpoint, so on a store without
rename, the manifest alone is the commit. A manifest is JSON; reading never unpickles anything.

runs/<name>/checkpoints/
  step-00001000/
    rank-00000.safetensors …   pieces of arrays
    manifest.json              see `unisono.checkpoint.core.manifest`
  damaged-step-00001000/       was unreadable when the run reached this step again
  .fetching-step-00001000/     is being downloaded from a store, or is what one node has of a checkpoint there
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from unisono.checkpoint.core import arrays, assets, manifest, verify
from unisono.checkpoint.core.manifest import Checkpoint, folder_name, parse_step, read_manifest
from unisono.checkpoint.core.retention import Retention
from unisono.engines import host_arrays
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator, Json, SingleProcess
from unisono.runtime.communication.consensus import raise_everywhere, run_everywhere
from unisono.runtime.errors import (
    CheckpointError,
    NonFiniteError,
    SaveError,
    UnavailableError,
    UnisonoError,
    UploadError,
)
from unisono.runtime.files import UNREACHABLE, fsync_path, raise_unavailable, remove_folder
from unisono.runtime.text import format_bytes
from unisono.runtime.untrusted import safe_writing

__all__ = [
    "Checkpoint",
    "Snapshot",
    "find_checkpoints",
    "free_damaged_path",
    "open_checkpoint",
    "read_manifest",
    "remove_leftovers",
    "save_checkpoint",
]

log = logging.getLogger(__name__)

PARTIAL = ".fetching-"
_TEMPORARY = ".writing-"
# Errors of a file system that is temporarily unreachable or over quota. A full disk is not among them, since space is
# checked before the first step.
_TRANSIENT_ERRORS = UNREACHABLE | {errno.EIO, errno.EDQUOT, errno.EREMOTEIO}
_REMEDY = " See to the space, the quota and the permissions there."


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint saves of a run, as one rank has it.

    Attributes:
        step: updates made.
        shards: this rank's pieces; together, all ranks hold the whole state.
        state: JSON; used on rank 0.
        about: provenance of the run, JSON; used on rank 0.
        metric: from an evaluation of exactly this state; used on rank 0.
        parent: name of the checkpoint before; None takes the newest of an earlier step.
        holds: `everything`, or `model` if no run can resume from it.
    """

    step: int
    shards: Sequence[ArrayShard]
    state: dict[str, Json]
    about: Mapping[str, Json] = field(default_factory=dict)
    metric: Mapping[str, float] | None = None
    parent: str | None = None
    holds: str = "everything"


class NodeParts(Protocol):
    """Commits checkpoints in a store, because each node has a folder of its own; see `unisono.checkpoint.remote`.

    Attributes:
        ranks: those of this node.
    """

    @property
    def ranks(self) -> range: ...

    def send(self, path: Path, name: str, files: Mapping[str, Any]) -> None:
        """Upload this node's files of a checkpoint, from a folder."""

    def commit(self, path: Path, name: str, files: Mapping[str, Any], metric: Mapping[str, float] | None) -> None:
        """Upload a checkpoint's manifest, once all nodes have sent their files, which are given."""

    def keep(self, path: Path, name: str, manifest: bytes) -> Path:
        """Keep the files in a folder as this node's part of a finished checkpoint; returns their folder now."""


def save_checkpoint(
    folder: Path,
    snapshot: Snapshot,
    group: Communicator,
    keep: int | Retention,
    *,
    allowed: Callable[[], None] | None = None,
    parts: NodeParts | None = None,
) -> Path:
    """Write one checkpoint; collective. Returns its folder.

    Args:
        folder: `checkpoints` of the run.
        snapshot: what it holds.
        group: all ranks.
        keep: how many of the newest checkpoints to keep, or a `Retention`.
        allowed: called on the first rank that sees the folder before anything there is written and just before a
            rename; raises if the run belongs to another start by now.
        parts: commits it in a store; None if all ranks see the same folder.

    Raises:
        SaveError: on every rank if one of them could not write; older checkpoints stay as they were.
        NonFiniteError: on every rank if one of them has a parameter or a moment that is not finite.
    """
    step, shards = snapshot.step, snapshot.shards
    ranks = range(group.size) if parts is None else parts.ranks  # that see this folder
    rank, leads = group.rank, group.rank == ranks[0]
    final = folder / folder_name(step)
    # A unique name, so that a stale process that wakes up after a takeover cannot write into the new owner's folder.
    temporary = folder / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex[:8]}"
    retention = keep if isinstance(keep, Retention) else Retention(keep)
    faults = _run_on_all_ranks(group, "check its part of the state", lambda: _find_not_finite(shards))
    if any(faults):
        places = "; ".join(f"rank {each}: {', '.join(names)}" for each, names in enumerate(faults) if names)
        raise NonFiniteError(
            f"the state after step {step} is not finite ({places}). It was not saved; older checkpoints are untouched."
        )

    def begin() -> Json:
        if leads:
            if allowed is not None:
                allowed()
            is_new = not folder.is_dir()
            # Not the run's folder: if that is gone, so is what this checkpoint belongs to.
            safe_writing.make_folder(folder.parent, folder.name)
            if is_new:
                fsync_path(folder.parent)
            remove_leftovers(folder)
            _refuse_to_overwrite(final)
            temporary.mkdir()
        return [arrays.total_bytes(shards), temporary.name if leads else ""]

    try:
        begun = _run_on_all_ranks(group, "create a folder for the checkpoint", begin)
        total, temporary = sum(begun[each][0] for each in ranks), folder / begun[ranks[0]][1]

        mine: dict[str, Json] = {"files": {}, "arrays": {}}

        def pieces() -> None:
            with _explain_full_disk(folder, total):
                if not shards:
                    return
                file = temporary / f"rank-{rank:05d}.safetensors"
                # The step makes the headers of two checkpoints differ even if nothing else does.
                note = {"unisono": str(manifest.FORMAT), "step": str(step), "rank": str(rank)}
                part = arrays.write_shards(file, shards, note)
                mine.update(files={file.name: part["file"]}, arrays=part["arrays"])

        _run_on_all_ranks(group, "write its part of the checkpoint", pieces)
        # A part describes every array: among a thousand ranks, far too much to be told to all.
        written = group.gather_to_first(mine, "the parts of the checkpoint")
        files = group.gather(mine["files"], "the files of the checkpoint") if parts is not None else []

        def send() -> None:
            assert parts is not None
            if leads:
                parts.send(temporary, final.name, {name: file for each in ranks for name, file in files[each].items()})

        if parts is not None:
            _run_on_all_ranks(group, "upload its part of the checkpoint", send, unhurried=True)

        def finish() -> Json:
            if rank != 0:
                return None
            content = {
                "format": manifest.FORMAT, "step": step, "parent": snapshot.parent or _previous_name(folder, step),
                "holds": snapshot.holds,
                "metric": dict(snapshot.metric) if snapshot.metric else None, "about": dict(snapshot.about),
                "assets": assets.digests(folder.parent), "state": snapshot.state,
                **manifest.merge_manifests(written),
            }  # fmt: skip
            encoded = manifest.encode(content)
            with _explain_full_disk(folder, total):
                _write_file(temporary / manifest.NAME, encoded)
                fsync_path(temporary)
            if allowed is not None:
                allowed()
            if parts is not None:
                parts.commit(temporary, final.name, content["files"], snapshot.metric)
                return encoded.decode()
            if os.path.lexists(final):  # also a link that leads nowhere
                final.rename(free_damaged_path(final))
            temporary.rename(final)
            try:
                fsync_path(folder)
            except OSError:  # the rename may not survive a power failure
                final.rename(temporary)
                raise
            return None

        finished = _run_on_all_ranks(group, "finish the checkpoint", finish, unhurried=parts is not None)
        if parts is not None:  # the manifest is all of it that the other nodes do not have

            def keep_part() -> Json:
                assert parts is not None
                if not leads:
                    return None
                if allowed is not None:
                    allowed()
                try:
                    return str(parts.keep(temporary, final.name, finished[0].encode()))
                except OSError as error:  # it is complete in the store; the next save removes what is left here
                    log.warning("%s is in the store, but this node's part of it could not be kept: %s", final, error)
                    return str(temporary)

            final = Path(_run_on_all_ranks(group, "keep its part of the checkpoint", keep_part)[ranks[0]])
    except SaveError:
        if leads:  # all ranks know of the failure, so none is still writing
            with suppress(OSError):
                shutil.rmtree(temporary)
        raise
    if leads:
        _remove_older(folder, step, retention)
    return final


def find_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in a folder, oldest first.

    Raises:
        UnavailableError: if the folder cannot be listed, or looked into, now: then nobody knows which there are.
    """
    looked_at = folder
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names only
        found = []
        for name in sorted(filter(lambda name: parse_step(name) >= 0, names), key=parse_step):
            looked_at = folder / name / manifest.NAME
            if _is_file(looked_at):
                found.append(folder / name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise_unavailable(looked_at, error)
        raise UnavailableError(f"{looked_at} cannot be looked at: {error.strerror or error}") from error
    return found


def _is_file(path: Path) -> bool:
    """Whether there is a regular file. In contrast to `Path.is_file` of later versions, other errors are raised."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def find_newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint in a folder, or of which it has a part; None if there is none."""
    names = [path.name for path in [*find_checkpoints(folder), *folder.glob(f"{PARTIAL}*")]]
    return max((parse_step(name.removeprefix(PARTIAL)) for name in names), default=None)


def open_checkpoint(path: Path, group: Communicator | None = None) -> Checkpoint:
    """Read a checkpoint's manifest and verify every byte of its files.

    Args:
        path: its folder.
        group: all ranks, which then verify a share of the bytes each and agree; collective. None: this process
            verifies all of them.

    Raises:
        CheckpointError: naming the file that is missing, damaged or from another checkpoint, and an array in it; with a
            group on every rank, whichever found it.
    """
    checkpoint: Checkpoint | None = None

    def read() -> str:
        nonlocal checkpoint
        checkpoint = read_manifest(path)
        return checkpoint.sha256

    group = group or SingleProcess()
    digests = raise_everywhere(group, read, "all ranks to read the manifest")
    if len(set(digests)) > 1:
        raise CheckpointError(f"{path}: ranks read different manifests; is this a shared folder?")
    assert checkpoint is not None
    return verify.verify_content(checkpoint, group)


def _find_not_finite(shards: Sequence[ArrayShard]) -> list[str]:
    """The first few arrays that must be finite and are not, with the number of bad elements."""
    found = []
    for shard in shards:
        if not shard.finite:
            continue
        values = host_arrays.to_numpy(shard.data)
        if host_arrays.is_ml_dtype(values.dtype):  # no reduction is written for these
            values = values.astype(np.float32)
        if values.dtype.kind == "c":
            values = values[..., None].view(values.real.dtype)
        if values.dtype.kind != "f" or not values.size:
            continue
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):  # avoids allocating a mask
            found.append(f"'{shard.name}' ({int((~np.isfinite(values)).sum())} of {values.size:,})")
    return [*found[:4], f"and {len(found) - 4} more"] if len(found) > 4 else found


def _run_on_all_ranks(
    group: Communicator, what: str, act: Callable[[], Json], *, unhurried: bool = False
) -> list[Json]:
    """Run a function on every rank; all ranks fail if one does. An `unhurried` one may outlast the group's timeout."""

    def attempt() -> Json:
        result, fault, passing, of_system = None, None, False, False
        try:
            result = act()
        except OSError as error:
            passing, of_system = error.errno in _TRANSIENT_ERRORS, bool(error.errno)  # ours say what to do themselves
            fault = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
        except Exception as error:  # of any kind: the others must not wait for this rank
            fault = str(error) if isinstance(error, UnisonoError) else f"{type(error).__name__}: {error}"
            passing = isinstance(error, UploadError | UnavailableError)
            log.exception("a checkpoint could not be written")
        return [result, fault, passing, of_system]

    wait = f"all ranks to {what}"
    outcomes = run_everywhere(group, attempt, wait) if unhurried else group.gather(attempt(), wait)
    faults = [f"rank {rank} could not {what}: {why}" for rank, (_, why, *_) in enumerate(outcomes) if why]
    if faults:
        remedy = _REMEDY if any(of_system for *_, of_system in outcomes) else ""
        failed = SaveError("; ".join(faults) + f". Older checkpoints are untouched.{remedy}")
        failed.transient = all(passing for _, why, passing, _ in outcomes if why)
        raise failed
    return [outcome for outcome, *_ in outcomes]


@contextmanager
def _explain_full_disk(folder: Path, needed: int) -> Iterator[None]:
    """Add to `No space left` errors how much all ranks need, and how much was free before; to others the folder."""
    free = shutil.disk_usage(folder).free
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            error.filename = error.filename or str(folder)  # an error of a descriptor names no file
            raise
        why = "no space left" if error.errno == errno.ENOSPC else "the disk quota is used up"
        late = "; it was used up meanwhile" if free > needed and error.errno == errno.ENOSPC else ""
        text = f"{why}: needs {format_bytes(needed)}, {format_bytes(free)} free at {folder}{late}"
        raise OSError(error.errno, text) from error


def _refuse_to_overwrite(final: Path) -> None:
    """Refuse a step that has a readable checkpoint. An unreadable one is renamed later and kept."""
    if not _is_file(final / manifest.NAME):
        return
    try:
        open_checkpoint(final)
    except CheckpointError as error:
        log.warning("%s; it will be kept as %s", error, free_damaged_path(final).name)
        return
    raise SaveError(
        f"{final} already exists and is intact, and a checkpoint is never overwritten. Move it away, or resume from it"
    )


def free_damaged_path(final: Path) -> Path:
    """A free name for a damaged checkpoint, so that none is lost."""
    names = (f"damaged-{final.name}" + (f"-{number}" if number else "") for number in itertools.count())
    return next(path for name in names if not os.path.lexists(path := final.with_name(name)))


def _previous_name(folder: Path, step: int) -> str | None:
    earlier = [path.name for path in find_checkpoints(folder) if parse_step(path.name) < step]
    return earlier[-1] if earlier else None


def _remove_older(folder: Path, made: int, retention: Retention) -> None:
    """Remove checkpoints that need not be kept, and log failures. Unreadable ones are neither counted nor removed."""
    known: dict[int, Path] = {}
    metrics: dict[int, Mapping[str, float] | None] = {}
    try:
        found = find_checkpoints(folder)
    except UnavailableError as error:  # the next save removes them
        log.warning("%s", error)
        return
    for path in found:
        try:
            metrics[parse_step(path.name)] = read_manifest(path).metric
            known[parse_step(path.name)] = path
        except (CheckpointError, UnavailableError) as error:
            log.warning("%s", error)
    for step in retention.find_removable(made, metrics):
        old = known[step]
        try:  # renamed first, so that a partially removed checkpoint is never found
            remove_folder(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            log.warning("%s could not be removed: %s", old, error)


def find_interrupted(folder: Path) -> list[Path]:
    """Return what an interrupted save left behind."""
    return sorted(folder.glob(f"{_TEMPORARY}*"))


def remove_leftovers(folder: Path) -> None:
    """Remove what an interrupted save left behind. What cannot be removed is logged."""
    for path in find_interrupted(folder):
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("%s was left by an interrupted save and cannot be removed: %s", path, error)


def _write_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    fsync_path(path)
