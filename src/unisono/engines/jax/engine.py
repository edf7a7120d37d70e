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

from unisono import protocols
from unisono.config.batch_split import Split
from unisono.data.loading.loader import MicroBatch
from unisono.engines import rules
from unisono.engines.jax import model, state
from unisono.engines.jax.batches import Batches, Names, Pass
from unisono.engines.jax.forward import Inputs
from unisono.engines.jax.guards import checks, faults, replicas
from unisono.engines.jax.guards.compilation import Compiler
from unisono.engines.jax.numerics import optimizers, precision, results
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.profiler import Profiler
from unisono.engines.jax.programs import Programs, Scalars
from unisono.engines.jax.step import AVERAGE_KEPT, LARGEST, LOSS_LIMIT, NORM_LIMIT, Observed, Outcome, State, Step
from unisono.engines.jax.view import JaxModelView, local_outputs
from unisono.engines.observers import Observer, Observers
from unisono.engines.protocol import Facts, Job, StepResult
from unisono.engines.spike_detection import SpikeDetection
from unisono.engines.state import Reader, Shard
from unisono.optim import ema
from unisono.runtime import heartbeat
from unisono.runtime.errors import ConfigError, GuardError

log = logging.getLogger(__name__)


def create(job: Job) -> JaxEngine:
    """The engine of a job; see `unisono.engines.create_engine`.

    Raises:
        ConfigError: for what this engine has not.
    """
    if job.rows_of not in (None, job.process.rank):
        raise ConfigError("the JAX engine computes the rows of its own rank only: leave vary=[ranks] out")
    return JaxEngine(job)


