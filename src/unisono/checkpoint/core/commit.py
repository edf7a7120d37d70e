"""The protocol on disk: a checkpoint is whole or absent, and never overwritten.

Every rank writes its pieces into one temporary folder, hashes them meanwhile and has them on the disk. When all agree
that they have, rank 0 writes the manifest last, flushes everything and renames the folder; only then may older
checkpoints go. A folder without a manifest, or whose name is temporary, is not a checkpoint, so on a store that cannot
rename, the manifest alone is the commit (`in_order`). A manifest holds JSON, and nothing on the way back is unpickled.

runs/<name>/checkpoints/
  step-00001000/
    rank-00000.safetensors …   pieces of arrays
    manifest.json              see `unisono.checkpoint.core.manifest`
  damaged-step-00001000/       what could no longer be read when the run came to this step again
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from unisono.checkpoint.core import arrays, manifest, verify
from unisono.checkpoint.core.manifest import Checkpoint, read
from unisono.checkpoint.core.retention import Known, Retention
from unisono.engines import host_arrays
from unisono.engines.state import Shard
from unisono.runtime.communicator import Alone, Group, Json
from unisono.runtime.errors import CheckpointError, FormatError, NonFiniteError, SaveError, UnisonoError
from unisono.runtime.files import remove_folder, sync

__all__ = ["Checkpoint", "aside", "find", "in_order", "name_of", "open_", "read", "save", "sweep"]

log = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = ".writing-"
# What a file system says that is away for a while, or over a quota. A full disk is none of these: it was told how much
# would come before the first step.
_PASSING = {
    errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EDQUOT, errno.EAGAIN, errno.EBUSY, errno.EREMOTEIO, errno.ENOTCONN,
    errno.ECONNRESET, errno.EHOSTDOWN,
}  # fmt: skip


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    state: dict[str, Json],
    group: Group,
    keep: int | Retention,
    *,
    about: Mapping[str, Json] | None = None,
    metric: Mapping[str, float] | None = None,
    parent: str | None = None,
    holds: str = "everything",
    allowed: Callable[[], None] | None = None,
) -> Path:
    """Write one checkpoint; collective. Returns its folder.

    Args:
        folder: `checkpoints` of the run.
        step: updates made.
        shards: this rank's pieces; those of all ranks make the state whole.
        state: JSON, the same on every rank.
        group: all ranks.
        keep: how many of the newest checkpoints remain, or which.
        about: what made it, JSON; of rank 0.
        metric: of an evaluation of this state; of rank 0.
        parent: name of the checkpoint before; None takes the newest of an earlier step.
        holds: `everything`, or `model` if no run can go on from it.
        allowed: called on rank 0 before anything is touched and just before the rename; raises where the run belongs to
            another start by now.

    Raises:
        SaveError: on every rank if one of them could not write; older checkpoints stay as they were.
        NonFiniteError: on every rank if one of them has a parameter or a moment that is not finite.
    """
    final = folder / name_of(step)
    # A name of its own: a start that wakes up, after another has taken over, writes into no folder of that one.
    temporary = folder / f"{_TEMPORARY}{final.name}-{uuid.uuid4().hex[:8]}"
    retention = keep if isinstance(keep, Retention) else Retention(keep)
    faults = _agree(group, "look at its part of the state", lambda: not_finite(shards))
    if any(faults):
        told = "; ".join(f"rank {rank}: {', '.join(names)}" for rank, names in enumerate(faults) if names)
        raise NonFiniteError(
            f"the state after step {step} holds numbers that are not finite ({told}). It is not saved; older "
            "checkpoints are untouched."
        )

    def begin() -> Json:
        if group.rank == 0:
            if allowed is not None:
                allowed()
            _make(folder)
            sweep(folder)
            _refuse_to_overwrite(final)
            temporary.mkdir()
        return [arrays.size(shards), temporary.name]

    try:
        begun = _agree(group, "make a folder for the checkpoint", begin)
        total, temporary = sum(size for size, _ in begun), folder / begun[0][1]

        def pieces() -> Json:
            with _explaining_a_full_disk(folder, total):
                return _write_pieces(temporary, shards, group.rank, step)

        written = _agree(group, "write its part of the checkpoint", pieces)

        def finish() -> None:
            if group.rank != 0:
                return
            content = {
                "format": manifest.FORMAT, "step": step, "parent": parent or _before(folder, step), "holds": holds,
                "metric": dict(metric) if metric else None, "about": dict(about or {}), "state": state,
                **manifest.merge(written),
            }  # fmt: skip
            with _explaining_a_full_disk(folder, total):
                _write(temporary / manifest.NAME, manifest.dumps(content))
                sync(temporary)
            if allowed is not None:
                allowed()
            if final.exists():
                final.rename(aside(final))
            temporary.rename(final)
            try:
                sync(folder)
            except OSError:  # its name may not outlive a loss of power
                final.rename(temporary)
                raise

        _agree(group, "finish the checkpoint", finish)
    except SaveError:
        if group.rank == 0:  # all ranks know, so nobody writes there any more
            with suppress(OSError):
                shutil.rmtree(temporary)
        raise
    if group.rank == 0:
        _remove_older(folder, step, retention)
    return final


def find(folder: Path) -> list[Path]:
    """Finished checkpoints in a folder, the oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / manifest.NAME).is_file()]
    return sorted(found, key=_step_of)


