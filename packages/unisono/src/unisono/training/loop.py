"""The training loop, top to bottom: micro-batches, step, then evaluate, save or stop. Independent of torch and JAX.

Evaluation, saving and telemetry have a module each; the user's callbacks are called at the same points.
"""

from __future__ import annotations

import shlex
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from unisono.callback import Callback, RunInfo
from unisono.checkpoint.core import placement
from unisono.checkpoint.remote.upload import Uploads
from unisono.config.resolved_run import ResolvedRun
from unisono.data.ledger import Ledger
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import StepResult
from unisono.evaluation.best import Best
from unisono.observe import events, logs, trackers
from unisono.observe.profile import Profile
from unisono.observe.progress import show_evaluation
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.display.preparing import preparing
from unisono.runtime.errors import GuardError, MemoryExhaustedError, Preempted, RunError, explain_command
from unisono.supervise import run_lock
from unisono.supervise.hangs.shape_tracking import ShapeTracker
from unisono.supervise.step_sync import AS_REQUESTED, STOP_AFTER, Decision, RankRequests, StepSync
from unisono.task import Task
from unisono.training.callbacks.dispatch import Callbacks
from unisono.training.callbacks.plateau import FallOnPlateau
from unisono.training.evaluation import Evaluation
from unisono.training.parts import TrainingParts, gather_facts
from unisono.training.saving import Saving
from unisono.training.telemetry import Telemetry


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
    """Train, resuming from the newest checkpoint if there is one. The directory of the run exists."""
    logs.start_logging(run.directory, process)
    try:
        with _suggest_proof(run.config.recipe), Training(task, run, process, communicator, callbacks) as training:
            with heartbeat.phase("record"):
                results = deque(training.steps(), maxlen=1)
            heartbeat.begin_end()
            training.say(f"run: {run.directory}")
            loss = results[0].loss if results else None
            return Result(run.directory, training.step, loss, training.evaluated, training.stopped)
    finally:
        logs.stop_logging()


def evaluate(
    task: Task, run: ResolvedRun, process: ProcessInfo, communicator: Communicator, *, is_trained: bool = True
) -> dict[str, float]:
    """The loss and metrics of a run's newest checkpoint on the held-out rows; arguments as for `train`.

    A model that is not trained by a run (`is_trained=False`) is evaluated with the weights with which its task begins.

    Raises:
        RunError: if the run has no checkpoint or its task has no held-out rows.
    """
    with TrainingParts(task, run, process, communicator, writing=False) as parts:
        if not parts.can_evaluate:
            raise RunError(f"{run.directory}: the task has no held-out rows")
        _, step = parts.setup(parts.resume())
        if is_trained and not step:
            raise RunError(f"{run.directory} has no checkpoint")
        rows = parts.held_out.rows if parts.held_out is not None else 0
        with show_evaluation(rows, shown=process.is_first) as progress:
            return {"step": step, **parts.evaluate(step, progress)}


