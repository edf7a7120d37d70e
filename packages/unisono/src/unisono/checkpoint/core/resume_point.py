"""Decides whether a run may resume and from which checkpoints; done once, by the process that resolves the run.

Each checkpoint's provenance is compared with this start, by manifests alone. Which of these checkpoints is intact
is determined later, by all ranks together (`unisono.checkpoint.core.resume`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from unisono.checkpoint.core import commit, placement, provenance
from unisono.checkpoint.core.manifest import Checkpoint, folder_name, parse_step
from unisono.checkpoint.core.provenance import Provenance, ProvenanceDifference
from unisono.config.resolved_run import Candidate, ResumePoint
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import CheckpointError, FormatError, RunError, UnavailableError

log = logging.getLogger(__name__)
# Fetches a damaged checkpoint from a store; returns where the damaged copy is now, or None and why it could not.
Refetch = Callable[[Path], tuple[Path | None, str]]

EXACT_ADVICE = "run.resume=exact accepts no other; run.resume=must resumes from the previous one"
KEYS = frozenset({"step", "total", "random", "micro_batch", "plan", "ledger", "best", "trackers"})  # of the state
OPTIONAL_KEYS = frozenset({"callbacks"})  # of a checkpoint's state, since they came later
WEIGHT_PREFIXES = ("model/", "ema/", "adapter/")  # arrays of a checkpoint that holds the model only
_ARRAYS = (*WEIGHT_PREFIXES, "optimizer/", "carry/", "spikes/", "rank-")


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that was skipped.

    Attributes:
        name: original name of its folder.
        why: reason why it cannot be used, with file and tensor.
        kept_as: its name now.
    """

    name: str
    why: str
    kept_as: str = ""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint of a run whose manifest can be read; its other files are not read.

    Attributes:
        checkpoint: None if there is none.
        rejected: newer ones whose manifest cannot be read.
        refetched: the damaged local copy of this one, if the store had it intact.
    """

    checkpoint: Checkpoint | None = None
    rejected: list[RejectedCheckpoint] = field(default_factory=list)
    refetched: RejectedCheckpoint | None = None


def newest_readable(folder: Path, refetch: Refetch | None = None) -> NewestCheckpoint:
    """The newest checkpoint whose manifest can be read.

    Args:
        folder: of the checkpoints.
        refetch: fetches a damaged checkpoint from a store; the folder is then held by this process.

    Raises:
        FormatError: if it is of another version.
    """
    rejected: list[RejectedCheckpoint] = []
    for path in reversed(commit.find_checkpoints(folder)):
        again = None if refetch is None else partial(refetch_checkpoint, path, refetch)
        checkpoint, why, refetched = open_or_refetch(path.name, partial(commit.read_manifest, path), again)
        if checkpoint is not None:
            _check_known_parts(checkpoint)
            return NewestCheckpoint(checkpoint, rejected, refetched)
        rejected.append(RejectedCheckpoint(path.name, why))
    return NewestCheckpoint(None, rejected)


def decide_resume_point(
    folder: Path, config: RunConfig, here: Provenance, newest: NewestCheckpoint, steps: int | None
) -> ResumePoint | None:
    """Decide whether a run may resume from its newest checkpoint, and from which older ones if that one is damaged.

    Args:
        folder: of the run.
        config: concrete.
        here: provenance of this start.
        newest: may be in a store, about to be fetched.
        steps: of the whole run; None if not known yet.

    Raises:
        RunError: if this start is a different run, or the checkpoint cannot be resumed, or all have gone.
        CheckpointError: if a checkpoint is damaged and no other may be used instead.
    """
    exact, first = config.run.resume == "exact", newest.checkpoint
    if newest.rejected and exact:
        raise CheckpointError(f"{newest.rejected[0].why} {EXACT_ADVICE}")
    if first is None and newest.rejected:
        raise no_valid_checkpoint(folder / placement.NAME, newest.rejected)
    if first is None:
        placement.refuse_lost(folder)
        if exact or config.run.resume == "must":
            raise RunError(
                f"{folder} has no checkpoint to resume from, and run.resume={config.run.resume}; start it with "
                "run.resume=auto"
            )
        return None

    def damaged(name: str, why: str) -> Candidate:
        return Candidate(name, parse_step(name), damage=why)

    paths = commit.find_checkpoints(folder / placement.NAME)
    candidate = _check_candidate(folder, config, here, first, steps, paths)
    if newest.refetched is not None:
        candidate = replace(candidate, refetched=(newest.refetched.why, newest.refetched.kept_as))
    candidates = [*(damaged(one.name, one.why) for one in newest.rejected), candidate]
    for path in reversed(paths if not exact else []):
        if parse_step(path.name) < first.step:
            try:
                older, why = _try_open(partial(commit.read_manifest, path))
            except UnavailableError as error:  # not needed while a newer one is intact, and never passed over
                log.warning("%s", error)
                break
            if older is None:
                candidates.append(damaged(path.name, why))
                continue
            with suppress(CheckpointError, RunError, KeyError):  # e.g. from another history of the run
                _check_known_parts(older)
                candidates.append(_check_candidate(folder, config, here, older, steps, paths))
    return ResumePoint(tuple(candidates), bool(first.state["random"]))


def list_all(folder: Path) -> ResumePoint | None:
    """All checkpoints of a run, without comparing provenance, for read-only uses."""
    names = [path.name for path in reversed(commit.find_checkpoints(folder / placement.NAME))]
    return ResumePoint(tuple(Candidate(name, parse_step(name)) for name in names)) if names else None


def _check_candidate(
    folder: Path, config: RunConfig, here: Provenance, checkpoint: Checkpoint, steps: int | None, paths: Sequence[Path]
) -> Candidate:
    differs = provenance.compare(checkpoint.about, here, config, checkpoint.state["random"])
    provenance.check_compatible(str(folder), differs, config, checkpoint.step)
    if steps is not None:
        _check_resumable(checkpoint, steps, paths, differs)
    return Candidate(folder_name(checkpoint.step), checkpoint.step, differs.to_json(), tuple(differs.lines()))


def no_valid_checkpoint(folder: Path, rejected: Sequence[RejectedCheckpoint]) -> CheckpointError:
    """The error for a run whose checkpoints are all damaged: starting over would discard its events."""
    return CheckpointError(
        f"{folder}: no checkpoint is intact. {' '.join(one.why for one in rejected)} Restore one from a copy, or "
        "choose another run.name to start over"
    )


def open_or_refetch(
    name: str, open_checkpoint: Callable[[], Checkpoint], refetch: Callable[[], tuple[str | None, str]] | None
) -> tuple[Checkpoint | None, str, RejectedCheckpoint | None]:
    """Open a checkpoint; if it is damaged, fetch it again and open what came.

    Args:
        name: of its folder.
        open_checkpoint: opens it.
        refetch: fetches it; returns the damaged copy's new name, or None and why that failed. None without a store.

    Returns:
        The checkpoint, or None and why it cannot be used; and the damaged copy if it was replaced.
    """
    checkpoint, why = _try_open(open_checkpoint)
    if checkpoint is not None or refetch is None:
        return checkpoint, why, None
    kept_as, failed = refetch()
    if kept_as is None:
        return None, f"{why} It could not be fetched again: {failed}.", None
    return *_try_open(open_checkpoint), RejectedCheckpoint(name, why, kept_as)


def _try_open(open_checkpoint: Callable[[], Checkpoint]) -> tuple[Checkpoint | None, str]:
    """A checkpoint, or why it cannot be used, without the advice to delete it; an unknown format raises."""
    try:
        return open_checkpoint(), ""
    except FormatError:
        raise
    except CheckpointError as error:
        return None, str(error).partition(" Delete ")[0]


def refetch_checkpoint(path: Path, refetch: Refetch) -> tuple[str | None, str]:
    """Fetch a checkpoint again; returns the damaged copy's new name, or None and why that failed."""
    try:
        kept_as, why = refetch(path)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    if kept_as is not None:
        log.warning("%s was damaged and was fetched again; the damaged copy is kept as %s", path, kept_as.name)
    return kept_as.name if kept_as else None, why


