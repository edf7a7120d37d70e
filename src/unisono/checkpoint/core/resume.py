"""Which checkpoint a run resumes from, and what a checkpoint keeps so that nothing is lost in between.

Before the model is built all ranks verify together the newest of the checkpoints from which the run may resume (see
`unisono.checkpoint.core.resume_point`). A damaged one is passed over for the one before it, loudly: it is reported,
recorded, and kept aside under another name. With `run.resume=exact` it is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, provenance
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.core.provenance import About, Difference
from unisono.checkpoint.core.resume_point import (
    NO_OTHER,
    WEIGHTS,
    Refetch,
    RejectedCheckpoint,
    fetch_again,
    none_whole,
    without_advice,
)
from unisono.config.resolved_run import ResolvedRun
from unisono.data import ledger
from unisono.data.order.plan import Plan
from unisono.engines.protocol import Engine
from unisono.engines.state import Shard
from unisono.runtime.communicator import Communicator, Json
from unisono.runtime.consensus import raise_everywhere, share_first
from unisono.runtime.errors import CheckpointError, FormatError
from unisono.runtime.files import sync

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """The checkpoint from which a process resumes, and what is worth knowing of it.

    Attributes:
        checkpoint: None for a new run.
        rejected: newer ones that are damaged, the newest first.
        refetched: the damaged copy of this one, where the store had it whole.
        changes: what is not as it was when the checkpoint was written, as JSON.
        lines: the same for people.
        gone: files of the ledger that the checkpoint knows and that are not there.
    """

    checkpoint: Checkpoint | None = None
    rejected: list[RejectedCheckpoint] = field(default_factory=list)
    changes: Mapping[str, Json] = field(default_factory=dict)
    lines: Sequence[str] = ()
    gone: list[str] = field(default_factory=list)
    refetched: RejectedCheckpoint | None = None

    @property
    def step(self) -> int:
        """Updates made; 0 for a new run."""
        return self.checkpoint.step if self.checkpoint else 0

    def kept(self, name: str) -> Any:
        """What the checkpoint's state says under a name; None for a new run."""
        return self.checkpoint.state.get(name) if self.checkpoint else None

    def load(self, engine: Engine, plan: Plan) -> int:
        """Give engine and plan their state; returns the updates made."""
        if self.checkpoint is not None:
            engine.load(self.checkpoint.reader(), weights_only=self.checkpoint.holds == "model")
            if (plans := self.checkpoint.state["plan"]) is not None:
                plan.resume(plans)
            log.info("resuming after step %d from %s", self.step, self.checkpoint.path)
        return self.step

    def report(self) -> list[str]:
        """Lines for the console."""
        found = [
            f"WARNING: {one.why} Falling back to {self.checkpoint.path.name}; the damaged checkpoint is kept as "
            f"{one.aside}"
            for one in self.rejected
            if self.checkpoint is not None
        ]
        if self.refetched is not None:
            found.append(
                f"WARNING: {self.refetched.why} It was fetched again from its store; the damaged one is kept as "
                f"{self.refetched.aside}"
            )
        if self.gone:
            found.append(
                f"WARNING: {', '.join(self.gone)} of the ledger is gone; a new one begins, and `unisono data audit` "
                "cannot say what was consumed before"
            )
        if self.step:
            found.append(f"resuming after step {self.step}")
            found += [f"  {line}" for line in self.lines]
        return found

    def notes(self, steps: int) -> list[dict[str, Json]]:
        """The entries of `events.jsonl` about how a run of so many steps resumed; changes only where a step follows."""
        found: list[dict[str, Json]] = [
            {"fallback": {"from": f.name, "to": self.checkpoint.path.name, "why": f.why, "kept_as": f.aside}}
            for f in self.rejected
            if self.checkpoint is not None
        ]
        if self.refetched is not None:
            one = self.refetched
            found.append({"brought_again": {"name": one.name, "why": one.why, "kept_as": one.aside}})
        return found + ([{"changed": dict(self.changes)}] if self.changes and self.step < steps else [])