def open_(path: Path, group: Group | None = None) -> Checkpoint:
    """Read a checkpoint's manifest and verify every byte of its files.

    Args:
        path: its folder.
        group: all ranks, which then each verify a share of the bytes, and agree; collective. None: this process
            verifies all of them.

    Raises:
        CheckpointError: naming the file that is missing, damaged or of another checkpoint, and an array in it; with a
            group on every rank, whoever found it.
    """
    if group is None:
        return verify.content(read(path), Alone())
    checkpoint, fault, other = None, None, False
    try:
        checkpoint = read(path)
    except CheckpointError as error:
        fault, other = str(error), isinstance(error, FormatError)
    mine = [fault, checkpoint.sha256 if checkpoint else None, other]
    everyone = group.gather(mine, "all ranks to read the manifest")
    for rank, (told, _, of_another_version) in enumerate(everyone):
        if told:
            told = told if rank == 0 else f"rank {rank}: {told}"
            raise FormatError(told) if of_another_version else CheckpointError(told)
    if any(digest != everyone[0][1] for _, digest, _ in everyone):
        raise CheckpointError(f"{path}: the ranks read different manifests there; is it a shared folder?")
    assert checkpoint is not None
    return verify.content(checkpoint, group)


def in_order(checkpoint: Checkpoint) -> list[str]:
    """The files of a checkpoint in the order in which they have to appear: whatever has a manifest is finished."""
    return [*checkpoint.files, manifest.NAME]


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def not_finite(shards: Sequence[Shard]) -> list[str]:
    """The arrays that must be finite and are not, with the number of elements at fault; the first few of them."""
    found = []
    for shard in shards:
        if not shard.finite:
            continue
        values = host_arrays.to_numpy(shard.data)
        if host_arrays.is_foreign(values.dtype):  # no reduction is written for these
            values = values.astype(np.float32)
        if values.dtype.kind == "c":
            values = values[..., None].view(values.real.dtype)
        if values.dtype.kind != "f" or not values.size:
            continue
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):  # without a mask of all elements
            found.append(f"'{shard.name}' ({int((~np.isfinite(values)).sum())} of {values.size:,})")
    return [*found[:4], f"and {len(found) - 4} more"] if len(found) > 4 else found


