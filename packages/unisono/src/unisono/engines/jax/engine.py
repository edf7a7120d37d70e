"""The JAX engine: one jitted step over global arrays for every strategy; see `unisono.engines.jax.step`."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.jax import model, state
from unisono.engines.jax.batches import Batches, ColumnNames, DeviceBatch
from unisono.engines.jax.devices import device_name
from unisono.engines.jax.forward import Columns, Inputs
from unisono.engines.jax.guards import checks, faults, replicas, task_errors
from unisono.engines.jax.guards.compilation import Compiler
from unisono.engines.jax.numerics import optimizers, precision
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.profiler import JaxProfiler
from unisono.engines.jax.programs import Programs, Scalars
from unisono.engines.jax.state import HeldArrays
from unisono.engines.jax.step import (
    AVERAGE_KEPT,
    LARGEST,
    LOSS_LIMIT,
    NORM_LIMIT,
    ObservedStep,
    State,
    Step,
    StepOutcome,
)
from unisono.engines.jax.view import JaxModelView, local_losses, local_outputs
from unisono.engines.observers import Observer, Observers, StepResult
from unisono.engines.protocol import EngineJob, ModelFacts
from unisono.engines.spike_detection import SpikeDetection
from unisono.engines.state import ArrayShard, StateReader
from unisono.optim import ema
from unisono.runtime import heartbeat
from unisono.runtime.errors import ConfigError, GuardError, NonFiniteError, UnisonoError
from unisono.runtime.text import join_names
from unisono.runtime.untrusted import resource_limits

log = logging.getLogger(__name__)


def create(job: EngineJob) -> JaxEngine:
    """The engine of a job; see `unisono.engines.create_engine`.

    Raises:
        ConfigError: for what this engine has not.
    """
    return JaxEngine(job)


class JaxEngine:
    """One process's part of a JAX run; see `unisono.engines.protocol.Engine`. The launcher starts JAX.

    Attributes:
        split: of the global batch.
        grid: of all devices.
        structure: of the model; like what follows from `setup` on.
        optimizer: makes the update.
        programs: of the run.
        held: arrays on the devices.
        view: of the model.
    """

    structure: model.Structure
    optimizer: optimizers.Optimizer
    programs: Programs
    held: HeldArrays
    view: JaxModelView

    def __init__(self, job: EngineJob) -> None:
        config = job.config
        self.communicator, self._job, self._config, self.split = job.communicator, job, config, job.split
        self.seed, self._kind = config.run.seed, config.train.precision
        self._switches = precision.pin(self._kind)
        self.profiler = JaxProfiler()
        self._devices = _all_devices(job)
        self.grid = Grid.from_layout(config.layout, self._devices)
        self.batches = Batches(job.split, self.grid, self._kind, self.profiler.part)
        self._compiler = Compiler(job.communicator)
        self._spikes = SpikeDetection(config.optim.skip_spikes)
        self._observers = Observers([self.profiler, self._spikes])
        self._observed = not job.check_updates  # whether somebody looks at what is inside of a step; a proof does
        self.random = False
        self._carry_started = False  # whether rows have a state that a step has left
        self._steps_made, self._has_moved = 0, False
        self._compared: int | None = None

    # setup ------------------------------------------------------------------------------------------------------

    def setup(self, batches: list[MicroBatch], scalars: Scalars) -> ModelFacts:
        """Build, lay out, check and compile; see `Engine.setup`."""
        with self._translate_errors("the other processes before the first step", "before the first step"):
            return self._set_up(batches, scalars)

    def _set_up(self, batches: list[MicroBatch], scalars: Scalars) -> ModelFacts:
        task = self._job.task
        kernels = rules.choose_kernels(task, self.communicator, self._devices[0].platform, self._kind)
        self.structure = model.build_structure(task, self.seed)
        recompute = model.recompute_interval(self.structure, self._config.layout)
        self.optimizer = optimizers.build_optimizer(self._config.optim, self.structure, task.optimizer)
        dynamic = tuple(sorted(name for name in scalars if name not in task.static_scalars))
        self.programs = Programs(
            task,
            self._job.features,
            self._config,
            self.structure,
            self.optimizer,
            self.grid,
            self._compiler,
            dynamic,
            recompute,
        )
        rules.sum_counts(batches)
        names = ColumnNames.from_micro_batch(batches[0])
        self._check_functions(batches[0], scalars, names)
        arrays = model.initialise(task, self.structure, self.seed, self.grid, self._kind)
        constants = {name: arrays.pop(name) for name in self.structure.names if name not in self.structure.trained}
        average = {name: arrays[name].copy() for name in ema.averaged_names(self._config.ema, list(arrays))}
        placed = state.shardings(jax.eval_shape(self.optimizer.init, arrays), arrays, self.grid)
        batch = self.batches.to_devices(batches)
        made = jax.jit(self.optimizer.init, out_shardings=placed)(arrays)
        self.held = HeldArrays(
            self.grid, self._devices, State(arrays, average, made, self._initial_carry(batch)), constants
        )
        self.view = JaxModelView(
            self.held, self.programs, self.batches, self.communicator, self.split.micro_batch, self.update_from
        )
        inputs = self.programs.inputs(0, scalars, self._carry_started, {})
        rows = self._count_rows(batches, "the first step")
        given = self.held.state, self.held.constants, batch, inputs
        _, columns = self.programs.step(given, names, scalars, rows, self._observed)
        reported = [list(columns.terms), list(columns.metrics), list(names.work)]
        rules.check_names(self.communicator, reported, "the first step")
        self._digests = self.held.digests()
        replicas.check_copies(self.held.find_differing(self._digests), len(self._digests), 0)
        size = sum(math.prod(array.shape) for array in arrays.values())
        return ModelFacts(
            size, device_name(self._devices[0]), {**kernels, **self._describe_mesh()},
            tuple(self.optimizer.describe(self.structure)), self.split.devices,
        )  # fmt: skip

    def _check_functions(self, micro: MicroBatch, scalars: Scalars, names: ColumnNames) -> None:
        """Check the task's functions on one device, before anything is compiled."""
        one = self.batches.pad(micro, self.split.micro_batch)
        alone = Grid.single_device(jax.local_devices()[0])
        for training in (True, False):
            forward = self.programs.forward(training, scalars, names, alone)
            inputs = self.programs.inputs(0, scalars, False, {} if training else None)
            checks.check_padding(forward, one, inputs)
            if training:
                checks.check_sum(forward, one, inputs)
                checks.check_double_precision(forward, one, inputs)
                self.random = checks.draws_random_numbers(forward, one, inputs)

    def _describe_mesh(self) -> dict[str, str]:
        shapes = self.structure.shapes
        cut = sum(any(self.grid.spec(shape.shape)) for shape in shapes.values())
        shards = f", {cut} of {len(shapes)} arrays in {self.grid.shards} shards" if self.grid.shards > 1 else ""
        where = f"{self.grid.replicas} × {self.grid.shards} (replicas × shards){shards}"
        cached = " (from the cache)" if self._compiler.cached else ""
        return {"mesh": where, "compiled": f"in {self._compiler.seconds:.1f} s{cached}"}

    def _initial_carry(self, batch: DeviceBatch) -> dict[str, Any]:
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[2:], array.dtype), batch.arrays)
        shapes = jax.eval_shape(self._job.features.initial_carry, one) or {}
        lead = batch.number.shape[0], self.split.devices
        return {name: self.batches.spread(np.zeros((*lead, *like.shape), like.dtype)) for name, like in shapes.items()}

    # the step ---------------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Call an observer at the points of every step; see `Engine.observe`."""
        self._observers.add(observer)
        self._observed = True

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """See `Engine.incoming`."""
        return self.batches.incoming(steps)

    def step(self, batches: list[MicroBatch], step: int, scalars: Scalars) -> StepResult:
        """One update; see `Engine.step`."""
        with self._translate_errors(f"the other processes in step {step + 1}", f"step {step + 1}"):
            self._compiler.recompiled.clear()
            rules.sum_counts(batches)
            self.view.begin(scalars, step)
            self._observers.on_step_begin(step, batches)
            batch, names = self.batches.take(batches), ColumnNames.from_micro_batch(batches[0])
            inputs = self.programs.inputs(step, scalars, self._carry_started, self._controls(step, scalars))
            given = self.held.state, self.held.constants, batch, inputs
            rows = self._count_rows(batches, f"step {step + 1}")
            program, columns = self.programs.step(given, names, scalars, rows, self._observed)
            with self._observers.part("forward"):
                after, packed, *seen = program(*given)
            if not self._observed:
                self.held.state = after  # the previous state was donated
            self.batches.look_ahead()
            with self._observers.part("reduction"), heartbeat.phase("wait", f"the sums of step {step + 1}"):
                count = len(after.parameters)
                weights = count if self._config.observe.norms else 0
                outcome = StepOutcome.unpack(np.asarray(packed), count, weights, columns.count)
            result = columns.combine([outcome.reports], outcome.grad_norm)
            if weights and rules.is_recorded(step + 1, self._config.observe.log_every):
                squares = outcome.squares.tolist(), outcome.weights.tolist()
                result = replace(result, norms=rules.layer_norms(sorted(after.parameters), *squares))
            if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
                raise self._not_finite_error(batches, batch, names, result, step, scalars)
            self._carry_started = True
            for observed in seen:
                self._show_observers(observed, outcome, columns, batches)
            result = self._apply_verdicts(result, outcome)
            if self._observed:
                self._accept_update(after, seen[0], result, step, scalars)
            if not result.skipped and self._job.check_updates:
                self._check_update(step, scalars, outcome.squares)
            self._observers.on_step_end(step, result)
            return result

    def _controls(self, step: int, scalars: Scalars) -> dict[str, float]:
        limits = self._spikes.limits()
        kept = ema.decay(self._config.ema, step + 1) if self.held.state.average else None
        return {
            LARGEST: scalars.get("clip_norm", math.inf), LOSS_LIMIT: limits.get("loss", math.inf),
            NORM_LIMIT: limits.get("grad_norm", math.inf), AVERAGE_KEPT: 1.0 if kept is None else kept,
        }  # fmt: skip

    def _show_observers(
        self, seen: ObservedStep, outcome: StepOutcome, columns: Columns, batches: Sequence[MicroBatch]
    ) -> None:
        """Show observers the passes and gradients of a step whose update is computed but not accepted yet."""
        whole = self._job.features.cross_sample == "whole"  # then a micro-batch has no loss of its own
        losses = [None] * len(batches) if whole else local_losses(columns, outcome.reports, batches)
        for micro, outputs, loss in zip(batches, local_outputs(seen.outputs, batches), losses, strict=True):
            self.view.begin_pass(micro)
            self._observers.on_forward(micro, outputs, loss)
        self.view.gradients = seen.raw
        self._observers.on_gradients()

    def _apply_verdicts(self, result: StepResult, outcome: StepOutcome) -> StepResult:
        """The result with the observers' verdicts, from the same numbers by which the device decided."""
        votes = self._observers.votes()
        if votes:
            everyone = self.communicator.gather(votes, "the votes of observers")
            votes = [sum(column) for column in zip(*everyone, strict=True)]
        by_device = replace(result, loss=outcome.loss, recompiled="; ".join(self._compiler.recompiled))
        judged = self._observers.on_reduced(by_device, votes)
        if not self._observed and outcome.updated == bool(judged.skipped):
            raise GuardError(
                f"the update was {'made' if outcome.updated else 'left out'} on the device, and should have been "
                f"{'left out' if judged.skipped else 'made'} (loss {judged.loss:.9g}, norm {judged.grad_norm:.9g})"
            )
        return replace(judged, loss=result.loss)

    def _accept_update(self, after: State, seen: ObservedStep, result: StepResult, step: int, scalars: Scalars) -> None:
        """Accept the update of an observed step unless it is skipped; the state of rows is always kept."""
        if result.skipped:
            self.held.state = replace(self.held.state, carry=after.carry)
        else:
            self.view.gradients = seen.clipped
            self._observers.on_update(step, scalars)
            self.held.state = after
        self.view.gradients = {}

    def update_from(self, gradients: Mapping[str, Any], step: int, scalars: Scalars) -> None:
        """Make one update from gradients that lie as their parameters do; no observer is called."""
        forward = self.programs.forward(True, scalars, ColumnNames((), ()))
        inputs = self.programs.inputs(step, scalars, self._carry_started, self._controls(step, scalars))
        made = Step(forward, self.optimizer, 1)

        def update(before: State, gradients: Mapping[str, Any], inputs: Inputs) -> State:
            return made.update(before, gradients, made.numbers(inputs))

        placed = jax.tree.map(lambda array: array.sharding, replace(self.held.state, carry={}))
        after = jax.jit(update, out_shardings=placed)(self.held.state, gradients, inputs)
        self.held.state = replace(after, carry=self.held.state.carry)

    def _check_update(self, step: int, scalars: Scalars, squares: Any) -> None:
        self._steps_made += 1
        if self._steps_made > 1 and (step + 1) % self._config.train.guard_every:
            return
        before = self._digests
        self.check_replicas(step + 1)
        if not self._has_moved:
            names = (f"{state.MODEL}{name}" for name in sorted(self.held.state.parameters))
            gradients = dict(zip(names, squares.tolist(), strict=True))
            moving = [name for name, square in gradients.items() if square > 0]
            rules.check_moved(
                before, self._digests, moving, lambda: self.held.exceeds_rounding(gradients, scalars["lr"])
            )
            self._has_moved = any(not np.array_equal(before[name], self._digests[name]) for name in moving)
            still = [name for name, square in gradients.items() if square == 0]
            if still and self._steps_made == 1:
                log.warning(
                    "no gradient in the first step of %s; they decay like the others. `frozen` keeps them unchanged",
                    join_names(name.removeprefix(state.MODEL) for name in still),
                )

    def _not_finite_error(
        self,
        batches: Sequence[MicroBatch],
        batch: DeviceBatch,
        names: ColumnNames,
        result: StepResult,
        step: int,
        scalars: Scalars,
    ) -> NonFiniteError:
        """Find where the first non-finite number came from; collective."""
        inputs = self.programs.inputs(step, scalars, self._carry_started, {})
        before = self.held.state
        given = before.parameters, self.held.constants, before.carry, batch, inputs
        found = self.programs.search(given, names, scalars)(*given)
        return faults.not_finite_error(
            self.communicator, batches, sorted(before.parameters), [np.asarray(part) > 0 for part in found],
            result, step, by_term=self._job.features.has_local_loss,
        )  # fmt: skip

    # evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Scalars, average: bool = False
    ) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        parameters = {**self.held.state.parameters, **(self.held.state.average if average else {})}
        reports: list[Any] = []
        columns, rows = None, 0
        with self._translate_errors("the other processes in the evaluation", f"the evaluation after step {step}"):
            for batches in steps:
                names = ColumnNames.from_micro_batch(batches[0])
                if not rows:  # alike everywhere, though a first batch that is short gives some processes less
                    own = max(micro.size for micro in batches)
                    rows = max(self.communicator.gather(own, "the rows of a micro-batch of the evaluation"))
                real = self._count_rows(batches, "the evaluation")
                batch = self.batches.to_devices(batches, rows)
                inputs = self.programs.inputs(step, scalars, False, None)
                given = parameters, self.held.constants, batch, inputs
                program, columns = self.programs.evaluation(given, names, scalars, real)
                reports.append(program(*given))
                if len(reports) > 1:  # let the next batch be made while this one is computed
                    reports[-2] = np.asarray(reports[-2])
            assert columns is not None
            with heartbeat.phase("wait", "the sums of the evaluation"):
                return columns.combine([np.asarray(part) for part in reports])

    # state ------------------------------------------------------------------------------------------------------

    def read_outputs(self, *rows: Any) -> Any:
        """Refused; see `Engine.read_outputs`."""
        raise ConfigError("outputs of rows are read in torch alone: JAX compiles what it computes")

    def load_moments(self, path: Path) -> str:
        """Refused; see `Engine.load_moments`."""
        raise ConfigError(f"optim.moments={path} is read in torch alone: moments of optax have other names")

    def peak_memory(self) -> int | None:
        """See `Engine.peak_memory`."""
        device = jax.local_devices()[0]
        known = device.memory_stats() if device.platform != "cpu" else None
        return int(known["peak_bytes_in_use"]) if known else resource_limits.peak_resident()

    def check_replicas(self, updates: int) -> None:
        """Check that replicas are identical; see `Engine.check_replicas`."""
        if self._compared != updates:
            self._digests = self.held.digests()
            replicas.check_copies(self.held.find_differing(self._digests), len(self._digests), updates)
            self._compared = updates

    def state(self) -> list[ArrayShard]:
        """The pieces that this process saves; see `Engine.state`."""
        shards = state.shards(self.held.state, self.held.constants, self._carry_started)
        if self._job.process.is_first:
            shards += self._spikes.shards()
        return shards

    def load(self, reader: StateReader, weights_only: bool = False) -> None:
        """Load a saved state; see `Engine.load`."""
        self.held.load(reader, weights_only)
        if not weights_only:
            self._carry_started = state.load_rows(self.held.state, reader)
            self._spikes.load(reader)
        self._digests = self.held.digests()

    def close(self) -> None:
        """Release the arrays and restore JAX's settings."""
        for name in ("held", "programs", "view", "_compiler"):
            vars(self).pop(name, None)
        precision.unpin(self._switches)
        gc.collect()

    # small things -----------------------------------------------------------------------------------------------

    def _count_rows(self, batches: Sequence[MicroBatch], what: str) -> int:
        """Real rows of the global batch, where the loss crosses samples; else 0."""
        if self._job.features.cross_sample is None:
            return 0
        own = sum(micro.size for micro in batches if not micro.idle)
        return max(1, sum(self.communicator.gather(own, f"the number of rows of {what}")))

    @contextmanager
    def _translate_errors(self, what: str, where: str) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            faults.raise_known_error(error, self._job.process, self.split, what, where)
            task_errors.raise_callback_error(error, where)
            raise
        except UnisonoError:
            raise
        except Exception as error:
            task_errors.raise_task_error(error, self._job.task)
            raise


def _all_devices(job: EngineJob) -> list[jax.Device]:
    """The devices of all processes, those of each in a row, in the order of the rows that processes compute.

    Raises:
        ConfigError: where there are too few.
    """
    split = job.split
    if split.world_size == 1:
        here = jax.local_devices()
        if len(here) < split.devices:
            raise ConfigError(
                f"layout.devices={split.devices}, but JAX has {len(here)} in this process"
                f"{': it was started before the run' if here[0].platform == 'cpu' else ''}"
            )
        return here[: split.devices]
    ranks = list(range(split.world_size))
    if job.rows_of_rank is not None:  # in a proof, which may deal them out the other way round
        ranks = job.communicator.gather(job.rows_of_rank, "whose rows each process computes")
    everyone = sorted(jax.devices(), key=lambda device: (ranks[device.process_index], device.id))
    counts = [sum(device.process_index == rank for device in everyone) for rank in range(split.world_size)]
    if set(counts) != {split.devices}:
        raise ConfigError(f"layout.devices={split.devices}, but JAX has {counts} devices in the processes of the run")
    return everyone