# which checkpoint is whole ------------------------------------------------------------------------------------------


def open_newest(
    run: ResolvedRun,
    here: About,
    communicator: Communicator,
    writing: bool = True,
    refetch: Refetch | None = None,
) -> Resumption:
    """The newest checkpoint that is whole, of those from which a run may resume; collective.

    Args:
        run: with the checkpoints from which it may resume.
        here: what this process is; its versions, environment and machine are compared, which only a rank knows.
        communicator: of all ranks.
        writing: False where nothing is to follow but an evaluation: then nothing is renamed, passed over or compared.
        refetch: fetches a damaged checkpoint from a store, and returns where the damaged one is now, or why it could
            not; called on rank 0, and the same everywhere in being None.

    Raises:
        RunError: where `run.resume=exact` and this is another machine or environment.
        CheckpointError: where no checkpoint is whole, or the newest one is not and no other may be taken.
    """
    folder = run.directory / "checkpoints"
    names = communicator.gather([path.name for path in commit.find(folder)], "the checkpoints that all ranks see")
    known = [candidate.name for candidate in run.resume.candidates] if run.resume else []
    if any(seen != names[0] for seen in names) or not set(known) <= set(names[0]):
        newest = [seen[-1] if seen else None for seen in names]
        raise CheckpointError(f"{folder}: the ranks see different checkpoints, {newest}; is it a shared directory?")
    if run.resume is None:
        return Resumption()
    strict = run.config.run.resume == "exact" or not writing
    rejected: list[RejectedCheckpoint] = []
    for candidate in run.resume.candidates:
        if candidate.damage:
            rejected.append(RejectedCheckpoint(candidate.name, candidate.damage))
            continue
        refetched = candidate.refetched and RejectedCheckpoint(candidate.name, *candidate.refetched)
        checkpoint, why = _opened(folder / candidate.name, communicator)
        if checkpoint is None and writing and refetch is not None:
            aside, more = _refetch(folder / candidate.name, refetch, communicator)
            if aside is not None:
                refetched = RejectedCheckpoint(candidate.name, why, aside)
                checkpoint, why = _opened(folder / candidate.name, communicator)
            else:
                why = f"{why} It could not be fetched again: {more}."
        if checkpoint is not None:
            break
        if strict:
            raise CheckpointError(f"{why} {NO_OTHER}" if writing else why)
        rejected.append(RejectedCheckpoint(candidate.name, why))
    else:
        raise none_whole(folder, rejected)
    if not writing:
        return Resumption(checkpoint)
    host = _same_host(run, checkpoint, here, communicator)
    gone = _check_ledger(run, checkpoint, communicator)
    kept = _set_aside(folder, rejected, communicator)
    changes = {**candidate.changes, **host.plain()}
    return Resumption(checkpoint, kept, changes, (*candidate.lines, *host.lines()), gone, refetched)


# what a checkpoint keeps --------------------------------------------------------------------------------------------


def weights(shards: Sequence[Shard]) -> list[Shard]:
    """The pieces of a state that belong into a checkpoint of the model only."""
    return [shard for shard in shards if shard.name.startswith(WEIGHTS)]


def state(
    found: Resumption,
    made: int,
    plan: Plan,
    own: range,
    communicator: Communicator,
    *,
    random: bool,
    micro_batch: int,
    mark: Mapping[str, Any] | None,
    best: Json,
    trackers: Mapping[str, str],
) -> dict[str, Json]:
    """What a checkpoint keeps besides arrays, as JSON, the same on every rank; collective.

    Args:
        found: where this start resumed.
        made: updates.
        plan: of the run.
        own: rows of the global batch that belong to this process.
        communicator: of all ranks.
        random: whether a forward pass of this process drew random numbers.
        micro_batch: rows of one.
        mark: where this process's ledger stands.
        best: of the evaluations so far.
        trackers: ids of the tracked runs, as rank 0 knows them.
    """
    mine = [random, plan.state(made, own), mark, dict(trackers) if communicator.rank == 0 else None]
    before = found.kept("ledger")
    if before:
        before = {**before, "files": {name: at for name, at in before["files"].items() if name not in found.gone}}
    randoms, plans, marks, ids = zip(*communicator.gather(mine, "what all ranks keep"), strict=True)
    return {
        "step": made,
        "total": plan.steps,
        "random": any(randoms),
        "micro_batch": micro_batch,
        "plan": None if all(part is None for part in plans) else list(plans),
        "ledger": None if None in marks else ledger.joined(before, marks),
        "best": best,
        "trackers": ids[0],
    }


