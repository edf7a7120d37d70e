"""The training loop, top to bottom: micro-batches, step, then evaluate, save or stop. Independent of torch and JAX.

Everything around a step (evaluation, saving, the ledger, uploads, …) is a callback of the loop, one module each in
`unisono.training.callbacks`; the user's callbacks are called at the same points.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from unisono.callback import Callback, RunInfo
from unisono.config.resolved_run import ResolvedRun
from unisono.data.loading.loader import MicroBatch
from unisono.data.order.planning import checkable_sources
from unisono.engines.protocol import StepResult
from unisono.evaluation.best import Best
from unisono.observe import events, logs, trackers
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import GuardError, MemoryExhaustedError, Preempted, RunError, docs_link
from unisono.supervise import run_lock
from unisono.supervise.shape_tracking import ShapeTracker
from unisono.supervise.step_sync import Decision, RankRequests, StepSync
from unisono.task import Task
from unisono.training.callbacks.data_changes import DataChanges
from unisono.training.callbacks.disk_space import DiskSpace
from unisono.training.callbacks.dispatch import Callbacks
from unisono.training.callbacks.evaluation import Evaluation
from unisono.training.callbacks.ledger import LedgerWriter
from unisono.training.callbacks.profiling import Profiling
from unisono.training.callbacks.saving import Saving
from unisono.training.callbacks.telemetry import Telemetry
from unisono.training.callbacks.uploads import CheckpointUploads
from unisono.training.parts import TrainingParts


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: of the run.
        step: updates made.
        loss: of the last update; None if this process made no update.
        evaluation: loss and metrics on the held-out rows, if they were evaluated.
        stopped: why the run ended before its last step; empty if it did not.
    """

    folder: Path
    step: int
    loss: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""


