"""Opens the checkpoint that a run resumes from.

Before the model is built, all ranks together verify the newest of the checkpoints from which the run may resume (see
`unisono.checkpoint.core.resume_point`). If it is damaged, the run falls back to the previous one with a warning, and
keeps the damaged one under another name. With `run.resume=exact`, a damaged checkpoint is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement, provenance
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.core.provenance import Provenance, ProvenanceDifference
from unisono.checkpoint.core.resume_point import (
    EXACT_ADVICE,
    Refetch,
    RejectedCheckpoint,
    no_valid_checkpoint,
    open_or_refetch,
    refetch_checkpoint,
)
from unisono.config.resolved_run import ResolvedRun
from unisono.data import ledger
from unisono.data.order.plan import Plan
from unisono.engines.protocol import Engine
from unisono.runtime.communication.communicator import Communicator, Json
from unisono.runtime.communication.consensus import raise_everywhere, share_first
from unisono.runtime.errors import CheckpointError
from unisono.runtime.files import fsync_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumption:
    """The checkpoint from which a process resumes, and facts about it.

    Attributes:
        checkpoint: None for a new run.
        rejected: newer ones that are damaged, newest first.
        refetched: the damaged local copy of this one, if the store had it intact.
        changes: differences from when the checkpoint was written, as JSON.
        lines: the same as lines of text.
        missing_files: ledger files that the checkpoint lists but that are missing.
    """

    checkpoint: Checkpoint | None = None
    rejected: list[RejectedCheckpoint] = field(default_factory=list)
    changes: Mapping[str, Json] = field(default_factory=dict)
    lines: Sequence[str] = ()
    missing_files: list[str] = field(default_factory=list)
    refetched: RejectedCheckpoint | None = None

    @property
    def step(self) -> int:
        """Updates made; 0 for a new run."""
        return self.checkpoint.step if self.checkpoint else 0

    def saved_value(self, name: str) -> Any:
        """An entry of the checkpoint's state; None for a new run."""
        return self.checkpoint.state.get(name) if self.checkpoint else None

    def load(self, engine: Engine, plan: Plan) -> int:
        """Load the state into engine and plan; returns the updates made."""
        if self.checkpoint is not None:
            engine.load(self.checkpoint.reader(), weights_only=self.checkpoint.holds == "model")
            if (plans := self.checkpoint.state["plan"]) is not None:
                plan.resume(plans)
            log.info("resuming after step %d from %s", self.step, self.checkpoint.path)
        return self.step

    def format_lines(self) -> list[str]:
        """Lines for the console."""
        found = [
            f"WARNING: {one.why} Falling back to {self.checkpoint.path.name}; the damaged checkpoint is kept as "
            f"{one.kept_as}"
            for one in self.rejected
            if self.checkpoint is not None
        ]
        if self.refetched is not None:
            found.append(
                f"WARNING: {self.refetched.why} It was fetched again from the store; the damaged copy is kept as "
                f"{self.refetched.kept_as}"
            )
        if self.missing_files:
            found.append(
                f"WARNING: {', '.join(self.missing_files)} of the ledger is missing; a new one begins, and `unisono "
                "data audit` cannot check what was consumed before"
            )
        if self.step:
            found.append(f"resuming after step {self.step}")
            found += [f"  {line}" for line in self.lines]
        return found

    def build_events(self, steps: int) -> list[dict[str, Json]]:
        """The entries of `events.jsonl` about the resume; includes changes only if steps remain out of `steps`."""
        found: list[dict[str, Json]] = [
            {"fallback": {"from": f.name, "to": self.checkpoint.path.name, "why": f.why, "kept_as": f.kept_as}}
            for f in self.rejected
            if self.checkpoint is not None
        ]
        if self.refetched is not None:
            one = self.refetched
            found.append({"brought_again": {"name": one.name, "why": one.why, "kept_as": one.kept_as}})
        return found + ([{"changed": dict(self.changes)}] if self.changes and self.step < steps else [])


# finding an intact checkpoint ---------------------------------------------------------------------------------------