# the steps of these -------------------------------------------------------------------------------------------------


def _opened(path: Path, communicator: Communicator) -> tuple[Checkpoint | None, str]:
    """A checkpoint that is whole for every rank, or why it is not; another format is refused at once."""
    try:
        return commit.open_(path, communicator), ""
    except FormatError:
        raise
    except CheckpointError as error:
        return None, without_advice(str(error))


def _refetch(path: Path, refetch: Refetch, communicator: Communicator) -> tuple[str | None, str]:
    """Let rank 0 fetch a checkpoint again, however long that takes."""
    aside, why = share_first(
        communicator, lambda: list(fetch_again(path, refetch)), "a damaged checkpoint to be fetched again"
    )
    return aside, why


def _same_host(run: ResolvedRun, checkpoint: Checkpoint, here: About, communicator: Communicator) -> Difference:
    """What is not as it was of versions, environment and machine, which only a process that computes knows."""
    if communicator.rank:  # what a checkpoint says is of the first process, and hosts need not be alike
        here = {**here, "machine": None}
    differs = provenance.compare_host(checkpoint.about, here)
    raise_everywhere(
        communicator,
        lambda: provenance.refuse(str(run.directory), differs, run.config),
        "whether the run may resume here",
    )
    return differs


def _check_ledger(run: ResolvedRun, checkpoint: Checkpoint, communicator: Communicator) -> list[str]:
    """See that the ledger is the one that the checkpoint knows; its files are shared out to the ranks.

    Returns:
        Files that are gone.

    Raises:
        CheckpointError: naming file, line and step where it is another.
    """
    kept, folder = checkpoint.state["ledger"], run.directory
    if kept is None:
        return []
    gone = ledger.missing(folder, kept) if communicator.rank == 0 else []
    faults: list[str] = []
    for number, (name, until) in enumerate(sorted(kept["files"].items())):
        if number % communicator.size == communicator.rank and (folder / ledger.FOLDER / name).is_file():
            faults += filter(None, [ledger.fault(folder, name, until)])
    everyone = communicator.gather([gone, faults], "whether the ledger is that of the checkpoint")
    gone, faults = everyone[0][0], [fault for _, mine in everyone for fault in mine]
    if gone and run.config.run.resume == "exact":
        faults = [f"{name} is gone" for name in gone] + faults
    if faults:
        raise CheckpointError(
            f"{folder / ledger.FOLDER} is not the ledger of {checkpoint.path.name}: {'; '.join(faults)}. Restore it "
            "from a copy, or move it away to begin a new one"
        )
    return list(gone)


def _set_aside(
    folder: Path, rejected: Sequence[RejectedCheckpoint], communicator: Communicator
) -> list[RejectedCheckpoint]:
    """Give damaged checkpoints names that no step has, so that the run can come to their steps again; none is lost."""

    def rename() -> list[str]:
        try:
            names = [_renamed(folder, one.name) for one in rejected]
            if rejected:
                sync(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: a damaged checkpoint cannot be renamed ({error.strerror or error})"
            ) from error
        return names

    what = "damaged checkpoints to be kept aside"
    names = raise_everywhere(communicator, rename if communicator.rank == 0 else None, what)[0]
    named = [RejectedCheckpoint(one.name, one.why, name) for one, name in zip(rejected, names, strict=True)]
    for one in named:
        log.warning("%s Falling back; the damaged checkpoint is kept as %s", one.why, one.aside)
    return named


def _renamed(folder: Path, name: str) -> str:
    aside = commit.aside(folder / name)
    (folder / name).rename(aside)
    return aside.name
