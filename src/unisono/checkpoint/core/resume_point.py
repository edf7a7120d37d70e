"""Whether a run may resume, and from which checkpoints: decided once, by the process that resolves the run.

What every checkpoint says of its run is held against this start, by manifests alone. Which of these checkpoints is whole
is found out later, by all ranks together (`unisono.checkpoint.core.resume`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.checkpoint.core import commit, provenance
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.core.provenance import About, Difference
from unisono.config.resolved_run import Candidate, ResumePoint
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import CheckpointError, FormatError, RunError

log = logging.getLogger(__name__)
# Fetches a damaged checkpoint from a store: where the damaged one is now, or None and why it could not.
Refetch = Callable[[Path], tuple[Path | None, str]]

NO_OTHER = "No other may be taken with run.resume=exact; run.resume=must resumes from the one before"
KEYS = frozenset(
    {"step", "total", "random", "micro_batch", "plan", "ledger", "best", "trackers"}
)  # of a checkpoint's state
OPTIONAL = frozenset({"callbacks"})  # of a checkpoint's state, since they came later
WEIGHTS = ("model/", "ema/", "adapter/")  # arrays of a checkpoint that holds the model only
_ARRAYS = (*WEIGHTS, "optimizer/", "carry/", "spikes/", "rank-")
_MODEL_ONLY = (
    "holds the model only (checkpoint.final=model): it can be loaded (unisono.load_weights, unisono.load_model), "
    "exported, evaluated and fine-tuned from, but not resumed"
)


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that was passed over.

    Attributes:
        name: of its folder, as it was.
        why: it cannot be used, with file and tensor.
        aside: how it is called now.
    """

    name: str
    why: str
    aside: str = ""


@dataclass(frozen=True)
class Newest:
    """The newest checkpoint of a run whose manifest can be read; its files are not looked at.

    Attributes:
        checkpoint: None if there is none.
        rejected: newer ones whose manifest cannot be read.
        refetched: the damaged copy of this one, where the store had it whole.
    """

    checkpoint: Checkpoint | None = None
    rejected: list[RejectedCheckpoint] = field(default_factory=list)
    refetched: RejectedCheckpoint | None = None


def newest_readable(folder: Path, refetch: Refetch | None = None) -> Newest:
    """The newest checkpoint whose manifest can be read.

    Args:
        folder: of the checkpoints.
        refetch: fetches a damaged checkpoint from a store; the folder is then held by this process.

    Raises:
        FormatError: if it is of another version.
    """
    rejected: list[RejectedCheckpoint] = []
    for path in reversed(commit.find(folder)):
        refetched = None
        checkpoint, why = _read(path)
        if checkpoint is None and refetch is not None:
            aside, more = fetch_again(path, refetch)
            if aside is not None:
                refetched = RejectedCheckpoint(path.name, why, aside)
                checkpoint, why = _read(path)
            else:
                why = f"{why} It could not be fetched again: {more}."
        if checkpoint is not None:
            _known(checkpoint)
            return Newest(checkpoint, rejected, refetched)
        rejected.append(RejectedCheckpoint(path.name, why))
    return Newest(None, rejected)


def decide(folder: Path, config: RunConfig, here: About, newest: Newest, steps: int | None) -> ResumePoint | None:
    """Whether a run may resume from its newest checkpoint, and from which older ones if that turns out to be damaged.

    Args:
        folder: of the run.
        config: of this start, concrete.
        here: what this start is; parts that are None are not compared.
        newest: of the run; it may lie elsewhere, about to be fetched.
        steps: of the whole run; None where they are not known yet.

    Raises:
        RunError: where this start is another run, or the checkpoint cannot be resumed.
        CheckpointError: where there is a damaged checkpoint, and none that may be taken in its place.
    """
    exact, first = config.run.resume == "exact", newest.checkpoint
    if newest.rejected and exact:
        raise CheckpointError(f"{newest.rejected[0].why} {NO_OTHER}")
    if first is None and newest.rejected:
        raise none_whole(folder / "checkpoints", newest.rejected)
    if first is None:
        if exact or config.run.resume == "must":
            raise nothing_there(folder, config)
        return None
    paths = commit.find(folder / "checkpoints")
    candidate = _candidate(folder, config, here, first, steps, paths)
    if newest.refetched is not None:
        candidate = replace(candidate, refetched=(newest.refetched.why, newest.refetched.aside))
    candidates = [*(_damaged(one.name, one.why) for one in newest.rejected), candidate]
    for path in reversed(paths if not exact else []):
        if _step_of(path.name) < first.step:
            older, why = _read(path)
            if older is None:
                candidates.append(_damaged(path.name, why))
                continue
            with suppress(CheckpointError, RunError, KeyError):  # of another past of the run
                _known(older)
                candidates.append(_candidate(folder, config, here, older, steps, paths))
    return ResumePoint(tuple(candidates), bool(first.state["random"]))