def _write_pieces(folder: Path, shards: Sequence[Shard], rank: int, step: int) -> Json:
    """This rank's file, and what the manifest says of it."""
    if not shards:
        return {"files": {}, "arrays": {}}
    file = folder / f"rank-{rank:05d}.safetensors"
    # The step makes the headers of two checkpoints differ even where nothing else does.
    note = {"unisono": str(manifest.FORMAT), "step": str(step), "rank": str(rank)}
    written = arrays.write(file, shards, note)
    return {"files": {file.name: written["file"]}, "arrays": written["arrays"]}


def _agree(group: Group, what: str, act: Callable[[], Json]) -> list[Json]:
    """Let every rank act, and let all of them fail if one of them did."""
    result, fault, passing = None, None, False
    try:
        result = act()
    except OSError as error:
        passing = error.errno in _PASSING
        fault = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    except Exception as error:  # whatever it is, the others must not wait for this rank
        fault = str(error) if isinstance(error, UnisonoError) else f"{type(error).__name__}: {error}"
        log.exception("a checkpoint could not be written")
    outcomes = group.gather([result, fault, passing], f"all ranks to {what}")
    faults = [f"rank {rank} could not {what}: {why}" for rank, (_, why, _) in enumerate(outcomes) if why]
    if faults:
        failed = SaveError("; ".join(faults) + ". Older checkpoints are untouched.")
        failed.passing = all(passing for _, why, passing in outcomes if why)
        raise failed
    return [outcome for outcome, _, _ in outcomes]


@contextmanager
def _explaining_a_full_disk(folder: Path, needed: int) -> Iterator[None]:
    """Say what all ranks need and what was free before, where the system says `No space left`."""
    free = shutil.disk_usage(folder).free
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        why = "no space left" if error.errno == errno.ENOSPC else "the disk quota is used up"
        late = "; it was used up meanwhile" if free > needed and error.errno == errno.ENOSPC else ""
        text = f"{why}: needs {_for_people(needed)}, {_for_people(free)} free at {folder}{late}"
        raise OSError(error.errno, text) from error


def _for_people(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def _make(folder: Path) -> None:
    """A folder whose name is on the disk, too."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        sync(folder.parent)


def _refuse_to_overwrite(final: Path) -> None:
    """Refuse a step that has a checkpoint which can be read. One that cannot makes room later, and is kept aside."""
    if not (final / manifest.NAME).is_file():
        return
    try:
        open_(final)
    except CheckpointError as error:
        log.warning("%s; it will be kept as %s", error, aside(final).name)
        return
    raise SaveError(
        f"{final} is there and whole, and a checkpoint is never overwritten. Move it away, or resume from it"
    )


def aside(final: Path) -> Path:
    """A name that is free for a checkpoint that is damaged, or may be; none is lost."""
    names = (f"damaged-{final.name}" + (f"-{number}" if number else "") for number in itertools.count())
    return next(path for name in names if not (path := final.with_name(name)).exists())


def _before(folder: Path, step: int) -> str | None:
    earlier = [path.name for path in find(folder) if _step_of(path) < step]
    return earlier[-1] if earlier else None


def _remove_older(folder: Path, made: int, retention: Retention) -> None:
    """Let go of what need not remain. The checkpoint is finished: what fails here is told, and harms nothing.

    What cannot be read is neither counted nor removed: it must not take the place of one that can.
    """
    known: dict[int, Path] = {}
    metrics = []
    for path in find(folder):
        try:
            checkpoint = read(path)
        except CheckpointError as error:
            log.warning("%s", error)
            continue
        known[_step_of(path)] = path
        metrics.append(Known(_step_of(path), checkpoint.metric))
    for step in retention.going(made, metrics):
        old = known[step]
        try:  # goes as it came, by one rename: a half of it must not be found
            remove_folder(old.rename(folder / f"{_TEMPORARY}{old.name}"))
        except OSError as error:
            log.warning("%s could not be removed: %s", old, error)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind. What cannot be removed is reported, and stops nothing."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        try:
            remove_folder(path)
        except OSError as error:
            log.warning("%s was left by an interrupted save and cannot be removed: %s", path, error)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)
