"""The JAX engine: one jitted step over global arrays for every strategy; see `unisono.engines.jax.step`."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np

from unisono.config.batch_split import Split
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import MicroBatch
from unisono.engines import protocol
from unisono.engines.jax import checks, faults, model, optimizers, precision, replicas, results, state
from unisono.engines.jax.batches import Batches, Names, Pass
from unisono.engines.jax.compilation import Compiler
from unisono.engines.jax.mesh import Grid
from unisono.engines.jax.profiler import Profiler
from unisono.engines.jax.programs import Programs, Scalars
from unisono.engines.jax.step import AVERAGE_KEPT, LARGEST, LOSS_LIMIT, NORM_LIMIT, State
from unisono.engines.protocol import Facts, StepResult
from unisono.engines.state import Reader, Shard
from unisono.engines.torch.guards.spike_detection import Spikes
from unisono.optim import ema
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Group, Place
from unisono.runtime.errors import ConfigError
from unisono.task import Task

log = logging.getLogger(__name__)


class JaxEngine:
    """One process's part of a JAX run; see `unisono.engines.protocol.Engine`.

    Args:
        task: what to train.
        config: concrete, i.e. with no `auto` left in `layout`.
        place: of this process.
        group: all processes; JAX is started, and stopped, by whoever starts the process.
        split: of the global batch.
    """

    def __init__(self, task: Task, config: RunConfig, place: Place, group: Group, split: Split) -> None:
        self.group = group
        self._task, self._config, self._place, self._split = task, config, place, split
        self._kind = config.train.precision
        self._switches = precision.pin(self._kind)
        self.profiler: protocol.Profiler = Profiler()
        self._devices = _devices(split)
        self._grid = Grid.of(config.layout, self._devices)
        self._batches = Batches(split, self._grid, self._kind, self.profiler.part)
        self._compiler = Compiler(group)
        self._spikes = Spikes(config.optim.skip_spikes, group)
        self.random = False
        self._started = False  # whether rows have a state that a step has left
        self._steps_made = 0
        self._agreed: int | None = None

    # setup ------------------------------------------------------------------------------------------------------

    def setup(self, batches: list[MicroBatch], scalars: Scalars) -> Facts:
        """Build, lay out, check and compile; see `Engine.setup`."""
        task, seed = self._task, self._config.run.seed
        if unknown := [name for name in task.static_scalars if name not in scalars]:
            raise ConfigError(
                f"{type(task).__name__}.static_scalars: nothing schedules '{unknown[0]}'; set schedules.{unknown[0]}"
            )
        kernels = faults.kernels(task, self.group, self._devices[0].platform, self._kind)
        self._structure = model.structure_of(task, seed)
        recompute = model.recomputes(self._structure, self._config.layout)
        optimizer = optimizers.build(self._config.optim, self._structure)
        given = tuple(sorted(name for name in scalars if name not in task.static_scalars))
        self._programs = Programs(
            task, self._config, self._structure, optimizer, self._grid, self._compiler, given, recompute
        )
        names = Names.of(batches[0])
        self._check_functions(batches[0], scalars, names)
        arrays = model.initialise(task, self._structure, seed, self._grid, self._kind)
        self._constants = {
            name: arrays.pop(name) for name in self._structure.names if name not in self._structure.trained
        }
        kept = self._config.ema.decay is not None
        average = jax.tree.map(lambda array: array.copy(), arrays) if kept else {}
        placed = state.shardings(jax.eval_shape(optimizer.init, arrays), arrays, self._grid)
        batch = self._batches.of(batches)
        self._state = State(
            arrays, average, jax.jit(optimizer.init, out_shardings=placed)(arrays), self._first_carry(batch)
        )
        inputs = self._programs.inputs(0, scalars, self._started, {})
        self._programs.step(
            self._state, self._constants, batch, inputs, names, scalars, self._rows_of(batches, "the first step")
        )
        self._digests = self._digested()
        self._see_copies(self._digests, 0)
        device = self._devices[0]
        size = sum(math.prod(array.shape) for array in arrays.values())
        return Facts(
            size, "cpu" if device.platform == "cpu" else device.device_kind, {**kernels, **self._described()},
            tuple(optimizer.described(self._structure)), self._split.devices,
        )  # fmt: skip

    def _check_functions(self, micro: MicroBatch, scalars: Scalars, names: Names) -> None:
        """What can be asked of the task's functions on one device, before anything is compiled."""
        one = self._batches.padded(micro, self._split.micro_batch)
        alone = Grid.one(jax.local_devices()[0])
        for training in (True, False):
            forward = self._programs.forward(training, scalars, names, alone)
            inputs = self._programs.inputs(0, scalars, False, {} if training else None)
            checks.padding(forward, one, inputs)
            if training:
                checks.keeps_double(forward, one, inputs)
                self.random = checks.draws(forward, one, inputs)

    def _described(self) -> dict[str, str]:
        shapes = self._structure.shapes
        cut = sum(any(self._grid.spec(shape.shape)) for shape in shapes.values())
        shards = f", {cut} of {len(shapes)} arrays in {self._grid.shards} shards" if self._grid.shards > 1 else ""
        where = f"{self._grid.replicas} × {self._grid.shards} (replicas × shards){shards}"
        cached = " (from the cache)" if self._compiler.cached else ""
        return {"mesh": where, "compiled": f"in {self._compiler.seconds:.1f} s{cached}"}

    def _first_carry(self, batch: Pass) -> dict[str, Any]:
        """Room for the state of all rows."""
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[2:], array.dtype), batch.arrays)
        shapes = jax.eval_shape(self._task.first_carry, one) or {}
        lead = batch.number.shape[0], self._split.devices
        return {name: self._batches.spread(np.zeros((*lead, *like.shape), like.dtype)) for name, like in shapes.items()}

    # the step ---------------------------------------------------------------------------------------------------

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """See `Engine.incoming`."""
        return self._batches.incoming(steps)

    def step(self, batches: list[MicroBatch], step: int, scalars: Scalars) -> StepResult:
        """One update; see `Engine.step`."""
        with self._waiting(f"the other processes in step {step + 1}", step):
            self._compiler.news.clear()
            batch, names = self._batches.taken(batches), Names.of(batches[0])
            limits = self._spikes.limits()
            kept = ema.decay(self._config.ema, step + 1) if self._state.average else None
            controls = {
                LARGEST: scalars.get("clip_norm", math.inf), LOSS_LIMIT: limits.get("loss", math.inf),
                NORM_LIMIT: limits.get("grad_norm", math.inf), AVERAGE_KEPT: 1.0 if kept is None else kept,
            }  # fmt: skip
            inputs = self._programs.inputs(step, scalars, self._started, controls)
            rows = self._rows_of(batches, f"step {step + 1}")
            program, columns = self._programs.step(
                self._state, self._constants, batch, inputs, names, scalars, rows
            )  # fmt: skip
            with self.profiler.part("forward"):
                self._state, found = program(self._state, self._constants, batch, inputs)
            self._batches.look_ahead()
            with self.profiler.part("reduction"), heartbeat.phase("wait", f"the sums of step {step + 1}"):
                outcome = jax.device_get(found)
            result = results.result(columns, [outcome.reports], float(outcome.grad_norm))
            if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
                self._refuse(batches, batch, names, replace(result, grad_norm=float(outcome.grad_norm)), step, scalars)
            self._started = True
            result = self._spikes.judged(result, step, made=bool(outcome.updated))
            if not result.skipped:
                self._guard(step, scalars, outcome.squares)
            return replace(result, recompiled="; ".join(self._compiler.news))

    def _guard(self, step: int, scalars: Scalars, squares: Any) -> None:
        self._steps_made += 1
        if self._steps_made > 1 and (step + 1) % self._config.train.guard_every:
            return
        before = self._digests
        self.agree(step + 1)
        if self._steps_made == 1:
            names = (f"{state.MODEL}{name}" for name in sorted(self._state.parameters))
            gradients = dict(zip(names, squares.tolist(), strict=True))
            replicas.moved(before, self._digests, gradients, scalars["lr"])
            if still := [name for name, square in gradients.items() if square == 0]:
                log.warning(
                    "%d parameters got no gradient in the first step (%s); they decay as the others do. `frozen` leaves "
                    "them as they are", len(still), ", ".join(name.removeprefix(state.MODEL) for name in still[:4]),
                )  # fmt: skip

    def _refuse(
        self, batches: Sequence[MicroBatch], batch: Pass, names: Names, result: StepResult, step: int, scalars: Scalars
    ) -> NoReturn:
        """Find out where the first number that is not finite came from, and stop every rank with it."""
        inputs = self._programs.inputs(step, scalars, self._started, {})
        search = self._programs.search(self._state, self._constants, batch, inputs, names, scalars)
        found = search(self._state.parameters, self._constants, self._state.carry, batch, inputs)
        faults.not_finite(
            self.group, batches, names, sorted(self._state.parameters), [np.asarray(part) > 0 for part in found],
            result, step, by_term=self._task.cross_sample is None and not self._task.needs_totals,
        )  # fmt: skip

    def cut(self, split: Split) -> None:
        """A program is compiled for its micro-batch; nothing is made smaller on the way."""
        raise ConfigError("a JAX run cannot change its micro-batch between steps; start it again with a smaller one")

    # evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Scalars, average: bool = False
    ) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        parameters = self._state.average if average else self._state.parameters
        reports, columns, rows = [], None, 0
        with self._waiting("the other processes in the evaluation", step):
            for batches in steps:
                names = Names.of(batches[0])
                rows = rows or max(micro.size for micro in batches)
                real = self._rows_of(batches, "the evaluation")
                batch = self._batches.of(batches, rows)
                inputs = self._programs.inputs(step, scalars, False, None)
                program, columns = self._programs.evaluation(
                    parameters, self._constants, batch, inputs, names, scalars, real
                )
                reports.append(program(parameters, self._constants, batch, inputs))
                if len(reports) > 1:  # let the next batch be made while this one is computed
                    reports[-2] = np.asarray(reports[-2])
            assert columns is not None
            with heartbeat.phase("wait", "the sums of the evaluation"):
                return results.result(columns, [np.asarray(part) for part in reports])

    # state ------------------------------------------------------------------------------------------------------

    def agree(self, made: int) -> None:
        """See that copies are copies; see `Engine.agree`."""
        if self._agreed != made:
            self._digests = self._digested()
            self._see_copies(self._digests, made)
            self._agreed = made

    def _digested(self) -> dict[str, Any]:
        return replicas.digests(state.named(self._state, self._constants), self._grid)

    def _see_copies(self, digests: Mapping[str, Any], made: int) -> None:
        arrays = state.named(self._state, self._constants)
        replicas.agree(digests, arrays, self._grid, [device.process_index for device in self._devices], made)

    def state(self) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        rows = self._started
        return [*state.shards(self._state, self._constants, rows), *self._spikes.shards(self._place.is_first)]

    def load(self, reader: Reader, weights_only: bool = False) -> None:
        """Take over a saved state; see `Engine.load`."""
        kinds = (state.MODEL,) if weights_only else (state.MODEL, state.OPTIMIZER)
        averaged = bool(self._state.average)
        saved = any(name.startswith(state.AVERAGE) for name in reader.shapes)
        kinds += (state.AVERAGE,) if averaged and saved else ()
        self._state, self._constants = state.load(self._state, self._constants, reader, kinds)
        if averaged and not saved:
            log.warning("the checkpoint has no moving average of the weights; one begins with the weights as they are")
            self._state.average = jax.tree.map(lambda array: array.copy(), self._state.parameters)
        if not weights_only:
            self._started = state.load_rows(self._state, reader)
            self._spikes.load(reader)
        self._digests = self._digested()

    def close(self) -> None:
        """Let go of the arrays, and of JAX's switches."""
        for name in ("_state", "_constants", "_programs", "_compiler"):
            self.__dict__.pop(name, None)
        precision.unpin(self._switches)
        gc.collect()

    # small things -----------------------------------------------------------------------------------------------

    def _rows_of(self, batches: Sequence[MicroBatch], what: str) -> int:
        """Real rows of the global batch, where the loss crosses samples; else 0."""
        if self._task.cross_sample is None:
            return 0
        own = sum(micro.size for micro in batches if not micro.idle)
        return max(1, sum(self.group.gather(own, f"the number of rows of {what}")))

    @contextmanager
    def _waiting(self, what: str, step: int) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            faults.explain(error, self._place, self._split, what, step, self._config.launch.timeout)
            raise


def _devices(split: Split) -> list[jax.Device]:
    """The devices of all processes, those of each in a row.

    Raises:
        ConfigError: where there are too few.
    """
    if split.world_size == 1:
        here = jax.local_devices()
        if len(here) < split.devices:
            raise ConfigError(
                f"layout.devices={split.devices}, but JAX has {len(here)} in this process"
                f"{': it was started before the run' if here[0].platform == 'cpu' else ''}"
            )
        return here[: split.devices]
    everyone = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    counts = [sum(device.process_index == rank for device in everyone) for rank in range(split.world_size)]
    if set(counts) != {split.devices}:
        raise ConfigError(f"layout.devices={split.devices}, but JAX has {counts} devices in the processes of the run")
    return everyone
