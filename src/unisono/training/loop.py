"""The loop, top to bottom: order → step → record → evaluate → save. It knows neither torch nor JAX, only engines."""

from __future__ import annotations

import json
import logging
import shlex
import uuid
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from unisono.checkpoint.core import provenance, resume, retention
from unisono.checkpoint.core.resume import Found
from unisono.checkpoint.core.saver import Saver
from unisono.checkpoint.remote import restore
from unisono.checkpoint.remote.upload import Uploads, store_of
from unisono.config import fingerprint
from unisono.config.batch_split import Split
from unisono.config.schema.run import RunConfig
from unisono.data.ledger import Ledger
from unisono.data.loading.loader import Loader, MicroBatch
from unisono.data.order.planning import facts_of, plan_of, source_of, watched
from unisono.engines import create_engine
from unisono.engines.protocol import Job, StepResult
from unisono.evaluation.best import Best
from unisono.evaluation.held_out import HeldOut
from unisono.observe import events, logs, trackers
from unisono.observe.peak_rates import peak_flops
from unisono.observe.profile import Profile
from unisono.observe.progress import Speed, Stopwatch, short
from unisono.observe.run_record import Record
from unisono.optim.schedules import Scalars
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import DataError, GuardError, RunError, page
from unisono.supervise import disk_space, run_lock
from unisono.supervise.shape_tracking import Shapes
from unisono.supervise.step_sync import Boundary, Decision
from unisono.task import Task, set_up

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        folder: where it lies.
        step: updates made.
        loss: of the last update; None if this process made none.
        evaluation: loss and metrics on the held-out rows, if they were evaluated.
    """

    folder: Path
    step: int
    loss: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)


def run(task: Task, config: RunConfig, place: Place, group: Group, folder: Path) -> Result:
    """Train, from the newest checkpoint if there is one, and return what came of it.

    Args:
        task: what to train.
        config: concrete: no `auto`, a micro-batch, a name.
        place: of this process.
        group: all processes.
        folder: of the run, made and checked before.
    """
    logs.start(folder, place)
    try:
        with _pointing_to_a_proof(config.recipe), Training(task, config, place, group, folder) as training:
            with heartbeat.phase("record"):
                results = deque(training.steps(), maxlen=1)
            training.finish()
            training.record.say(f"run: {folder}")
            return Result(folder, training.made, results[0].loss if results else None, training.evaluated)
    finally:
        logs.stop()


def evaluate(task: Task, config: RunConfig, place: Place, group: Group, folder: Path) -> dict[str, float]:
    """The loss and metrics of a run's newest checkpoint on the held-out rows; arguments as in `run`.

    Raises:
        RunError: if the run has no checkpoint or its task holds no rows out.
    """
    with Training(task, config, place, group, folder, writing=False) as training:
        if training.held_out is None:
            raise RunError(f"{folder}: the task holds no rows out")
        if not training.first:
            raise RunError(f"{folder} has no checkpoint")
        training.evaluate(training.first)
        return {"step": training.first, **training.evaluated}


class Training:
    """One process's part of a run. Entering it builds, checks, warms up and resumes; `steps` is the loop.

    Args:
        task: what to train.
        config: concrete.
        place: of this process.
        group: all processes.
        folder: of the run.
        writing: whether anything is shown and written.
    """

    def __init__(
        self, task: Task, config: RunConfig, place: Place, group: Group, folder: Path, *, writing: bool = True
    ) -> None:
        self._config, self._place, self._folder, self._writing = config, place, folder, writing
        train = config.train
        source = source_of(task, config, place.world_size)
        self.plan = plan_of(task, source, config, place.world_size)
        self._split = Split.of(train.global_batch, place.world_size, config.layout.micro_batch)
        self._scalars = Scalars(config, self.plan.steps)
        self.held_out = held_out_of(task, config, place, self._split)
        self._task, self._source = task, source
        self._loader = self._load()
        self._engine = create_engine(Job(task, config, place, group, self._split))
        self._rows = facts_of(source)
        self._about = {**self._rows, **task.facts()}
        self._boundary = Boundary(group, folder, config.launch.preempt_deadline, run_lock.inherited(folder), writing)
        self.evaluated: dict[str, float] = {}
        self._evaluated_after: int | None = None
        self._shapes = Shapes(watching=config.layout.compile)

    def _load(self) -> Loader:
        return Loader.of(
            self._task, self._source, self.plan, self._split, self._place, self._config, contents=self._writing
        )

    def __enter__(self) -> Training:
        with ExitStack() as opened:
            opened.callback(self._close)
            self._found = self._where_to_go_on()
            self._loader.start()  # beside the model's making
            with heartbeat.phase("setup"):
                self._facts = self._engine.setup(next(iter(self._loader.steps(0))), self._scalars(0))
                self.first = self.made = self._found.load(self._engine, self.plan)
            if self._writing:
                self._find_room()
            self._ledger = opened.enter_context(self._open_ledger()) if self._writing else None
            total, observe = self.plan.steps, self._config.observe
            told = {"config": fingerprint.plain(self._config), "facts": self._told()}
            record = Record(self._folder, observe, self._place, self.first, total, self._writing, told)
            self.record = opened.enter_context(record)
            uploading = self._writing and self._place.is_first
            self.uploads = Uploads(self._config, self._folder, uploading, self.record.say, self.record.note)
            opened.callback(self.uploads.close)
            if self._writing:
                self._check_best()
            saver = Saver(
                self._folder / "checkpoints", self._engine.communicator, self._config.checkpoint,
                first=self.first, finished=self.uploads.finished, say=self.record.say, allowed=self._boundary.kept,
                deadline=self._config.launch.deadlines.save,
            )  # fmt: skip
            self._saver = opened.enter_context(saver)
            for note in self._found.notes(total):
                self.record.note(self.first, note)
            self._introduce()
            profile = Profile(observe.profile, self._engine, self._folder, self.first, total, self.record.say)
            self._profile = opened.enter_context(profile)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def steps(self) -> Iterator[StepResult]:
        """Make every step that is left: data, update, record, evaluation, checkpoint."""
        config, engine, record, total = self._config, self._engine, self.record, self.plan.steps
        boundary = self._boundary
        until = min(total, config.run.stop_after or total)
        boundary.open()
        if self.first and self._evaluates(self.first) and not self._was_evaluated(self.first):
            self.evaluate(self.first)  # a preempted run had no time for it
        self._profile.between(self.first)
        heartbeat.step(self.first)
        watch = Stopwatch()
        batches = engine.incoming(self._batches(watch, self.first))
        for step in range(self.first, until):
            with self._profile.step(), heartbeat.unchanged():
                micro_batches = next(batches)
                with heartbeat.phase("compute", self._shapes.told(micro_batches)):
                    result = engine.step(micro_batches, step, self._scalars(step))
            self._saver.check()
            if self._ledger is not None:
                self._ledger.step(step, micro_batches)
            made = self.made = step + 1
            rows = self._rows_of(micro_batches) if result.skipped else []
            speed = self._speed(result, *watch.lap())
            if step == self.first and config.checkpoint.every is not None:
                self._saver.prepare(engine.state())
            heartbeat.step(made, speed.seconds)
            record.step(made, result, self._scalars(step), speed, rows, self._saver.unsaved_since)
            for line in self._loader.news(speed.wait):
                log.warning("%s", line)
                record.say(line)
            log.info("step %d loss %.6f grad_norm %.6f", made, result.loss, result.grad_norm)
            decision = boundary.decide(self._saver.seconds)
            if self._evaluates(made) and not decision.preempted:
                self.evaluate(made)
                decision |= boundary.decide(self._saver.seconds)
            at_end = made == until and (until < total or config.checkpoint.at_end)
            due = _due(made, config.checkpoint.every) or at_end
            if decision.save or (due and not decision.preempted):
                self._save(made, at_once=decision.preempted)
                decision |= boundary.decide(self._saver.seconds)
            self.uploads.check()
            self._profile.between(made)
            yield result
            if decision.preempted:
                self._bring(decision)
                raise boundary.preempted(made, total, self._saver.saved, decision.why)
            if decision.stop and made < total:
                record.say(f"stopped after step {made} of {total}, as asked; the same command goes on")
                return
            watch.lap()  # evaluation, saving and the caller are no part of a step's time
        self._saver.finish()
        if until < total:
            record.say(f"stopped after step {self.made} of {total} (run.stop_after); a start without it goes on")
        if self.first >= total:
            record.say(f"all {total} steps were made before")
            self.evaluated = events.last_evaluation(events.read(self._folder / "events.jsonl"))

    def finish(self) -> None:
        """Wait for the last checkpoint to be in its store.

        Raises:
            Preempted: if the run had to go before it was there.
            UploadError: if it is not there in time, and has to be.
        """
        if self._bring(Decision()):
            raise self._boundary.preempted(self.made, self.plan.steps, self._saver.saved, "")

    def _bring(self, decision: Decision) -> bool:
        """Wait for the last upload, all ranks together, and no longer than a run may that has to go.

        Returns:
            Whether that broke it off.
        """
        if self._config.checkpoint.upload.url is None:
            return False
        waits = True
        while waits and decision.left > 0:
            with heartbeat.phase("save", "the last upload"):
                seconds = max(0.0, min(1.0, decision.left))
                waits = bool(
                    self._engine.communicator.highest([int(self.uploads.waits(seconds))], "the last upload")[0]
                )
            decision |= self._boundary.decide()
        self.uploads.finish(required=not decision.preempted)
        return waits

    def _find_room(self) -> None:
        """See, on rank 0, that the checkpoints to come fit on the disk."""
        told, folder, config = None, self._folder, self._config
        if self._place.is_first:
            size = disk_space.of_newest(folder) or disk_space.estimated(config, self._facts.parameters)
            try:
                disk_space.check(folder, config, size, disk_space.planned(config, self.first, self.plan.steps))
            except RunError as error:
                told = str(error)
        if refused := self._engine.communicator.gather(told, "room for the checkpoints")[0]:
            raise RunError(refused)

    def _evaluates(self, made: int) -> bool:
        evaluation = self._config.eval
        return _due(made, evaluation.every) or (made == self.plan.steps and evaluation.at_end)

    def _was_evaluated(self, made: int) -> bool:
        """Whether rank 0 has told an evaluation after so many updates."""
        told = events.read(self._folder / "events.jsonl") if self._place.is_first else []
        known = any(event.get("eval") and event["step"] == made for event in told)
        return bool(self._engine.communicator.gather(known, "whether the newest checkpoint was evaluated")[0])

    def _batches(self, watch: Stopwatch, first: int) -> Generator[list[MicroBatch]]:
        """The micro-batches of all steps from `first` on; waiting for them is watched, whoever asks and when."""
        steps = self._loader.steps(first)
        for _ in range(first, self.plan.steps):
            with watch.waiting(), self._engine.profiler.part("data"):
                micro_batches = next(steps)
            yield micro_batches

    def evaluate(self, made: int) -> None:
        """Evaluate on the held-out rows, if there are any, after `made` updates."""
        if self.held_out is not None:
            began = perf_counter()
            with heartbeat.phase("evaluate"):
                self.evaluated = self.held_out.evaluate(self._engine, made, self._scalars(made))
                self._evaluated_after = made
                self.best.see(made, self.evaluated)
            self.record.evaluation(made, self.evaluated, self.held_out.rows, perf_counter() - began)

    def _rows_of(self, batches: list[MicroBatch]) -> list[int]:
        """The source rows of a step, of all processes in the order of the global batch."""
        own = [row for micro in batches if not micro.idle for row in micro.rows.tolist()]
        return [row for rows in self._engine.communicator.gather(own, "the rows of an update left out") for row in rows]

    def _open_ledger(self) -> Ledger:
        group = self._engine.communicator
        start = group.gather(uuid.uuid4().hex, "a name for this start of the run")[0]
        return Ledger(self._folder, group.rank, group.size, self.first, start)

    def _where_to_go_on(self) -> Found:
        """The checkpoint to go on from, once all processes have the same data; see `unisono.checkpoint.core.resume`."""
        group = self._engine.communicator
        provenance.agree(group, {"the data": self._rows})
        self._here = provenance.of(self._config, self._rows, self._place)
        again = None if self._config.checkpoint.upload.url is None else self._again
        found = resume.choose(self._folder, self._config, self._here, self.plan.steps, group, self._writing, again)
        self.best = Best(found.kept("best"))
        if self._writing and self._place.is_first:
            trackers.restore(self._folder, found.kept("trackers") or {})
        return found

    def _again(self, path: Path) -> tuple[Path | None, str]:
        """Bring a damaged checkpoint again; the store is opened only where one is damaged."""
        store = store_of(self._config)
        assert store is not None
        return restore.again(store, path)

    def _save(self, made: int, at_once: bool) -> None:
        self._boundary.owned()
        self._check_files()
        if at_once:
            self._saver.hurry()
        with heartbeat.phase("save"), self._boundary.saving():
            self._commit(made)
            if at_once:
                self._saver.finish()

    def _check_files(self) -> None:
        """Refuse, on all ranks together, to save what was made of data that change; each looks at its share of files.

        Raises:
            DataError: on every rank, naming a file.
        """
        told, place = None, self._place
        sources = [self._source, *([self.held_out.source] if self.held_out is not None else [])]
        try:
            for one in (one for source in sources for one in watched(source)):
                one.check_files(place.local_rank, place.local_world_size)
        except DataError as error:
            told = str(error)
        if found := [
            text for text in self._engine.communicator.gather(told, "whether the data are what they were") if text
        ]:
            raise DataError(f"{found[0]}. What was made since the newest checkpoint is not saved")

    def _commit(self, made: int) -> None:
        self._engine.check_replicas(made)  # of copies a checkpoint has one piece from this rank and one from that
        mark = None
        if self._ledger is not None:
            self._ledger.flush()
            mark = self._ledger.mark()
        state = resume.state(
            self._found, made, self.plan, self._split.own(self._place.rank), self._engine.communicator,
            random=self._engine.random, micro_batch=self._split.micro_batch, mark=mark, best=self.best.state(),
            trackers=trackers.ids(self._folder),
        )  # fmt: skip
        holds = self._config.checkpoint.final if made == self.plan.steps else "everything"
        shards = self._engine.state()
        shards = resume.weights(shards) if holds == "model" else shards
        metric = self.evaluated if self._evaluated_after == made else None
        self._saver.save(made, shards, state, provenance.now(self._here, self._config), metric, holds=holds)

    def _check_best(self) -> None:
        """Refuse to keep the best checkpoint by what no evaluation says, before the first step."""
        checkpoint = self._config.checkpoint
        if checkpoint.keep_best is not None:
            names = self.held_out.names(self._engine, self.first, self._scalars(self.first)) if self.held_out else []
            retention.check(checkpoint, names)

    def _introduce(self) -> None:
        """Say what is about to be trained, on what."""
        facts, layout, split = self._facts, self._config.layout, self._split
        devices = self._place.world_size * facts.devices
        where = f"{devices} × {facts.device}, {layout.strategy}, {self._config.train.precision}"
        batch = f"{split.global_batch} = {split.world_size} × {split.passes} × {split.micro_batch} rows"
        name = self._config.recipe.rpartition(":")[2]
        self.record.say(
            f"{name}: {short(facts.parameters)} parameters, {where}, {self.plan.steps} steps, global batch {batch}"
        )
        for name, value in {**facts.kernels, **self._about}.items():
            self.record.say(f"  {name}: {value}")
        for line in facts.updates:
            self.record.say(f"  {line}")
        self.record.say(f"  loading: {self._loader.facts()}")
        for line in self._found.lines():
            self.record.say(line)

    def _told(self) -> dict[str, Any]:
        """Facts of the run and its system, for trackers."""
        known = self._folder / "fingerprint.json"
        start = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
        device = {"device": self._facts.device, "parameters": self._facts.parameters}
        return {**start, **device, "world_size": self._place.world_size, "data": self._about}

    def _speed(self, result: StepResult, seconds: float, wait: float) -> Speed:
        unit = next((name for name in result.work if name not in ("rows", "flops", "masked")), "rows")
        peak = peak_flops(self._facts.device, self._config.train.precision)
        # A frozen matrix gets no gradient, so with adapters there are fewer than the task counts.
        flops = 0.0 if self._config.adapter else result.work.get("flops", 0.0)
        devices = self._place.world_size * self._facts.devices
        mfu = flops / seconds / (peak * devices) if peak and flops else None
        return Speed(unit, result.work.get(unit, 0.0) / seconds, mfu, wait, seconds)

    def _close(self) -> None:
        self._loader.close()
        if self.held_out is not None:
            self.held_out.close()
        self._engine.close()


@contextmanager
def _pointing_to_a_proof(recipe: str) -> Iterator[None]:
    """Say of what a guard found what a proof would say of it, and that a proof says more."""
    try:
        yield
    except GuardError as error:
        more = f"`unisono prove {shlex.quote(recipe)}`, with the settings of this run, shows where it begins"
        error.args = (f"{error}\n  likely: {error.fault}\n  page: {page(error.fault)}\n  {more}",)
        raise


def held_out_of(task: Task, config: RunConfig, place: Place, split: Split) -> HeldOut | None:
    """The task's held-out rows, if it has any."""
    set_up(task)
    source = task.held_out()
    if source is None:
        return None
    return HeldOut(task, source, config, place, split.micro_batch, split.global_batch)


def _due(made: int, every: int | None) -> bool:
    return every is not None and made % every == 0