def train(
    task: Task,
    run: ResolvedRun,
    process: ProcessInfo,
    communicator: Communicator,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train, resuming from the newest checkpoint if there is one.

    Args:
        task: what to train.
        run: resolved; its directory exists.
        process: this process.
        communicator: of all processes.
        callbacks: the user's.
    """
    logs.start_logging(run.directory, process)
    try:
        with _suggest_proof(run.config.recipe), Training(task, run, process, communicator, callbacks) as training:
            with heartbeat.phase("record"):
                results = deque(training.steps(), maxlen=1)
            training.telemetry.say(f"run: {run.directory}")
            loss = results[0].loss if results else None
            return Result(run.directory, training.step, loss, training.evaluated, training.stopped)
    finally:
        logs.stop_logging()


def evaluate(task: Task, run: ResolvedRun, process: ProcessInfo, communicator: Communicator) -> dict[str, float]:
    """The loss and metrics of a run's newest checkpoint on the held-out rows; arguments as for `train`.

    Raises:
        RunError: if the run has no checkpoint or its task has no held-out rows.
    """
    with TrainingParts(task, run, process, communicator, writing=False) as parts:
        if parts.held_out is None:
            raise RunError(f"{run.directory}: the task has no held-out rows")
        _, step = parts.setup(parts.resume())
        if not step:
            raise RunError(f"{run.directory} has no checkpoint")
        return {"step": step, **parts.held_out.evaluate(parts.engine, step, parts.scalars(step))}


class Training:
    """One process's part of a run. Entering it builds everything and resumes; `steps` is the loop.

    Args:
        task: what to train.
        run: resolved.
        process: this process.
        communicator: of all processes.
        callbacks: the user's.

    Attributes:
        first: updates made before this start.
        step: updates made.
        stopped: why the run ended before its last step; empty if it did not.
        telemetry: shows and records the run.
    """

    def __init__(
        self,
        task: Task,
        run: ResolvedRun,
        process: ProcessInfo,
        communicator: Communicator,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._task, self._run, self._process, self._communicator = task, run, process, communicator
        self._user_callbacks, self.stopped = callbacks, ""
        self._parts = TrainingParts(task, run, process, communicator)
        self._total = self._parts.plan.steps
        self._last_step = min(self._total, run.config.run.stop_after or self._total)
        self._sync = StepSync(
            communicator, run.directory, run.config.launch.preempt_deadline, run_lock.inherited_lock(run.directory)
        )

    def __enter__(self) -> Training:
        with ExitStack() as opened:
            opened.callback(self._parts.close)
            parts, run, communicator = self._parts, self._run, self._communicator
            resumption = parts.resume()
            facts, self.first = parts.setup(resumption)
            self.step = self.first
            if self._process.is_first:
                trackers.restore_ids(run.directory, resumption.saved_value("trackers") or {})
            about = {**parts.data, **parts.scalars.step_programs(self._task.static_scalars), **self._task.facts()}
            self.telemetry = Telemetry(
                run, parts, self._process, communicator, facts, about, lambda: self._unsaved_since
            )
            best = Best(resumption.saved_value("best"))
            self._evaluation = Evaluation(run.config, parts, communicator, self.telemetry, best)
            self._ledger = LedgerWriter(communicator)
            self._uploads = CheckpointUploads(communicator, self.telemetry)
            self._profiling = Profiling(parts.engine, self.telemetry)
            sources = [parts.source, *([parts.held_out.source] if parts.held_out is not None else [])]
            files = [one for source in sources for one in checkable_sources(source)]
            self._saving = Saving(
                run, parts, communicator, self._sync, resumption, self._evaluation, self._ledger, self._last_step,
                before=lambda step: self._callbacks.before_save(step),
                saved=lambda step, path: self._callbacks.on_save(step, path),
                callbacks=lambda: self._callbacks.state(), say=self.telemetry.say,
            )  # fmt: skip
            own = [
                DiskSpace(communicator, facts.parameters), DataChanges(files, self._process, communicator),
                self._evaluation, self._saving, self._ledger, self.telemetry, self._uploads, self._profiling,
            ]  # fmt: skip
            self._callbacks = Callbacks(own, self._user_callbacks, self._process.rank)
            opened.push(self._ledger.close)
            opened.push(self.telemetry.close)
            opened.push(self._end)
            place = (self._process.rank, self._process.world_size)
            info = RunInfo(run.directory, run.config, self.first, self._total, *place, self.telemetry.publish)
            self._initial_wishes = self._callbacks.on_start(info, resumption.saved_value("callbacks") or {})
            self.telemetry.introduce(resumption, self.first)
            self._exit_stack = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_stack.__exit__(kind, error, trace)

    def steps(self) -> Iterator[StepResult]:
        """Run all remaining steps, each with whatever is due or requested after it."""
        parts, callbacks, total = self._parts, self._callbacks, self._total
        self._sync.take_over_signals()
        decision = self._act_on(self.first, self._initial_wishes)
        heartbeat.record_step(self.first)
        batches = parts.engine.incoming(self._micro_batches())
        shapes = ShapeTracker(watching=self._run.layout.compile or self._run.layout.engine == "jax")
        for step in range(self.first, self._last_step):
            if decision.stop or decision.preempted:
                break
            callbacks.before_step(step)
            scalars = parts.scalars(step)
            with self._profiling.step(), heartbeat.restore_phase():
                micro_batches = next(batches)
                with heartbeat.phase("compute", shapes.update(micro_batches)), self._mark_random_draws():
                    result = parts.engine.step(micro_batches, step, scalars)
            self.step = step + 1
            self._ledger.set_consumed(micro_batches)
            self.telemetry.set_result(result, micro_batches)
            values = {**result.values, "grad_norm": result.grad_norm, **scalars}
            decision = self._act_on(self.step, callbacks.on_step(self.step, values))
            callbacks.after_step(self.step)
            yield result
        self._finish(decision)
        if self.first >= total:
            self.telemetry.say(f"nothing to do: all {total} steps are already done")
            self._evaluation.values = events.last_evaluation(events.read_events(self._run.directory / "events.jsonl"))

    @property
    def evaluated(self) -> dict[str, float]:
        """Loss and metrics of the newest evaluation."""
        return self._evaluation.values

    def _act_on(self, step: int, wishes: RankRequests) -> Decision:
        """Do what is due or requested after a step, all ranks together; returns the decision."""
        decision = self._decide(wishes)
        if decision.evaluate and self._evaluation.evaluate(step):
            decision |= self._decide(self._callbacks.on_evaluation(step, self._evaluation.values))
        if decision.save and step:
            self._saving.save(step, at_once=decision.preempted)
            decision |= self._decide(self._callbacks.take_pending())
        return decision

    def _decide(self, wishes: RankRequests | None = None) -> Decision:
        decision = self._sync.decide(wishes, self._saving.saver.seconds)
        for reason in decision.reasons:
            self.telemetry.say(f"step {self.step}: {reason}")
        if decision.stop and not self.stopped:
            self.stopped = "; ".join(decision.reasons) or "as requested"
        return decision

    def _finish(self, decision: Decision) -> None:
        """Wait for pending saves and uploads, and report why the run ends here."""
        say, resumes = self.telemetry.say, self._run.resume_hint
        if not decision.preempted:
            self._saving.saver.finish()
        cut_short = self._uploads.wait(decision, lambda: self._decide())
        if decision.preempted or cut_short:
            raise self._sync.preempted_error(
                self.step, self._total, self._saving.saver.saved, decision.not_saved_because
            )
        if decision.stop and self.step < self._total:
            self.telemetry.note(self.step, {"stopped": self.stopped})
            say(f"stopped after step {self.step} of {self._total}: {self.stopped}. Resume with:\n  {resumes}")
        elif self._last_step < self._total:
            self.stopped = f"run.stop_after={self._last_step}"
            say(f"stopped after step {self.step} of {self._total} (run.stop_after). Resume with:\n  {resumes}")
        else:
            self.stopped = ""
        self._sync.decide(self._callbacks.on_user_end(self.step, "stopped" if self.stopped else "finished"))

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call `on_end` of all callbacks; the user's were already called if nothing failed."""
        reason = "finished"
        if kind is not None:
            reason = "failed"
            if issubclass(kind, Preempted):
                reason = "preempted"
            elif issubclass(kind, KeyboardInterrupt):
                reason = "interrupted"
            self._callbacks.on_user_end(self.step, reason)
        self._callbacks.on_loop_end(self.step, reason)

    def _micro_batches(self) -> Generator[list[MicroBatch]]:
        """The micro-batches of all remaining steps; time spent waiting for them is measured."""
        steps = self._parts.loader.steps(self.first)
        for _ in range(self.first, self._total):
            with self.telemetry.waiting(), self._parts.engine.profiler.part("data"):
                micro_batches = next(steps)
            yield micro_batches

    @contextmanager
    def _mark_random_draws(self) -> Iterator[None]:
        """Mark out-of-memory errors with whether forward passes draw random numbers."""
        try:
            yield
        except MemoryExhaustedError as error:
            error.random = self._parts.engine.random
            raise

    @property
    def _unsaved_since(self) -> int | None:
        return self._saving.saver.unsaved_since


@contextmanager
def _suggest_proof(recipe: str) -> Iterator[None]:
    """Add to a guard's error the likely fault, its page in the docs, and the proof that would locate it."""
    try:
        yield
    except GuardError as error:
        more = f"to locate it, run `unisono prove {shlex.quote(recipe)}` with the settings of this run"
        error.args = (f"{error}\n  likely: {error.fault}\n  page: {docs_link(error.fault)}\n  {more}",)
        raise
