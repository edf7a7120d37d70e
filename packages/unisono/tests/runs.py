"""Run an engine without a launcher, and write down everything that layouts have to agree on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from unisono.callback import Callback
from unisono.checkpoint.core import commit, provenance, resume_point
from unisono.checkpoint.core.manifest import Checkpoint
from unisono.config.batch_split import BatchSplit
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.data import Data
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader
from unisono.data.order.order import Order
from unisono.data.order.plan import StreamPlan
from unisono.data.order.planning import build_plan, build_source, source_facts
from unisono.engines.observers import ModelView, Observer
from unisono.engines.protocol import EngineJob
from unisono.engines.torch.engine import TorchEngine
from unisono.evaluation.held_out import HeldOut
from unisono.observe import events
from unisono.optim.schedules import ScheduledScalars
from unisono.optim.sharded import gather_full
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.task import Task
from unisono.training import loop
from unisono.training.loop import Result
from unisono.training.parts import TrainingParts

SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ADAMW = {"kind": "adamw", "lr": 1e-2}


def configuration(**groups: Any) -> RunConfig:
    """A concrete configuration; groups are given as dictionaries and filled up with what tests mostly want."""
    one = {"engine": "torch", "strategy": "single", "world_size": 1, "device": "cpu", "threads": 1}
    layout = {**one, **groups.pop("layout", {})}
    train = {"steps": 4, "global_batch": 12, **groups.pop("train", {})}
    if "epochs" in train:
        train.pop("steps")
    data = Data.model_validate(groups.pop("data", {}))
    values = {"recipe": "test", "optim": SGD, "run": {"name": "test"}, **groups, "layout": layout, "train": train}
    return RunConfig.model_validate(values).model_copy(update={"data": data})


@dataclass
class Trace:
    """What a run did, gathered to whole tensors on every rank."""

    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    parameters: dict[str, np.ndarray] = field(default_factory=dict)
    before: dict[str, np.ndarray] = field(default_factory=dict)
    evaluation: dict[str, float] = field(default_factory=dict)
    average: dict[str, np.ndarray] = field(default_factory=dict)
    recompiled: list[str] = field(default_factory=list)


class InterruptionError(Exception):
    pass


@contextmanager
def interrupted(before: int | None) -> Iterator[None]:
    """Whatever trains in here has to come to this step, and ends before it; None lets it make every step."""
    step = TorchEngine.step

    def limited(engine: Any, batches: Any, number: int, scalars: Any) -> Any:
        if number == before:
            raise InterruptionError
        return step(engine, batches, number, scalars)

    with mock.patch.object(TorchEngine, "step", limited):
        if before is None:
            yield
        else:
            with pytest.raises(InterruptionError):
                yield


class FirstGradients(Observer):
    """Keeps the raw gradients of the first step."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.raw: dict[str, np.ndarray] = {}

    def on_gradients(self) -> None:
        if not self.raw:
            parameters = self.view.module.named_parameters()
            self.raw.update({name: whole(p.grad) for name, p in parameters if p.grad is not None})


def engine_of(task: Task, config: RunConfig, place: ProcessInfo, group: Communicator, split: BatchSplit) -> TorchEngine:
    """An engine, not set up."""
    return TorchEngine(EngineJob(task, config, place, group, split))


def layout(strategy: str, **more: Any) -> dict[str, Any]:
    """The group `layout` of a run on one process, or on two."""
    shards = {"shards": 2} if strategy == "hsdp" else {}
    return {"strategy": strategy, "world_size": 1 if strategy == "single" else 2, **shards, **more}


def prepared(place: ProcessInfo, group: Communicator, task: Any, config: RunConfig) -> tuple[Any, Any]:
    """An engine that is not set up, and the micro-batches of its steps."""
    source = task.data()
    plan = StreamPlan.create(Order(len(source), 0), config.train.global_batch, config.train.steps, config.train.epochs)
    split = BatchSplit.create(config.train.global_batch, place.world_size, config.layout.micro_batch)
    engine = engine_of(task, config, place, group, split)
    return engine, list(Loader(task, source, plan, split, place.rank).steps())


def started(place: ProcessInfo, group: Communicator, task: Any, config: RunConfig) -> tuple[Any, Any]:
    """An engine that is set up, and the micro-batches of its steps."""
    engine, steps = prepared(place, group, task, config)
    engine.setup(steps[0], {"lr": 0.1})
    return engine, steps