def everything(folder: Path) -> ResumePoint | None:
    """All checkpoints of a run, with nothing compared, for what only reads them."""
    names = [path.name for path in reversed(commit.find(folder / "checkpoints"))]
    return ResumePoint(tuple(Candidate(name, _step_of(name)) for name in names)) if names else None


def _candidate(
    folder: Path, config: RunConfig, here: About, checkpoint: Checkpoint, steps: int | None, paths: Sequence[Path]
) -> Candidate:
    differs = provenance.compare(checkpoint.about, here, config, checkpoint.state["random"])
    provenance.refuse(str(folder), differs, config)
    if steps is not None:
        _resumable(checkpoint, steps, paths, differs)
    name = commit.name_of(checkpoint.step)
    return Candidate(name, checkpoint.step, differs.plain(), tuple(differs.lines()))


def _damaged(name: str, why: str) -> Candidate:
    return Candidate(name, _step_of(name), damage=why)


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def none_whole(folder: Path, rejected: Sequence[RejectedCheckpoint]) -> CheckpointError:
    """The refusal of a run whose checkpoints are all damaged: to start anew would take its events back."""
    return CheckpointError(
        f"{folder}: no checkpoint is whole. {' '.join(one.why for one in rejected)} Restore one from a copy, or "
        "choose another run.name to start anew"
    )


def nothing_there(folder: Path, config: RunConfig) -> RunError:
    """The refusal of a run that must be resumed and cannot be."""
    return RunError(
        f"{folder} has no checkpoint to resume from, and run.resume={config.run.resume}; start it with run.resume=auto"
    )


def _read(path: Path) -> tuple[Checkpoint | None, str]:
    """A checkpoint by its manifest alone, or why it cannot be read; another format is refused at once."""
    try:
        return commit.read(path), ""
    except FormatError:
        raise
    except CheckpointError as error:
        return None, without_advice(str(error))


def fetch_again(path: Path, refetch: Refetch) -> tuple[str | None, str]:
    """The name of the damaged checkpoint once it was fetched again, or why it was not."""
    try:
        aside, why = refetch(path)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    if aside is not None:
        log.warning("%s was damaged and was fetched again; the damaged one is kept as %s", path, aside.name)
    return aside.name if aside else None, why


def without_advice(fault: str) -> str:
    """What is wrong with a checkpoint, without the advice to delete it: here it is passed over and kept."""
    return fault.partition(" Delete ")[0]


def _known(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint with parts that this version does not know, or without some that it needs.

    Raises:
        FormatError: naming them.
    """
    unknown = sorted(checkpoint.state.keys() - KEYS - OPTIONAL)
    unknown += sorted({name.partition("/")[0] for name in checkpoint.arrays if not name.startswith(_ARRAYS)})
    missing = sorted(KEYS - checkpoint.state.keys())
    if unknown or missing:
        version = checkpoint.about.get("versions", {}).get("unisono", "another version")
        raise FormatError(
            f"{checkpoint.path} is of another version of Unisono ({version}): it "
            + " and ".join(
                filter(
                    None,
                    [
                        f"has {', '.join(unknown)}, which this version does not know" if unknown else "",
                        f"lacks {', '.join(missing)}" if missing else "",
                    ],
                )
            )
            + ". Resume the run with the version that wrote it, or take its weights (unisono.load_weights)"
        )


def _resumable(checkpoint: Checkpoint, steps: int, paths: Sequence[Path], differs: Difference) -> None:
    """Refuse to resume from a checkpoint of the model only, unless all steps are made; and from one of another length.

    Raises:
        RunError: with the newest checkpoint that can be resumed.
    """
    if checkpoint.holds == "model" and checkpoint.step < steps:
        older = [path for path in paths if path < checkpoint.path and _holds_everything(path)]
        way = (
            f"{older[-1].name} holds everything: move {checkpoint.path.name} out of {checkpoint.path.parent} to resume "
            "from there"
            if older
            else f"no checkpoint in {checkpoint.path.parent} can be"
        )
        raise RunError(f"{checkpoint.path} {_MODEL_ONLY}; {way}")
    was = checkpoint.state["total"]
    if was != steps and not differs.mathematics:  # those that are there were allowed
        raise RunError(
            f"{checkpoint.path} is of a run of {was} steps, and this one has {steps}, so schedules would be others; "
            "bring data and settings back as they were"
        )


def _holds_everything(path: Path) -> bool:
    try:
        return commit.read(path).holds == "everything"
    except (CheckpointError, KeyError):
        return False