def open_newest(
    run: ResolvedRun,
    here: Provenance,
    communicator: Communicator,
    writing: bool = True,
    refetch: Refetch | None = None,
) -> Resumption:
    """The newest intact checkpoint from which the run may resume; collective.

    Args:
        run: with the checkpoints from which it may resume.
        here: provenance of this process, to compare what only ranks know: environment and machine.
        communicator: of all ranks.
        writing: False if only an evaluation follows: then nothing is renamed, skipped or compared.
        refetch: fetches a damaged checkpoint from a store; called on rank 0. Returns where the damaged copy is now, or
            why it could not. Must be None on all ranks or on none.

    Raises:
        RunError: if `run.resume=exact` and machine or environment differ.
        CheckpointError: if no checkpoint is intact, or the newest one is not and no other may be used; if a rank does
            not see the folder of the checkpoints.
    """
    folder = run.directory / placement.NAME
    if writing and (target := placement.find_target(run.config)) is not None:
        sees = communicator.gather(folder.is_dir(), "whether all ranks see checkpoint.folder")
        if not all(sees):
            blind = ", ".join(str(rank) for rank, found in enumerate(sees) if not found)
            raise CheckpointError(f"rank {blind} does not see {target}: checkpoint.folder is for a disk of all nodes")
    names = raise_everywhere(
        communicator,
        lambda: [path.name for path in commit.find_checkpoints(folder)],
        "the checkpoints that all ranks see",
    )
    known = [candidate.name for candidate in run.resume.candidates] if run.resume else []
    if not run.config.launch.shared_folder:  # each node's has what it wrote and what this start has fetched
        names = [[name for name in seen if name in known] for seen in names]
    if any(seen != names[0] for seen in names) or not set(known) <= set(names[0]):
        newest = [seen[-1] if seen else None for seen in names]
        raise CheckpointError(f"{folder}: ranks see different checkpoints, {newest}; is this a shared directory?")
    if run.resume is None:
        return Resumption()
    strict = run.config.run.resume == "exact" or not writing or not run.config.launch.shared_folder
    rejected: list[RejectedCheckpoint] = []
    for candidate in run.resume.candidates:
        if candidate.damage:
            rejected.append(RejectedCheckpoint(candidate.name, candidate.damage))
            continue
        path, again = folder / candidate.name, None
        if writing and refetch is not None and run.config.launch.shared_folder:
            again = partial(_refetch, path, refetch, communicator)
        verify = partial(commit.open_checkpoint, path, communicator)
        checkpoint, why, refetched = open_or_refetch(candidate.name, verify, again)
        if checkpoint is not None:
            break
        if strict:
            raise CheckpointError(f"{why} {EXACT_ADVICE}" if run.config.run.resume == "exact" and writing else why)
        rejected.append(RejectedCheckpoint(candidate.name, why))
    else:
        raise no_valid_checkpoint(folder, rejected)
    if not writing:
        return Resumption(checkpoint)
    if refetched is None and candidate.refetched is not None:  # by the process that resolved the run
        refetched = RejectedCheckpoint(candidate.name, *candidate.refetched)
    host = _compare_host(run, checkpoint, here, communicator)
    gone = _check_ledger(run, checkpoint, communicator)
    kept = _rename_damaged(folder, rejected, communicator)
    changes = {**candidate.changes, **host.to_json()}
    return Resumption(checkpoint, kept, changes, (*candidate.lines, *host.lines()), gone, refetched)


# helpers ------------------------------------------------------------------------------------------------------------


def _refetch(path: Path, refetch: Refetch, communicator: Communicator) -> tuple[str | None, str]:
    """Have rank 0 fetch a checkpoint again, without a deadline."""
    kept_as, why = share_first(
        communicator, lambda: list(refetch_checkpoint(path, refetch)), "a damaged checkpoint to be fetched again"
    )
    return kept_as, why


def _compare_host(
    run: ResolvedRun, checkpoint: Checkpoint, here: Provenance, communicator: Communicator
) -> ProvenanceDifference:
    """Differences in versions, environment and machine, which only a training process knows."""
    if communicator.rank:  # a checkpoint records the first process's, and hosts may differ
        here = {**here, "machine": None}
    differs = provenance.compare_host(checkpoint.about, here)
    raise_everywhere(
        communicator,
        lambda: provenance.check_compatible(str(run.directory), differs, run.config),
        "whether the run may resume here",
    )
    return differs


def _check_ledger(run: ResolvedRun, checkpoint: Checkpoint, communicator: Communicator) -> list[str]:
    """Check that the ledger is the checkpoint's, its files divided among the ranks; returns those that are missing."""
    kept, folder = checkpoint.state["ledger"], run.directory
    if kept is None:
        return []
    seen = raise_everywhere(
        communicator, lambda: ledger.missing_files(folder, kept), "the ledger's files that all ranks see"
    )
    gone = [name for name in kept["files"] if all(name in missing for missing in seen)]
    ranks = run.ranks_of_folder(communicator.rank)
    mine = {
        name: until
        for number, (name, until) in enumerate(sorted(kept["files"].items()))
        if name not in seen[communicator.rank] and ranks[number % len(ranks)] == communicator.rank
    }
    everyone = raise_everywhere(
        communicator,
        lambda: {name: ledger.find_fault(folder, name, until) for name, until in mine.items()},
        "whether the ledger is that of the checkpoint",
    )
    found = {name: [theirs[name] for theirs in everyone if name in theirs] for name in kept["files"]}
    faults = [one[0] for one in found.values() if one and all(one)]  # a rank's file may be on another node than before
    if gone and run.config.run.resume == "exact":
        faults = [f"{name} is missing" for name in gone] + faults
    if faults:
        raise CheckpointError(
            f"{folder / ledger.FOLDER} is not the ledger of {checkpoint.path.name}: {'; '.join(faults)}. Restore it "
            "from a copy, or move it away to begin a new one"
        )
    return list(gone)


def _rename_damaged(
    folder: Path, rejected: Sequence[RejectedCheckpoint], communicator: Communicator
) -> list[RejectedCheckpoint]:
    """Rename damaged checkpoints, so that the run can save at their steps again; none is lost."""

    def rename() -> list[str]:
        try:
            kept = [(folder / one.name).rename(commit.free_damaged_path(folder / one.name)) for one in rejected]
            if rejected:
                fsync_path(folder)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: a damaged checkpoint cannot be renamed ({error.strerror or error})"
            ) from error
        return [path.name for path in kept]

    what = "damaged checkpoints to be renamed"
    names = raise_everywhere(communicator, rename if communicator.rank == 0 else None, what)[0]
    named = [RejectedCheckpoint(one.name, one.why, name) for one, name in zip(rejected, names, strict=True)]
    for one in named:
        log.warning("%s Falling back; the damaged checkpoint is kept as %s", one.why, one.kept_as)
    return named