class Training:
    """One process's part of a run. Entering it builds everything and resumes; `steps` is the loop.

    Attributes:
        first: updates made before this start.
        step: updates made.
        stopped: why the run ended before its last step; empty if it did not.
        say: shows a line on the console of rank 0.
    """

    say: Callable[[str], None]

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
        for one in callbacks:
            if isinstance(one, FallOnPlateau):
                self._parts.scalars.falls = one.count
                one.say = lambda line: self.say(line)
        self._total = self._parts.plan.steps
        self._last_step = min(self._total, run.config.run.stop_after or self._total)
        self._sync = StepSync(
            communicator,
            run.directory,
            run.config.launch.preempt_deadline,
            run_lock.inherited_lock(run.directory),
            watches_folder=process.rank == run.ranks_of_folder(process.rank)[0],
        )

    def __enter__(self) -> Training:
        with ExitStack() as opened:
            opened.callback(self._parts.close)
            parts, run, communicator, process = self._parts, self._run, self._communicator, self._process
            with preparing("building the model", shown=process.is_first and run.config.observe.progress is True):
                resumption = parts.resume()
                facts, self.first = parts.setup(resumption)
            self.step = self.first
            if process.is_first:
                trackers.restore_ids(run.directory, resumption.saved_value("trackers") or {})
            self._evaluation = Evaluation(run.config, parts, communicator, Best(resumption.saved_value("best")))
            self._saving = Saving(
                run, parts, communicator, self._sync, resumption, self._evaluation, self._last_step,
                finished=self._on_saved, callbacks=lambda: self._callbacks.state(), say=lambda line: self.say(line),
            )  # fmt: skip
            self._saving.check_export()
            self._saving.check_disk_space(facts.parameters)
            self._evaluation.check_metric(self.first)
            due = RankRequests(evaluate=self._evaluation.was_missed(run.directory, self.first))
            start = communicator.gather(uuid.uuid4().hex, "a name for this start of the run")[0]
            self._ledger = opened.enter_context(
                Ledger(run.directory, process.rank, process.world_size, self.first, start)
            )
            about = gather_facts(parts.data, parts.scalars, self._task)
            self._telemetry = Telemetry(run, parts, process, communicator, facts, about, self.first)
            record = opened.enter_context(self._telemetry.record)
            self.say = record.say
            opened.push(self._saving.close)
            self._uploads = Uploads(run.config, run.directory, process.is_first, record.say, record.note)
            opened.callback(self._uploads.close)
            self._profile = opened.enter_context(
                Profile(run.config.observe.profile, parts.engine, run.directory, self.first, self._total, record.say)
            )
            self._profile.start_or_stop(self.first)
            opened.push(self._end)
            place = (process.rank, process.world_size)
            held_out = parts.held_out.rows if parts.held_out else 0
            info = RunInfo(
                run.directory, run.config, self.first, self._total, *place, held_out, record.publish,
                lambda samples, read: parts.read_outputs(samples, read, self.step),
            )  # fmt: skip
            self._callbacks = Callbacks(self._user_callbacks, process.rank)
            self._initial_requests = self._callbacks.on_start(info, resumption.saved_value("callbacks") or {}, due)
            self._telemetry.introduce(resumption, self.first)
            self._exit_stack = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit_stack.__exit__(kind, error, trace)

    def steps(self) -> Iterator[StepResult]:
        """Run all remaining steps, each with whatever is due or requested after it."""
        parts, total = self._parts, self._total
        self._sync.take_over_signals()
        decision = self._act_on(self.first, self._initial_requests)
        heartbeat.record_step(self.first)
        batches = parts.engine.incoming(self._micro_batches())
        shapes = ShapeTracker(watching=self._run.layout.compile or self._run.layout.engine == "jax")
        for step in range(self.first, self._last_step):
            if decision.stop or decision.preempted:
                break
            self._telemetry.stopwatch.lap()  # time between steps does not count
            scalars = parts.scalars(step)
            with self._profile.step(), heartbeat.restore_phase():
                micro_batches = next(batches)
                with heartbeat.phase("compute", shapes.update(micro_batches)), self._mark_random_draws():
                    result = parts.engine.step(micro_batches, step, scalars)
            self.step = step + 1
            due = RankRequests(save=self._saving.check(self.step), evaluate=self._evaluation.is_due(self.step))
            self._ledger.step(step, micro_batches)
            self._telemetry.record_step(self.step, result, micro_batches, self._saving.saver.unsaved_since)
            self._uploads.check()
            values = {**result.values, "grad_norm": result.grad_norm, **scalars, **result.norms}
            decision = self._act_on(self.step, self._callbacks.on_step(self.step, values, due))
            self._profile.start_or_stop(self.step)
            yield result
        self._finish(decision)
        if self.first >= total:
            self.say(f"nothing to do: all {total} steps are already done")
            path = self._run.directory / "events.jsonl"  # on node 0 alone, if nodes have their own folders
            self._evaluation.values = events.last_evaluation(events.read_events(path) if path.exists() else [])

    @property
    def evaluated(self) -> dict[str, float]:
        """Loss and metrics of the newest evaluation."""
        return self._evaluation.values

    def _act_on(self, step: int, requests: RankRequests) -> Decision:
        """Do what is due or requested after a step, all ranks together; returns the decision."""
        decision = self._decide(requests)
        if decision.evaluate and self._evaluation.evaluate(step, self._telemetry.record):
            decision |= self._decide(self._callbacks.on_evaluation(step, self._evaluation.values))
        elif self._evaluation.interrupted:
            decision |= self._decide()
        if decision.save and step:
            self._saving.save(step, self._ledger, at_once=decision.preempted)
            decision |= self._decide(self._callbacks.take_pending())
        return decision

    def _decide(self, requests: RankRequests | None = None) -> Decision:
        decision = self._sync.decide(requests, self._saving.saver.seconds)
        for reason in decision.reasons:
            self.say(f"step {self.step}: {reason}")
        if decision.stop and not self.stopped:
            self.stopped = "; ".join(decision.reasons) or AS_REQUESTED
        return decision

    def _finish(self, decision: Decision) -> None:
        """Wait for pending saves and uploads, and report why the run ends here."""
        say, resumes = self.say, self._run.resume_command()
        if decision.preempted and not decision.not_saved_because:  # the signal came after a save that was due had begun
            self._saving.saver.stop_retrying()
        if not decision.not_saved_because:
            with self._sync.saving():
                self._saving.saver.finish()
        is_leaving = self._wait_for_uploads(decision) or decision.preempted
        if (exported := self._saving.export(decision.seconds_left, is_leaving)) is not None:
            say(exported)
        if is_leaving:
            raise self._sync.preempted_error(
                self.step, self._total, self._saving.saver.saved, decision.not_saved_because
            )
        if decision.stop and self.step < self._total:
            self._telemetry.record.note(self.step, {"stopped": self.stopped})
            say(f"stopped after step {self.step} of {self._total}: {self.stopped}. Resume with:\n  {resumes}")
        elif self._last_step < self._total:
            self.stopped = f"{STOP_AFTER}{self._last_step}"
            say(f"stopped after step {self.step} of {self._total} (run.stop_after). Resume with:\n  {resumes}")
        else:
            self.stopped = ""
        self._sync.decide(self._callbacks.on_end(self.step, "stopped" if self.stopped else "finished"))

    def _on_saved(self, path: Path) -> None:
        """Note that there is a checkpoint, and hand it over to be uploaded, and to the user's callbacks."""
        if self._process.is_first:
            placement.note_saved(self._run.directory, self._saving.saver.saved)
        self._uploads.enqueue(path)
        self._callbacks.on_save(self._saving.saver.saved, path)

    def _wait_for_uploads(self, decision: Decision) -> bool:
        """Wait for the last upload, all ranks together; returns whether a preemption cut the wait short.

        Raises:
            UploadError: if it is not uploaded in time, and must be.
        """
        if self._run.config.checkpoint.upload.url is None:
            return False
        waits = True
        while waits and decision.seconds_left > 0:
            with heartbeat.phase("save", "the last upload"):
                seconds = max(0.0, min(1.0, decision.seconds_left))
                waits = bool(self._communicator.reduce_max([int(self._uploads.wait(seconds))], "the last upload")[0])
            decision |= self._decide()
        self._uploads.finish(required=not decision.preempted)
        return waits

    def _end(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Call `on_end` of the user's callbacks, unless nothing failed: then that was done before."""
        if kind is not None:
            reason = "failed"
            if issubclass(kind, Preempted):
                reason = "preempted"
            elif issubclass(kind, KeyboardInterrupt):
                reason = "interrupted"
            self._callbacks.on_end(self.step, reason)

    def _micro_batches(self) -> Generator[list[MicroBatch]]:
        """The micro-batches of all remaining steps; time spent waiting for them is measured."""
        steps = self._parts.loader.steps(self.first)
        for _ in range(self.first, self._total):
            with self._telemetry.stopwatch.waiting(), self._parts.engine.profiler.part("data"):
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


@contextmanager
def _suggest_proof(recipe: str) -> Iterator[None]:
    """Add to a guard's error the likely fault, the command that explains it, and the proof that would locate it."""
    try:
        yield
    except GuardError as error:
        more = f"to locate it, run `unisono prove {shlex.quote(recipe)}` with the settings of this run"
        error.args = (f"{error}\n  likely: {error.fault}\n  more: {explain_command(error.fault)}\n  {more}",)
        raise
