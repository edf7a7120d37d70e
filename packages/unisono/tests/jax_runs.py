"""Run the JAX engine without a launcher, and write down everything that layouts have to agree on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from packages.unisono.tests.runs import Trace, configuration, record
from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.engines.jax.engine import JaxEngine, create
from unisono.engines.protocol import EngineJob
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.task import Task

__all__ = ["Trace", "configuration", "trace"]


def whole(array: jax.Array) -> np.ndarray:
    """All of an array, gathered if it is cut."""
    if array.is_fully_addressable:
        return np.asarray(array)
    replicated = jax.sharding.NamedSharding(array.sharding.mesh, jax.sharding.PartitionSpec())
    return np.asarray(jax.jit(lambda a: a, out_shardings=replicated)(array))


def layout(devices: int = 1, strategy: str = "single", **more: Any) -> dict[str, Any]:
    """The group `layout` of a JAX run on this process's devices."""
    return {"engine": "jax", "devices": devices, "strategy": strategy, **more}


def parameters(engine: JaxEngine) -> dict[str, np.ndarray]:
    """What is trained, by name."""
    return {name: whole(array) for name, array in engine.held.state.parameters.items()}


def averages(engine: JaxEngine) -> dict[str, np.ndarray]:
    """The moving averages, by name."""
    return {name: whole(value) for name, value in engine.held.state.average.items()}


def trace(task: Task, config: RunConfig, place: ProcessInfo | None = None, group: Communicator | None = None) -> Trace:
    """Train and evaluate a task; all processes return the same trace."""
    place, devices = place or ProcessInfo(), config.layout.devices
    assert isinstance(devices, int)
    split = BatchSplit.create(config.train.global_batch, place.world_size, config.layout.micro_batch, devices)
    job = EngineJob(task, config, place, group or SingleProcess(), split)
    return record(create, job, raw_gradients, parameters, averages)


def raw_gradients(engine: JaxEngine, batches: Any, scalars: Any) -> dict[str, np.ndarray]:
    """The gradient of the global batch as the step would use it, before it is clipped."""
    from unisono.engines.jax.batches import ColumnNames
    from unisono.engines.jax.step import Step

    batch, names = engine.batches.to_devices(batches), ColumnNames.from_micro_batch(batches[0])
    forward = engine.programs.forward(True, scalars, names)
    rows = engine._count_rows(batches, "a test")
    defer = engine._config.layout.defer_reduction
    step = Step(forward, engine.programs.optimizer, batch.number.shape[0], defer, rows)
    inputs = engine.programs.inputs(0, scalars, False, {})
    made = jax.jit(step.gradients)(engine.held.state, engine.held.constants, batch, inputs)[0]
    return {name: whole(array) for name, array in made.items()}