@contextmanager
def logged(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What this package logs inside, in a process that pytest's `caplog` does not reach."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("unisono").removeHandler(handler)


def parameters(engine: TorchEngine) -> dict[str, np.ndarray]:
    """Whole parameters, on every rank."""
    return {name: whole(p) for name, p in engine.view.module.named_parameters()}


def averages(engine: TorchEngine) -> dict[str, np.ndarray]:
    """Whole moving averages, on every rank."""
    return {name: whole(value) for name, value in engine.train_state.average.tensors.items()}


def whole(tensor: torch.Tensor) -> np.ndarray:
    return gather_full(tensor.detach()).cpu().numpy().copy()


def raw_gradients(engine: TorchEngine, batches: Any, scalars: Any) -> dict[str, np.ndarray]:
    """The raw gradients of the step that comes next; the dictionary is filled by it."""
    first = FirstGradients(engine.view)
    engine.observe(first)
    return first.raw


def trace(place: ProcessInfo, group: Communicator, task: Task, config: RunConfig) -> Trace:
    """Train and evaluate a task; all ranks return the same trace."""
    split = BatchSplit.create(config.train.global_batch, place.world_size, config.layout.micro_batch)
    return record(TorchEngine, EngineJob(task, config, place, group, split), raw_gradients, parameters, averages)


def record(
    create: Callable[[EngineJob], Any],
    job: EngineJob,
    gradients: Callable[[Any, Any, Any], dict[str, np.ndarray]],
    parameters: Callable[[Any], dict[str, np.ndarray]],
    averages: Callable[[Any], dict[str, np.ndarray]],
) -> Trace:
    """Train and evaluate with an engine of either kind; the functions read its arrays, whole, on every rank."""
    task, config, place, split = job.task, job.config, job.process, job.split
    source = build_source(task, config, place.world_size)
    plan = build_plan(task, source, config, place.world_size)
    loader = Loader(task, source, plan, split, place.rank, on_error=config.data.on_error)
    scalars = ScheduledScalars(config, plan.steps)
    engine = create(job)
    result = Trace()
    try:
        engine.setup(next(iter(loader.steps())), scalars(0))
        result.before = parameters(engine)
        for step, batches in enumerate(engine.incoming(loader.steps())):
            consumed = [[m.number, m.rows.tolist()] for m in batches if not m.idle]
            everyone = sorted(pair for part in job.communicator.gather(consumed, "rows") for pair in part)
            result.rows.append([row for _, rows in everyone for row in rows])
            if step == 0:
                result.gradients = gradients(engine, batches, scalars(0))
            done = engine.step(batches, step, scalars(step))
            result.recompiled.append(done.recompiled)
            result.losses.append(done.loss)
            result.norms.append(done.grad_norm)
            result.metrics.append({**done.terms, **done.metrics, **done.work})
        result.parameters = parameters(engine)
        result.average = averages(engine)
        held_out = task.held_out()
        if held_out is not None:
            rows = HeldOut(task, held_out, config, place, split.micro_batch)
            done = engine.evaluate(rows.batches(), plan.steps, scalars(plan.steps))
            result.evaluation = {"loss": done.loss, **done.terms, **done.metrics}
            if result.average:
                result.evaluation |= rows.evaluate(engine, plan.steps, scalars(plan.steps))
            rows.close()
    finally:
        loader.close()
        engine.close()
    return result


def traces(place: ProcessInfo, group: Communicator, cases: list[tuple[Task, RunConfig]]) -> list[Trace]:
    """Several runs in the same processes, one after the other."""
    return [trace(place, group, task, config) for task, config in cases]


def distance(mine: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> dict[str, float]:
    """‖a − b‖ / max(‖b‖, 10⁻³ ‖all b‖) per tensor: relative, but not to a tensor that is nearly zero."""
    assert mine.keys() == reference.keys()
    everything = np.sqrt(sum(float(np.square(b, dtype=np.float64).sum()) for b in reference.values()))
    return {
        name: float(np.linalg.norm(np.float64(mine[name]) - np.float64(b)))
        / max(float(np.linalg.norm(np.float64(b))), 1e-3 * everything, 1e-300)
        for name, b in reference.items()
    }


def assert_same(mine: Trace, reference: Trace, floor: float = 1e-12, norms: float | None = None) -> None:
    """Two runs began with the same bits, saw the same rows and computed the same up to a floor (norms to another)."""
    assert mine.rows == reference.rows
    assert max(distance(mine.before, reference.before).values()) == 0, "initial parameters"
    for kind in ("gradients", "parameters", "average"):
        found = distance(getattr(mine, kind), getattr(reference, kind))
        assert max(found.values(), default=0.0) < floor, (kind, max(found, key=lambda name: found[name]))
    assert mine.losses == pytest.approx(reference.losses, rel=floor)
    assert mine.norms == pytest.approx(reference.norms, rel=floor if norms is None else norms)
    for ours, theirs in zip([*mine.metrics, mine.evaluation], [*reference.metrics, reference.evaluation], strict=True):
        assert ours == pytest.approx(theirs, rel=floor)


# what a run has left in its folder ------------------------------------------------------------------------------------


def steps(folder: Path) -> list[int]:
    """The steps that stand in its events, in order."""
    return [event["step"] for event in events.step_events(events.read_events(folder / "events.jsonl"))]


def evaluations(folder: Path) -> list[int]:
    """The steps after which its events say that it was evaluated, in order."""
    return [event["step"] for event in events.read_events(folder / "events.jsonl") if event.get("eval")]


def checkpoints(folder: Path) -> list[int]:
    """The steps of its checkpoints, in order."""
    return [commit.read_manifest(path).step for path in commit.find_checkpoints(folder / "checkpoints")]


# runs of the loop, without a launcher ---------------------------------------------------------------------------------


def resolved(task: Task, config: RunConfig, folder: Path, process: ProcessInfo | None = None) -> ResolvedRun:
    """A run in this folder, with whatever checkpoint is there; the layout is taken as it is."""
    world = (process or ProcessInfo()).world_size
    source = build_source(task, config, world)
    plan = build_plan(task, source, config, world)
    newest = resume_point.newest_readable(folder / "checkpoints")
    here = provenance.describe_run(config, source_facts(source))
    return ResolvedRun(config, folder, resume_point.decide_resume_point(folder, config, here, newest, plan.steps))


def train(
    folder: Path,
    config: RunConfig,
    task: Task,
    process: ProcessInfo | None = None,
    communicator: Communicator | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Train in this folder, from its newest checkpoint."""
    process = process or ProcessInfo()
    folder.mkdir(parents=True, exist_ok=True)
    run = resolved(task, config, folder, process)
    return loop.train(task, run, process, communicator or SingleProcess(), callbacks)


def evaluate(folder: Path, config: RunConfig, task: Task) -> dict[str, float]:
    """Evaluate the newest checkpoint of this folder, on one process."""
    run = ResolvedRun(config, folder, resume_point.list_all(folder))
    return loop.evaluate(task, run, ProcessInfo(), SingleProcess())


def training(
    task: Task, config: RunConfig, process: ProcessInfo, communicator: Communicator, folder: Path
) -> loop.Training:
    """The loop itself, for tests that look inside of a run."""
    return loop.Training(task, resolved(task, config, folder, process), process, communicator)


def newest(folder: Path) -> Checkpoint:
    """The newest checkpoint of this folder."""
    return commit.open_checkpoint(commit.find_checkpoints(folder / "checkpoints")[-1])


def saved_arrays(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint of this folder."""
    reader = newest(folder).reader()
    return {name: reader.read(name, (0,) * len(shape), shape) for name, shape in reader.shapes.items()}


def parts(task: Task, config: RunConfig, folder: Path) -> TrainingParts:
    """What one process computes with, set up from the newest checkpoint of this folder, which is only read."""
    run = ResolvedRun(config, folder, resume_point.list_all(folder))
    made = TrainingParts(task, run, ProcessInfo(), SingleProcess(), writing=False)
    try:
        made.setup(made.resume())
    except BaseException:
        made.close()
        raise
    return made


def without_gradient(reference: Trace) -> set[str]:
    """Tensors whose true gradient is zero: a key bias adds one number to all scores of a query. They have rounding."""
    whole = np.sqrt(sum(np.square(gradient, dtype=np.float64).sum() for gradient in reference.gradients.values()))
    return {name for name, gradient in reference.gradients.items() if np.linalg.norm(gradient) < 1e-7 * whole}
