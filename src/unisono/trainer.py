"""The loop, top to bottom: order → step → record → evaluate → save. It knows neither torch nor JAX, only engines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from unisono.checkpoint import commit
from unisono.checkpoint.arrays import ArrayReader
from unisono.config.schema import RunConfig
from unisono.config.split import Split
from unisono.data.loader import Loader
from unisono.data.order import Order, Plan
from unisono.engines.base import Engine, Facts, StepResult
from unisono.errors import CheckpointError, DataError, RunError
from unisono.evaluation.held_out import HeldOut
from unisono.observe import logs
from unisono.observe.peaks import peak_flops
from unisono.observe.progress import Speed, Stopwatch, short
from unisono.observe.record import Record
from unisono.optim import schedules
from unisono.place import Group, Place
from unisono.task import Source, Task

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
    source = rows_of(task)
    plan = Plan.of(
        Order(len(source), config.run.seed), config.train.global_batch, config.train.steps, config.train.epochs
    )
    split = Split.of(config.train.global_batch, place.world_size, config.layout.micro_batch)
    scalars = Scalars(config, plan.steps)
    engine = engine_of(task, config, place, group, split)
    loader = Loader(task, source, plan, split, place.rank, workers=config.data.workers, prefetch=config.data.prefetch)
    try:
        facts = engine.setup(next(iter(loader.steps(0))), scalars(0))
        first = _resume(engine, folder)
        held_out = held_out_of(task, config, place, split)
        with Record(folder, config.observe, place, first, plan.steps) as record:
            record.say(describe(facts, config, place, split, plan, source, held_out))
            for name, value in task.facts().items():
                record.say(f"  {name}: {value}")
            if first:
                record.say(f"continuing after step {first}")
            result = _train(engine, loader, plan, config, scalars, record, held_out, facts, place, folder, first)
            record.say(f"run: {folder}")
        return result
    finally:
        loader.close()
        engine.close()
        logs.stop()


def evaluate(task: Task, config: RunConfig, place: Place, group: Group, folder: Path) -> dict[str, float]:
    """The loss and metrics of a run's newest checkpoint on the held-out rows; arguments as in `run`.

    Raises:
        RunError: if the run has no checkpoint or its task holds no rows out.
    """
    source = rows_of(task)
    plan = Plan.of(
        Order(len(source), config.run.seed), config.train.global_batch, config.train.steps, config.train.epochs
    )
    split = Split.of(config.train.global_batch, place.world_size, config.layout.micro_batch)
    held_out = held_out_of(task, config, place, split)
    if held_out is None:
        raise RunError(f"{folder}: the task holds no rows out")
    scalars = Scalars(config, plan.steps)
    engine = engine_of(task, config, place, group, split)
    loader = Loader(task, source, plan, split, place.rank)
    try:
        engine.setup(next(iter(loader.steps(0))), scalars(0))
        made = _resume(engine, folder)
        if not made:
            raise RunError(f"{folder} has no checkpoint")
        result = engine.evaluate(held_out.batches(), made, scalars(made))
        return {"step": made, "loss": result.loss, **result.metrics}
    finally:
        loader.close()
        engine.close()


def _train(
    engine: Engine,
    loader: Loader,
    plan: Plan,
    config: RunConfig,
    scalars: Scalars,
    record: Record,
    held_out: HeldOut | None,
    facts: Facts,
    place: Place,
    folder: Path,
    first: int,
) -> Result:
    loss: float | None = None
    evaluated: dict[str, float] = {}
    peak = peak_flops(facts.device, config.train.precision)
    watch = Stopwatch()
    batches = loader.steps(first)
    for step in range(first, plan.steps):
        asked = perf_counter()
        micro_batches = next(batches)
        watch.got_data(asked)
        result = engine.step(micro_batches, step, scalars(step))
        seconds, wait = watch.lap()
        loss, made, last = result.loss, step + 1, step + 1 == plan.steps
        record.step(made, result, scalars(step), _speed(result, seconds, wait, peak, place))
        log.info("step %d loss %.6f grad_norm %.6f seconds %.3f", made, loss, result.grad_norm, seconds)
        if held_out and (_due(made, config.eval.every) or (last and config.eval.at_end)):
            evaluated = _evaluate(engine, held_out, made, scalars(step), record)
        if _due(made, config.checkpoint.every) or (last and config.checkpoint.at_end):
            state = {"step": made, "random": facts.random, "micro_batch": config.layout.micro_batch}
            commit.save(folder / "checkpoints", made, engine.state(), state, engine.group, config.checkpoint.keep)
        watch.lap()  # evaluation and saving are no part of a step's time
    if first == plan.steps:
        record.say(f"all {plan.steps} steps were made before")
        if held_out and config.eval.at_end:
            evaluated = _evaluate(engine, held_out, first, scalars(first), record)
    return Result(folder, plan.steps, loss, evaluated)


def _evaluate(
    engine: Engine, held_out: HeldOut, made: int, scalars: Mapping[str, float], record: Record
) -> dict[str, float]:
    began = perf_counter()
    result = engine.evaluate(held_out.batches(), made, scalars)
    record.evaluation(made, result, held_out.rows, perf_counter() - began)
    return {"loss": result.loss, **result.metrics}


def _resume(engine: Engine, folder: Path) -> int:
    """Load the newest checkpoint, the one that rank 0 sees; returns the updates made, 0 if there is none."""
    found = commit.find(folder / "checkpoints")
    names = engine.group.gather(found[-1].name if found else None, "the newest checkpoint")
    if names[0] is None:
        return 0
    if len(set(names)) > 1:
        raise CheckpointError(
            f"{folder / 'checkpoints'}: the ranks see different newest checkpoints, {names}; is it a shared folder?"
        )
    checkpoint = commit.open_(folder / "checkpoints" / names[0])
    engine.load(ArrayReader(checkpoint.path, checkpoint.arrays))
    log.info("continuing after step %d from %s", checkpoint.step, checkpoint.path)
    return checkpoint.step


class Scalars:
    """Every scheduled value of a step: `lr` and `clip_norm` always, and whatever else `schedules` names."""

    def __init__(self, config: RunConfig, total: int) -> None:
        schedules.check(config.schedules, total)
        self._config, self._total = config, total

    def __call__(self, step: int) -> dict[str, float]:
        """The values by name; a pure function of the step."""
        config = self._config
        peaks = {"lr": config.optim.lr, "weight_decay": config.optim.weight_decay, "clip_norm": config.train.clip_norm}
        values = {name: peak for name in ("lr", "clip_norm") if (peak := peaks[name]) is not None}
        for name, schedule in config.schedules.items():
            peak = peaks.get(name, schedule.peak)
            assert peak is not None
            values[name] = schedules.value(schedule, peak, step, self._total)
        return values


def engine_of(task: Task, config: RunConfig, place: Place, group: Group, split: Split) -> Engine:
    """The engine that the layout names."""
    from unisono.engines.torch.engine import TorchEngine

    return TorchEngine(task, config, place, group, split)


def rows_of(task: Task) -> Source:
    """The task's rows, or an error that says why they cannot be used."""
    source = task.data()
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        raise DataError(
            f"{type(task).__name__}.data() returned a {type(source).__name__}, whose rows cannot be had by number. "
            "Give it __len__ and __getitem__ (a map-style Dataset), or list the rows."
        )
    if len(source) == 0:
        raise DataError(f"{type(task).__name__}.data() has no rows")
    return source