class JaxEngine:
    """One process's part of a JAX run; see `unisono.engines.protocol.Engine`. JAX is started by who starts the process.

    Attributes:
        grid: of all devices.
        structure: of the model; like what follows from `setup` on.
        optimizer: makes the update.
        programs: of the run.
        train_state: what a step changes.
        constants: arrays that are not trained, by name.
        view: of the model.
    """

    structure: model.Structure
    optimizer: optimizers.Optimizer
    programs: Programs
    train_state: State
    constants: dict[str, Any]
    view: JaxModelView

    def __init__(self, job: Job) -> None:
        config = job.config
        self.communicator, self._job, self._config, self._split = job.communicator, job, config, job.split
        self.seed, self._kind = config.run.seed, config.train.precision
        self._switches = precision.pin(self._kind)
        self.profiler = Profiler()
        self._devices = _devices(job.split)
        self.grid = Grid.of(config.layout, self._devices)
        self.batches = Batches(job.split, self.grid, self._kind, self.profiler.part)
        self._compiler = Compiler(job.communicator)
        self._spikes = SpikeDetection(config.optim.skip_spikes)
        self._observers = Observers([self.profiler, self._spikes])
        self._observed = not job.guarded  # whether somebody looks at what is inside of a step; a proof does
        self.random = False
        self._started = False  # whether rows have a state that a step has left
        self._steps_made = 0
        self._compared: int | None = None

    # setup ------------------------------------------------------------------------------------------------------

    def setup(self, batches: list[MicroBatch], scalars: Scalars) -> Facts:
        """Build, lay out, check and compile; see `Engine.setup`."""
        task = self._job.task
        if unknown := [name for name in task.static_scalars if name not in scalars]:
            raise ConfigError(
                f"{type(task).__name__}.static_scalars: nothing schedules '{unknown[0]}'; set schedules.{unknown[0]}"
            )
        kernels = rules.choose_kernels(task, self.communicator, self._devices[0].platform, self._kind)
        self.structure = model.structure_of(task, self.seed)
        recompute = model.recomputes(self.structure, self._config.layout)
        self.optimizer = optimizers.build(self._config.optim, self.structure)
        given = tuple(sorted(name for name in scalars if name not in task.static_scalars))
        self.programs = Programs(
            task, self._config, self.structure, self.optimizer, self.grid, self._compiler, given, recompute
        )
        rules.sum_counts(batches)
        names = Names.of(batches[0])
        self._check_functions(batches[0], scalars, names)
        arrays = model.initialise(task, self.structure, self.seed, self.grid, self._kind)
        self.constants = {name: arrays.pop(name) for name in self.structure.names if name not in self.structure.trained}
        kept = self._config.ema.decay is not None
        average = jax.tree.map(lambda array: array.copy(), arrays) if kept else {}
        placed = state.shardings(jax.eval_shape(self.optimizer.init, arrays), arrays, self.grid)
        batch = self.batches.of(batches)
        made = jax.jit(self.optimizer.init, out_shardings=placed)(arrays)
        self.train_state = State(arrays, average, made, self._initial_carry(batch))
        self.view = JaxModelView(self)
        inputs = self.programs.inputs(0, scalars, self._started, {})
        rows = self._rows_of(batches, "the first step")
        _, columns = self.programs.step(
            self.train_state, self.constants, batch, inputs, names, scalars, rows, self._observed
        )
        reported = [list(columns.terms), list(columns.metrics), list(names.work)]
        rules.check_names(self.communicator, reported, "the first step")
        self._digests = self.digests()
        replicas.check_copies(self._differing(self._digests), len(self._digests), 0)
        device = self._devices[0]
        size = sum(math.prod(array.shape) for array in arrays.values())
        return Facts(
            size, "cpu" if device.platform == "cpu" else device.device_kind, {**kernels, **self._described()},
            tuple(self.optimizer.described(self.structure)), self._split.devices,
        )  # fmt: skip

    def _check_functions(self, micro: MicroBatch, scalars: Scalars, names: Names) -> None:
        """What can be asked of the task's functions on one device, before anything is compiled."""
        one = self.batches.padded(micro, self._split.micro_batch)
        alone = Grid.one(jax.local_devices()[0])
        for training in (True, False):
            forward = self.programs.forward(training, scalars, names, alone)
            inputs = self.programs.inputs(0, scalars, False, {} if training else None)
            checks.padding(forward, one, inputs)
            if training:
                checks.keeps_double(forward, one, inputs)
                self.random = checks.draws(forward, one, inputs)

    def _described(self) -> dict[str, str]:
        shapes = self.structure.shapes
        cut = sum(any(self.grid.spec(shape.shape)) for shape in shapes.values())
        shards = f", {cut} of {len(shapes)} arrays in {self.grid.shards} shards" if self.grid.shards > 1 else ""
        where = f"{self.grid.replicas} × {self.grid.shards} (replicas × shards){shards}"
        cached = " (from the cache)" if self._compiler.cached else ""
        return {"mesh": where, "compiled": f"in {self._compiler.seconds:.1f} s{cached}"}

    def _initial_carry(self, batch: Pass) -> dict[str, Any]:
        """Room for the state of all rows."""
        one = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[2:], array.dtype), batch.arrays)
        shapes = jax.eval_shape(lambda arrays: protocols.initial_carry(self._job.task, arrays), one) or {}
        lead = batch.number.shape[0], self._split.devices
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
        with self._waiting(f"the other processes in step {step + 1}", f"step {step + 1}"):
            self._compiler.news.clear()
            rules.sum_counts(batches)
            self.view.begin(scalars)
            self._observers.on_step_begin(step, batches)
            batch, names = self.batches.taken(batches), Names.of(batches[0])
            inputs = self.programs.inputs(step, scalars, self._started, self._controls(step, scalars))
            given = self.train_state, self.constants, batch, inputs
            rows = self._rows_of(batches, f"step {step + 1}")
            program, columns = self.programs.step(*given, names, scalars, rows, self._observed)
            with self._observers.part("forward"):
                after, outcome, *seen = program(*given)
            if not self._observed:
                self.train_state = after  # what it was made from is gone
            self.batches.look_ahead()
            with self._observers.part("reduction"), heartbeat.phase("wait", f"the sums of step {step + 1}"):
                outcome = jax.device_get(outcome)
            result = results.result(columns, [outcome.reports], float(outcome.grad_norm))
            if not (math.isfinite(outcome.loss) and math.isfinite(outcome.grad_norm)):
                self._refuse(batches, batch, names, result, step, scalars)
            self._started = True
            for observed in seen:
                self._show(observed, outcome, batches)
            result = self._judge(result, outcome)
            if self._observed:
                self._take(after, seen[0], result, step, scalars)
            if not result.skipped and self._job.guarded:
                self._guard(step, scalars, outcome.squares)
            self._observers.on_step_end(step, result)
            return result

    def _controls(self, step: int, scalars: Scalars) -> dict[str, float]:
        limits = self._spikes.limits()
        kept = ema.decay(self._config.ema, step + 1) if self.train_state.average else None
        return {
            LARGEST: scalars.get("clip_norm", math.inf), LOSS_LIMIT: limits.get("loss", math.inf),
            NORM_LIMIT: limits.get("grad_norm", math.inf), AVERAGE_KEPT: 1.0 if kept is None else kept,
        }  # fmt: skip

    def _show(self, seen: Observed, outcome: Outcome, batches: Sequence[MicroBatch]) -> None:
        """Show observers the passes and the gradients of a step whose update is computed, and not taken yet."""
        for micro, outputs in zip(batches, local_outputs(seen.outputs, batches), strict=True):
            self._observers.on_forward(micro, outputs, None)
        self.view.gradients = seen.raw
        self._observers.on_gradients()

    def _judge(self, result: StepResult, outcome: Outcome) -> StepResult:
        """The result with the verdicts of observers; by the device's own numbers, by which it has decided as well."""
        votes = self._observers.votes()
        if votes:
            everyone = self.communicator.gather(votes, "the votes of observers")
            votes = [sum(column) for column in zip(*everyone, strict=True)]
        by_device = replace(result, loss=float(outcome.loss), recompiled="; ".join(self._compiler.news))
        judged = self._observers.on_reduced(by_device, votes)
        if not self._observed and bool(outcome.updated) == bool(judged.skipped):
            raise GuardError(
                f"the update was {'made' if outcome.updated else 'left out'} on the device, and should have been "
                f"{'left out' if judged.skipped else 'made'} (loss {judged.loss:.9g}, norm {judged.grad_norm:.9g})"
            )
        return replace(judged, loss=result.loss)

    def _take(self, after: State, seen: Observed, result: StepResult, step: int, scalars: Scalars) -> None:
        """Take over the update of an observed step, unless it is left out; the state of rows goes on in any case."""
        if result.skipped:
            self.train_state = replace(self.train_state, carry=after.carry)
        else:
            self.view.gradients = seen.clipped
            self._observers.on_update(step, scalars)
            self.train_state = after
        self.view.gradients = {}

    def update_from(self, gradients: Mapping[str, Any], step: int, scalars: Scalars) -> None:
        """Make one update from gradients that lie as their parameters do; no observer is called."""
        forward = self.programs.forward(True, scalars, Names((), ()))
        inputs = self.programs.inputs(step, scalars, self._started, self._controls(step, scalars))
        made = Step(forward, self.optimizer, 1)

        def update(before: State, gradients: Mapping[str, Any], inputs: Inputs) -> State:
            return made.update(before, gradients, made.numbers(inputs))

        placed = jax.tree.map(lambda array: array.sharding, replace(self.train_state, carry={}))
        after = jax.jit(update, out_shardings=placed)(self.train_state, gradients, inputs)
        self.train_state = replace(after, carry=self.train_state.carry)

    def _guard(self, step: int, scalars: Scalars, squares: Any) -> None:
        self._steps_made += 1
        if self._steps_made > 1 and (step + 1) % self._config.train.guard_every:
            return
        before = self._digests
        self.check_replicas(step + 1)
        if self._steps_made == 1:
            names = (f"{state.MODEL}{name}" for name in sorted(self.train_state.parameters))
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
        inputs = self.programs.inputs(step, scalars, self._started, {})
        before = self.train_state
        search = self.programs.search(before, self.constants, batch, inputs, names, scalars)
        found = search(before.parameters, self.constants, before.carry, batch, inputs)
        task = self._job.task
        faults.not_finite(
            self.communicator, batches, names, sorted(before.parameters), [np.asarray(part) > 0 for part in found],
            result, step, by_term=protocols.cross_sample(task) is None and not protocols.needs_totals(task),
        )  # fmt: skip

    # evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Scalars, average: bool = False
    ) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        parameters = self.train_state.average if average else self.train_state.parameters
        reports: list[Any] = []
        columns, rows = None, 0
        with self._waiting("the other processes in the evaluation", f"the evaluation after step {step}"):
            for batches in steps:
                names = Names.of(batches[0])
                rows = rows or max(micro.size for micro in batches)
                real = self._rows_of(batches, "the evaluation")
                batch = self.batches.of(batches, rows)
                inputs = self.programs.inputs(step, scalars, False, None)
                program, columns = self.programs.evaluation(
                    parameters, self.constants, batch, inputs, names, scalars, real
                )
                reports.append(program(parameters, self.constants, batch, inputs))
                if len(reports) > 1:  # let the next batch be made while this one is computed
                    reports[-2] = np.asarray(reports[-2])
            assert columns is not None
            with heartbeat.phase("wait", "the sums of the evaluation"):
                return results.result(columns, [np.asarray(part) for part in reports])

    # state ------------------------------------------------------------------------------------------------------

    def check_replicas(self, updates: int) -> None:
        """Check that copies are copies; see `Engine.check_replicas`."""
        if self._compared != updates:
            self._digests = self.digests()
            replicas.check_copies(self._differing(self._digests), len(self._digests), updates)
            self._compared = updates

    def digests(self) -> dict[str, Any]:
        """By the name of every array a number for each device; collective."""
        return replicas.digests(state.named(self.train_state, self.constants), self.grid)

    def find_differing(self) -> dict[str, str]:
        """Arrays whose copies differ now, with the devices; collective."""
        return self._differing(self.digests())

    def _differing(self, digests: Mapping[str, Any]) -> dict[str, str]:
        arrays = state.named(self.train_state, self.constants)
        return replicas.find_differing(digests, arrays, self.grid, [device.process_index for device in self._devices])

    def state(self) -> list[Shard]:
        """The pieces this process has to save; see `Engine.state`."""
        shards = state.shards(self.train_state, self.constants, self._started)
        if self._job.process.is_first:
            shards += [
                Shard(f"{state.SPIKES}{n}", (len(v),), (0,), np.array(v)) for n, v in self._spikes.state().items()
            ]
        return shards

    def load(self, reader: Reader, weights_only: bool = False) -> None:
        """Take over a saved state; see `Engine.load`."""
        kinds: tuple[str, ...] = (state.MODEL,) if weights_only else (state.MODEL, state.OPTIMIZER)
        averaged = bool(self.train_state.average)
        saved = any(name.startswith(state.AVERAGE) for name in reader.shapes)
        kinds += (state.AVERAGE,) if averaged and saved else ()
        self.train_state, self.constants = state.load(self.train_state, self.constants, reader, kinds)
        if averaged and not saved:
            log.warning("the checkpoint has no moving average of the weights; one begins with the weights as they are")
            self.train_state.average = jax.tree.map(lambda array: array.copy(), self.train_state.parameters)
        if not weights_only:
            self._started = state.load_rows(self.train_state, reader)
            spikes = [name for name in reader.shapes if name.startswith(state.SPIKES)]
            found = {name: reader.read(name, (0,), reader.shapes[name]).tolist() for name in spikes}
            self._spikes.load({name.removeprefix(state.SPIKES): values for name, values in found.items()})
        self._digests = self.digests()

    def close(self) -> None:
        """Let go of the arrays, and of JAX's switches."""
        for name in ("train_state", "constants", "programs", "view", "_compiler"):
            vars(self).pop(name, None)
        precision.unpin(self._switches)
        gc.collect()

    # small things -----------------------------------------------------------------------------------------------

    def _rows_of(self, batches: Sequence[MicroBatch], what: str) -> int:
        """Real rows of the global batch, where the loss crosses samples; else 0."""
        if protocols.cross_sample(self._job.task) is None:
            return 0
        own = sum(micro.size for micro in batches if not micro.idle)
        return max(1, sum(self.communicator.gather(own, f"the number of rows of {what}")))

    @contextmanager
    def _waiting(self, what: str, where: str) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            faults.explain(error, self._job.process, self._split, what, where)
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