def _check_known_parts(checkpoint: Checkpoint) -> None:
    """Reject a checkpoint with unknown parts, or without required ones."""
    unknown = sorted(checkpoint.state.keys() - KEYS - OPTIONAL_KEYS)
    unknown += sorted({name.partition("/")[0] for name in checkpoint.arrays if not name.startswith(_ARRAYS)})
    missing = sorted(KEYS - checkpoint.state.keys())
    if unknown or missing:
        faults = (
            f"has {', '.join(unknown)}, which this version does not know" if unknown else "",
            f"lacks {', '.join(missing)}" if missing else "",
        )
        version = checkpoint.about.get("versions", {}).get("unisono", "another version")
        raise FormatError(
            f"{checkpoint.path} was written by another version of Unisono ({version}): it "
            + " and ".join(filter(None, faults))
            + ". Resume the run with the version that wrote it, or use its weights only (unisono.load_weights)"
        )


def _check_resumable(checkpoint: Checkpoint, steps: int, paths: Sequence[Path], differs: ProvenanceDifference) -> None:
    """Raise for a model-only checkpoint, unless all steps are done, or one from a run of another length."""
    if checkpoint.holds == "model" and checkpoint.step < steps:
        older = [path for path in paths if path < checkpoint.path and _holds_everything(path)]
        way = (
            f"{older[-1].name} holds everything: to resume from it, move {checkpoint.path.name} out of "
            f"{checkpoint.path.parent}"
            if older
            else f"no checkpoint in {checkpoint.path.parent} can be"
        )
        raise RunError(
            f"{checkpoint.path} holds the model only (checkpoint.final=model): it can be loaded (unisono.load_weights, "
            f"unisono.load_model), exported, evaluated and fine-tuned from, but not resumed; {way}"
        )
    was = checkpoint.state["total"]
    if was != steps and not differs.mathematics:  # remaining differences were allowed by run.allow_change
        raise RunError(
            f"{checkpoint.path} belongs to a run of {was} steps, but this one has {steps}, so schedules would differ; "
            "restore the original data and settings"
        )


def _holds_everything(path: Path) -> bool:
    try:
        return commit.read_manifest(path).holds == "everything"
    except (CheckpointError, KeyError):
        return False