def held_out_of(task: Task, config: RunConfig, place: Place, split: Split) -> HeldOut | None:
    """The task's held-out rows, if it has any."""
    source = task.held_out()
    return None if source is None else HeldOut(task, source, config, place, split.micro_batch)


def describe(
    facts: Facts, config: RunConfig, place: Place, split: Split, plan: Plan, source: Source, held_out: HeldOut | None
) -> str:
    """The run in one line."""
    layout = config.layout
    kept = f", {held_out.rows} held out" if held_out else ""
    name = config.recipe.rpartition(":")[2]
    return (
        f"{name}: {short(facts.parameters)} parameters on {place.world_size} × {facts.device} "
        f"({layout.strategy}, {config.train.precision}); {len(source)} rows{kept}; global batch {split.global_batch} = "
        f"{place.world_size} × {split.passes} × {split.micro_batch}; {plan.steps} steps"
    )


def _speed(result: StepResult, seconds: float, wait: float, peak: float | None, place: Place) -> Speed:
    unit = next((name for name in result.work if name not in ("rows", "flops")), "rows")
    flops = result.work.get("flops", 0.0)
    mfu = flops / seconds / (peak * place.world_size) if peak and flops else None
    return Speed(unit, result.work.get(unit, 0.0) / seconds, mfu, wait, seconds)


def _due(made: int, every: int | None) -> bool:
    return every is not None and made % every == 0
