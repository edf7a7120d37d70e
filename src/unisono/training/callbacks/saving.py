"""Checkpoints: when one is due, what it contains, and whether it succeeded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from unisono.callback import RunInfo, Save
from unisono.checkpoint.core import resume
from unisono.checkpoint.core.resume import Resumption
from unisono.checkpoint.core.saver import Saver
from unisono.config.resolved_run import ResolvedRun
from unisono.observe import trackers
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator, Json
from unisono.runtime.consensus import raise_everywhere
from unisono.runtime.errors import CallbackError
from unisono.supervise.step_sync import StepSync
from unisono.training.callbacks.dispatch import LoopCallback
from unisono.training.callbacks.evaluation import Evaluation
from unisono.training.callbacks.ledger import LedgerWriter
from unisono.training.parts import TrainingParts


class Saving(LoopCallback):
    """Requests checkpoints when they are due, and writes the requested ones in the background.

    Args:
        run: resolved.
        parts: of the run.
        communicator: of all processes.
        sync: protects the directory against a concurrent start.
        resumption: what this start resumed from.
        evaluation: provides the metrics of the saved state.
        ledger: flushed before a save; its position is saved.
        until: updates after which this start ends.
        before: called with the number of updates before a save; may raise to prevent it.
        saved: called on every rank with the updates and the directory of every finished checkpoint.
        callbacks: the state of the user's callbacks.
        say: shows a line on the console.
    """

    def __init__(
        self,
        run: ResolvedRun,
        parts: TrainingParts,
        communicator: Communicator,
        sync: StepSync,
        resumption: Resumption,
        evaluation: Evaluation,
        ledger: LedgerWriter,
        until: int,
        *,
        before: Callable[[int], None],
        saved: Callable[[int, Path], None],
        callbacks: Callable[[], dict[str, Json]],
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._run, self._parts, self._communicator, self._sync = run, parts, communicator, sync
        self._resumption, self._evaluation, self._ledger, self._last_step = resumption, evaluation, ledger, until
        self._before_save, self._callbacks = before, callbacks
        self._settings, self._first = run.config.checkpoint, resumption.step
        self.saver = Saver(
            run.directory / "checkpoints", communicator, self._settings, first=resumption.step,
            finished=lambda path: saved(int(path.name.rpartition("-")[2]), path), say=say,
            allowed=sync.check_lease, deadline=run.config.launch.deadlines.save,
        )  # fmt: skip

    def on_start(self, run: RunInfo) -> None:
        """Start the saver."""
        self.saver.__enter__()

    def on_step(self, step: int, values: Mapping[str, float]) -> Save | None:
        """Check the save in flight, and request another if one is due."""
        self.saver.check()
        every, total = self._settings.every, self._parts.plan.steps
        if step == self._first + 1 and every is not None:
            self.saver.prepare(self._parts.engine.state())
        at_end = step == self._last_step and (self._last_step < total or self._settings.at_end)
        return Save() if at_end or (every is not None and step % every == 0) else None

    def save(self, step: int, at_once: bool) -> None:
        """Save the state after `step` updates.

        Args:
            step: updates made.
            at_once: wait until it is finished, without retries, since the run must end.
        """
        self._sync.refuse_if_lost()
        self._before_save(step)
        if at_once:
            self.saver.stop_retrying()
        with heartbeat.phase("save"), self._sync.saving():
            self._commit(step)
            if at_once:
                self.saver.finish()

    def on_end(self, step: int, reason: str) -> None:
        """Wait for the save in flight; only briefly if the run has failed."""
        failed = reason in ("failed", "interrupted")
        self.saver.__exit__(RuntimeError if failed else None, None, None)

    def _commit(self, step: int) -> None:
        engine, run, plan = self._parts.engine, self._run, self._parts.plan
        engine.check_replicas(step)  # a checkpoint combines pieces of replicas from different ranks
        rank = self._communicator.rank
        state = resume.collect_state(
            self._resumption, step, plan, run.split.rows_of(rank), self._communicator, random=engine.random,
            micro_batch=run.split.micro_batch, mark=self._ledger.mark(), best=self._evaluation.best.state(),
            trackers=trackers.read_ids(run.directory),
        )  # fmt: skip
        state["callbacks"] = self._callback_state()
        holds = self._settings.final if step == plan.steps else "everything"
        shards = engine.state()
        shards = resume.weight_shards(shards) if holds == "model" else shards
        metric = self._evaluation.values if self._evaluation.step == step else None
        self.saver.save(step, shards, state, self._parts.provenance, metric, holds=holds)

    def _callback_state(self) -> dict[str, Json]:
        """The state of the user's callbacks, which is the same on every rank."""
        everyone = raise_everywhere(self._communicator, self._callbacks, "the state of the callbacks of all ranks")
        for rank, theirs in enumerate(everyone):
            for name in {*everyone[0], *theirs}:
                if theirs.get(name) != everyone[0].get(name):
                    raise CallbackError(
                        f"callback {name}: state() differs between rank 0 and rank {rank}, so a resumed run could "
                        "not be the same; return only what follows from values that are the same on all ranks"
                    )
        kept: dict[str, Json] = everyone[0]
        return kept
