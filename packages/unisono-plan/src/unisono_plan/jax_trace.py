"""One step of a JAX layout from its traced program: shapes alone, over a mesh that has no devices.

What one device computes up to its gradients is one program for any number of devices, so its operators are counted
(`jaxpr_costs`), as a GPU would run them. After that the arrays are global, and XLA itself decides what to send, so the
update is compiled, over as many virtual devices as this process has, and read from what XLA made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax import model
from unisono.engines.jax.batches import Batches, ColumnNames
from unisono.engines.jax.forward import Forward, Inputs
from unisono.engines.jax.numerics import optimizers, precision
from unisono.engines.jax.parallel.mesh import DEVICES, SHARD, Grid
from unisono.engines.jax.state import shardings
from unisono.engines.jax.step import CONTROLS, State, Step
from unisono.optim import ema
from unisono.optim.schedules import ScheduledScalars
from unisono.protocols import resolve_features
from unisono.task import Task
from unisono_plan.jaxpr_costs import record
from unisono_plan.recording import Collective, Kind, Recording, Trace, Work, allocated

_VIRTUAL = 1024  # devices over which an update is compiled at most; XLA for CPUs takes 2,048
_NAMES = {"all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
          "all-to-all": "all_to_all", "collective-permute": "collective_permute"}  # fmt: skip
_CALL = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(_NAMES)})(?:-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def start_virtual_devices(count: int) -> None:
    """Start JAX with CPUs in the place of devices, unless it was started before."""
    with suppress(RuntimeError):  # it was, and says so
        jax.config.update("jax_num_cpu_devices", min(count, _VIRTUAL))
        jax.config.update("jax_platforms", "cpu")


class JaxTracer:
    """Traces steps of a task. The compiled updates are kept, since they do not depend on the number of rows.

    Args:
        task: Whose `setup` has run.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._updates: dict[int, _Update] = {}  # by the number of shards

    def __call__(self, config: RunConfig, micro: MicroBatch, passes: int) -> Trace:
        """Trace one step; arguments as for `torch_trace.trace_torch_step`.

        Raises:
            ConfigError: For a model or an optimizer that a run would refuse.
        """
        switches = precision.pin(config.train.precision)
        try:
            return self._trace(config, micro, min(passes, 2))
        finally:
            precision.unpin(switches)

    def _trace(self, config: RunConfig, micro: MicroBatch, passes: int) -> Trace:
        count = config.layout.world_size
        assert isinstance(count, int)
        shards = {"fsdp": count, "hsdp": config.layout.shards or count}.get(config.layout.strategy, 1)
        grid = Grid(AbstractMesh((count // shards, shards), DEVICES))
        parts = _Parts.build(self._task, config, grid, micro)
        recording = parts.record(passes)
        if passes > 1:
            _separate_last(recording, parts.record(1))
        if shards not in self._updates:
            self._updates[shards] = parts.compile_update()
        update = self._updates[shards]
        recording.work |= {"optimizer": update.work}
        recording.collectives += update.collectives
        held: dict[Kind, int] = parts.held(passes)
        ends: dict[Kind, int] = {
            **held, "gradients": parts.local_bytes(parts.trained), "activations": update.temporary
        }  # fmt: skip
        peak, most = (_add(held, found) for found in (recording.peak, recording.most))
        recording.peak = max(peak, ends, key=lambda found: sum(found.values()))
        recording.most = {kind: max(most.get(kind, 0), ends.get(kind, 0)) for kind in {*most, *ends}}
        size = sum(prod(shape.shape) for shape in parts.trained.values())
        return Trace(recording, passes, micro.size, size, dict(micro.work))


def _add(one: Mapping[Kind, int], other: Mapping[Kind, int]) -> dict[Kind, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {*one, *other}}


def _separate_last(recording: Recording, one: Recording) -> None:
    """Mark the collectives that a micro-batch before the last has: those that one micro-batch has not."""
    left = [_kind_of(call) for call in one.collectives]
    for number, call in enumerate(recording.collectives):
        if (key := _kind_of(call)) in left:
            left.remove(key)
        else:
            recording.collectives[number] = replace(call, last=False)


def _kind_of(call: Collective) -> tuple[object, ...]:
    """A call without its size: a step of more micro-batches reports more numbers."""
    return call.kind, call.phase, call.ranks, call.size if call.kind != "all_reduce" else 0


@dataclass(frozen=True)
class _Update:
    """A compiled update, for one device.

    Attributes:
        work: Of it.
        collectives: That XLA has put into it.
        temporary: Bytes that it needs beside its arguments.
    """

    work: Work
    collectives: list[Collective]
    temporary: int


@dataclass(frozen=True)
class _Parts:
    """What a step is made of, in shapes.

    Attributes:
        config: Of the run.
        grid: Without devices.
        forward: The functions of the task.
        optimizer: Makes the update.
        trained: Arrays that are trained, by name.
        constants: The other arrays of the model.
        average: Names of those of which a moving average is kept.
        batch: One micro-batch.
        carry: State of its rows.
        inputs: Numbers of a step.
    """

    config: RunConfig
    grid: Grid
    forward: Forward
    optimizer: optimizers.Optimizer
    trained: dict[str, Any]
    constants: dict[str, Any]
    average: list[str]
    batch: Any
    carry: Any
    inputs: Inputs

    @classmethod
    def build(cls, task: Task, config: RunConfig, grid: Grid, micro: MicroBatch) -> _Parts:
        kind, features = config.train.precision, resolve_features(task)
        structure = model.build_structure(task, config.run.seed)
        optimizer = optimizers.build_optimizer(config.optim, structure, task.optimizer)
        scalars = ScheduledScalars(config, 1)(0)
        dynamic = tuple(sorted(name for name in scalars if name not in task.static_scalars))
        static = {name: round(scalars[name]) for name in task.static_scalars if name in scalars}
        forward = Forward(
            task, features, structure, grid, kind, ColumnNames.from_micro_batch(micro), dynamic, static, True,
            model.recompute_interval(structure, config.layout),
        )  # fmt: skip
        batches = Batches(BatchSplit(micro.size, 1, micro.size), grid, kind, lambda _: nullcontext())
        one = batches.pad(micro, micro.size)
        floats = {name: scalars[name] for name in dynamic} | dict.fromkeys(CONTROLS, 1.0)
        arrays = {
            name: jax.ShapeDtypeStruct(
                like.shape, precision.MASTER[kind] if jnp.issubdtype(like.dtype, jnp.floating) else like.dtype
            )
            for name, like in structure.shapes.items()
        }
        return cls(
            config,
            grid,
            forward,
            optimizer,
            {name: array for name, array in arrays.items() if name in structure.trained},
            {name: array for name, array in arrays.items() if name not in structure.trained},
            ema.averaged_names(config.ema, [name for name in arrays if name in structure.trained]),
            jax.tree.map(np.asarray, one),
            jax.eval_shape(features.initial_carry, one.arrays) or {},
            Inputs.for_step(0, config.run.seed, "dropout", True, floats, kind),
        )

    def state(self) -> State:
        """The state of a run without that of rows."""
        average = {name: self.trained[name] for name in self.average}
        return State(dict(self.trained), average, jax.eval_shape(self.optimizer.init, self.trained), {})

    def spread(self, tree: Any, passes: int) -> Any:
        """Micro-batches of all devices."""
        return jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((passes, self.grid.devices, *array.shape), array.dtype), tree
        )

    def step(self, passes: int) -> Step:
        layout = self.config.layout
        return Step(self.forward, self.optimizer, passes, layout.defer_reduction, 0, self.config.observe.norms)

    def record(self, passes: int) -> Recording:
        """What a device does up to its gradients."""
        state = replace(self.state(), carry=self.spread(self.carry, passes))
        rows = passes * self.grid.devices * len(jax.tree.leaves(self.batch.valid)[0])
        crosses = self.forward.features.cross_sample is not None
        step = replace(self.step(passes), rows=rows if crosses else 0)
        given = state, self.constants, self.spread(self.batch, passes), self.inputs
        closed, shapes = jax.make_jaxpr(step.gradients, return_shape=True)(*given)
        gradients, reports, carry, outputs = (len(jax.tree.leaves(part)) for part in shapes)
        wanted = [True] * (gradients + reports + carry) + [False] * outputs  # nobody looks at outputs
        program, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        (mapped,) = (equation for equation in program.eqns if equation.primitive.name == "shard_map")
        kinds: dict[int, Kind] = dict.fromkeys(range(gradients), "gradients")
        kinds |= dict.fromkeys(range(gradients + reports, gradients + reports + carry), "buffers")
        return record(mapped.params["jaxpr"], kinds, self._members)

    def _members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks of the first device's group over axes of the mesh."""
        count, shards = self.grid.devices, self.grid.shards
        if set(axes) == set(DEVICES):
            return tuple(range(count))
        return tuple(range(shards)) if SHARD in axes else tuple(range(0, count, shards))

    # memory -----------------------------------------------------------------------------------------------------------

    def local_bytes(self, arrays: Mapping[str, Any]) -> int:
        """Bytes of a device's part of arrays that lie as parameters do."""
        return sum(_local_size(array, self.grid) for array in arrays.values())

    def held(self, passes: int) -> dict[Kind, int]:
        """Bytes of a device that the caller of a step holds."""
        state = self.state()
        placed = jax.tree.leaves(shardings(state.optimizer, self.trained, self.grid))
        moments = sum(
            _allocated(array, self.grid.shards if any(sharding.spec) else 1)
            for array, sharding in zip(jax.tree.leaves(state.optimizer), placed, strict=True)
        )
        rows = passes * sum(_allocated(array) for array in jax.tree.leaves(self.batch))
        kept = passes * sum(_allocated(array) for array in jax.tree.leaves(self.carry))
        return {
            "parameters": self.local_bytes(self.trained), "optimizer": moments + self.local_bytes(state.average),
            "buffers": self.local_bytes(self.constants) + kept,
            "batch": 2 * rows,  # the next step's is copied there while this one is computed
        }  # fmt: skip

    # the update -------------------------------------------------------------------------------------------------------

    def compile_update(self) -> _Update:
        """What follows the gradients, as XLA makes it of global arrays."""
        devices = jax.devices("cpu")[: self.grid.shards]
        grid = Grid(Mesh(np.array(devices)[None], DEVICES))
        state, step = self.state(), self.step(1)
        lies = {name: grid.sharding(grid.spec(array.shape)) for name, array in self.trained.items()}
        placed = State(
            lies, {name: lies[name] for name in self.average}, shardings(state.optimizer, self.trained, grid), {}
        )
        columns = self.forward.columns
        assert columns is not None  # it was traced
        wide = precision.wide_dtype(self.config.train.precision)
        reports = jax.ShapeDtypeStruct((self.grid.devices, columns.count), wide)

        def update(before: State, raw: Any, reports: Any, inputs: Inputs) -> tuple[State, jax.Array]:
            return step.finish(before, raw, reports, inputs)[:2]

        compiled = jax.jit(
            update, donate_argnums=0, in_shardings=(placed, lies, grid.replicated, grid.replicated),
            out_shardings=(placed, grid.replicated),
        ).lower(state, dict(self.trained), reports, self.inputs).compile()  # fmt: skip
        costs, memory, text = compiled.cost_analysis() or {}, compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None  # of a CPU they are known
        products = "dot_general" in str(jax.make_jaxpr(update)(state, dict(self.trained), reports, self.inputs))
        work = Work(costs.get("flops", 0.0) if products else 0.0, 0.0, costs.get("bytes accessed", 0.0), 0)
        sent = collectives_of_program(text, len(devices))
        sent = [replace(call, ranks=tuple(range(self.grid.shards))) for call in sent]
        return _Update(work, sent, int(memory.temp_size_in_bytes))


def _local_size(array: Any, grid: Grid) -> int:
    return _allocated(array, grid.shards if any(grid.spec(array.shape)) else 1)


def _allocated(array: Any, shards: int = 1) -> int:
    return allocated(prod(array.shape) * np.dtype(array.dtype).itemsize / shards)


def collectives_of_program(text: str, members: int) -> list[Collective]:
    """The collectives that stand in a compiled program whose groups are all of its devices; those in loops once.

    Args:
        text: HLO.
        members: Devices of a group.
    """
    found = []
    for shapes, name in _CALL.findall(text):
        size = sum(
            prod(int(side) for side in sides.split(",") if side) * max(1, int(bits or 8) // 8)
            for _, bits, sides in _ARRAY.findall(shapes)
        )
        whole = size * members if name == "reduce-scatter" else size
        found.append(Collective(_NAMES[name], whole, tuple(range(members)), "optimizer"))
    return found if members > 1 else []
