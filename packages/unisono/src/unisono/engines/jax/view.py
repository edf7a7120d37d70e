"""The model as observers see it: by name and whole, on any layout; see `unisono.engines.observers.ModelView`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax import state
from unisono.engines.jax.batches import Batches, ColumnNames
from unisono.engines.jax.forward import Columns, Forward
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.programs import Programs
from unisono.engines.jax.state import HeldArrays
from unisono.engines.observers import Array, ArrayGroup
from unisono.runtime import rng
from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss


class JaxModelView:
    """The model of one process.

    Args:
        held: its arrays.
        programs: of the run.
        batches: puts micro-batches on devices.
        communicator: with the other processes.
        micro_batch: rows of one.
        update: makes one update from gradients, at a step, with scheduled values.

    Attributes:
        gradients: by name, while a step is observed; else none.
    """

    draws_backward = False  # nothing but a micro-batch's key gives random numbers

    def __init__(
        self,
        held: HeldArrays,
        programs: Programs,
        batches: Batches,
        communicator: Communicator,
        micro_batch: int,
        update: Callable[[Mapping[str, Any], int, Mapping[str, float]], None],
    ) -> None:
        self._held, self._programs, self._batches, self._communicator = held, programs, batches, communicator
        self._micro_batch, self._update = micro_batch, update
        structure = programs.structure
        floats = [n for n in structure.names if jnp.issubdtype(structure.shapes[n].dtype, jnp.floating)]
        self.module = structure
        self.trainable = [name for name in floats if name in structure.trained]
        self.frozen = [name for name in floats if name not in structure.trained]
        self.local_buffers: list[str] = []
        self.size = sum(math.prod(structure.shapes[name].shape) for name in floats)
        self.gradients: Mapping[str, jax.Array] = {}
        self._scalars: Mapping[str, float] = {}
        self._step = 0
        self._pass: MicroBatch | None = None
        self._compiled: dict[Any, Any] = {}  # programs of one device

    def whole(self, kind: ArrayGroup) -> dict[str, Array]:
        """Whole arrays by name, on rank 0; collective."""
        found = {name: self._whole(array) for name, array in self._arrays(kind).items()}
        return found if self._communicator.rank == 0 else {}

    def _whole(self, array: jax.Array) -> Array:
        if not array.is_fully_replicated:
            array = jax.jit(lambda a: a, out_shardings=self._held.grid.replicated)(array)
        return np.asarray(array)

    def _arrays(self, kind: ArrayGroup) -> dict[str, Any]:
        constants, trained = self._held.constants, self._held.state
        match kind:
            case "parameters":
                return {**trained.parameters, **{name: constants[name] for name in self.frozen}}
            case "gradients":
                return dict(self.gradients)
            case "optimizer state":
                return dict(state.optimizer_arrays(trained.optimizer, trained.parameters))
            case "buffers":
                return {name: array for name, array in constants.items() if name not in self.frozen}
            case "EMA":
                return dict(trained.average)

    def has_gradients(self) -> bool:
        """Whether any gradient is left from before."""
        return bool(self.gradients)

    def begin(self, scalars: Mapping[str, float], step: int = 0) -> None:
        """Keep the scheduled values of a step, before which so many updates were made."""
        self._scalars, self._step = scalars, step

    def begin_pass(self, micro: MicroBatch) -> None:
        """Keep the micro-batch that observers are shown next."""
        self._pass = micro

    def learning_rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        scales = dict.fromkeys(self._programs.optimizer.chosen.values())
        return [self._scalars["lr"] * one.lr_scale for one in scales]

    def find_differing_replicas(self) -> list[str]:
        """Arrays whose copies differ between devices; collective."""
        differing = self._held.find_differing(self._held.digests())
        return [f"{name}: {devices}" for name, devices in differing.items()]

    def digests(self) -> dict[str, Any]:
        """Digests of all arrays; there is no mode and no random state that an evaluation could leave behind."""
        return {"parameters": {name: value.tolist() for name, value in self._held.digests().items()}}

    def flatten(self, outputs: Any) -> dict[str, Array]:
        """The arrays of a pytree by name, in double precision."""
        found = {}
        for path, leaf in tree_leaves_with_path(outputs):
            array = np.asarray(leaf)
            wide = array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
            found[keystr(path) or "output"] = wide
        return found

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """A context without effect here: pure functions leave nothing to restore."""
        yield

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        """What the task returns for a micro-batch in training, on one device; see `ModelView`."""
        return self._on_one_device(Forward.outputs, micro, micro.size, 0, scalars)

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        """The sums of the task's loss for a micro-batch; see `ModelView`."""
        if not self._programs.features.has_local_loss:
            return {}
        found = self._on_one_device(_term_sums, micro, micro.size, 0, scalars)
        return {name: float(value) for name, value in found.items()}

    def carry(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Array]:
        """Not known here; see `ModelView`."""
        return {}

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        """Not known: a step is one program."""
        return False

    def random_digest(self) -> int:
        """Keys are arguments: there is no state that a pass draws from."""
        return 0

    def find_differing_buffers(self) -> list[str]:
        """None: constants are arrays of the whole mesh."""
        return []

    def term_gradients(self, loss: Loss) -> dict[str, dict[str, Array]]:
        """The gradient of every term's sum over the micro-batch that observers are shown; see `ModelView`."""
        micro = self._pass
        if micro is None or self._held.grid.devices > 1 or self._held.state.carry:
            return {}
        if not self._programs.features.has_local_loss:
            return {}

        def compute_gradients(forward: Forward, parameters: Any, constants: Any, one: Any, context: Context) -> Any:
            return jax.jacrev(lambda p: _term_sums(forward, p, constants, one, context))(dict(parameters))

        rows = self._micro_batch  # padded as in the step, so that the same is drawn
        found = self._on_one_device(compute_gradients, micro, rows, self._step, self._scalars, cached=True)
        return {
            term: {name: np.atleast_1d(np.asarray(value)) for name, value in gradients.items()}
            for term, gradients in found.items()
        }

    def _on_one_device(
        self,
        compute: Any,
        micro: MicroBatch,
        rows: int,
        step: int,
        scalars: Mapping[str, float],
        cached: bool = False,
    ) -> Any:
        """A function of a micro-batch in training, with as many rows, on one device.

        It is traced each time (what draws outside of its key shows by that), unless it is the one that is `cached`.
        """
        names = ColumnNames.from_micro_batch(micro)
        forward = self._programs.forward(True, scalars, names, Grid.single_device(jax.local_devices()[0]))
        inputs = self._programs.inputs(step, scalars, False, {})

        def call(parameters: Any, constants: Any, one: Any, inputs: Any) -> Any:
            context = forward.context(one, inputs, carry=forward.carry(None, one, inputs))
            return compute(forward, parameters, constants, one, context)

        given = self._held.state.parameters, self._held.constants, self._batches.pad(micro, rows), inputs
        if cached:
            return self._compiled.setdefault((names, *sorted(forward.static.items())), jax.jit(call))(*given)
        lowered = jax.jit(call).lower(*given)
        text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        if text not in self._compiled:
            self._compiled[text] = lowered.compile()
        return self._compiled[text](*given)

    def perturb(self, size: float, step: int = 0) -> None:
        """Change every parameter by a random relative change of at most this size, another one in every step."""
        held, seed = self._held, self._programs.config.run.seed

        def changed(name: str, array: jax.Array) -> jax.Array:
            whole = self._whole(array)
            change = rng.generator(seed, "perturb", name, step).uniform(-size, size, whole.shape)
            return self._place(whole * (1 + change), array)

        parameters = {name: changed(name, array) for name, array in held.state.parameters.items()}
        held.constants |= {name: changed(name, held.constants[name]) for name in self.frozen}
        held.state.parameters = parameters

    def replace(self, arrays: Mapping[str, Array]) -> None:
        """Take whole arrays for all of the model, and begin its average with them; names that it has not are left.

        Raises:
            ConfigError: for an array of the model that is missing or of another shape.
        """
        held, structure = self._held, self.module
        for name in structure.names:
            shape, there = structure.shapes[name].shape, arrays.get(name)
            if there is None or there.shape != shape:
                what = "is missing" if there is None else f"has shape {there.shape}"
                raise ConfigError(
                    f"the weights to begin with are of another model: '{name}' of shape {shape} {what} there"
                )

        def given(own: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {name: self._place(arrays[name], array) for name, array in own.items()}

        held.constants, held.state.parameters = given(held.constants), given(held.state.parameters)
        held.state.average = given(held.state.average)

    def update_from(self, gradients: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients, those not named being zero."""
        given = {
            name: self._place(np.asarray(gradients[name]).reshape(array.shape), array)
            if name in gradients
            else jnp.zeros_like(array)
            for name, array in self._held.state.parameters.items()
        }
        self._update(given, step, scalars)

    def _place(self, whole: Array, like: jax.Array) -> jax.Array:
        """A whole array, which every process has, as it lies on the devices."""
        whole = whole.astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def _term_sums(forward: Forward, parameters: Any, constants: Any, one: Any, context: Context) -> Any:
    outputs = forward.outputs(parameters, constants, one, context)
    return forward.loss(outputs, one.arrays, one.valid, context)[1]["sums"]


def local_losses(columns: Columns, reports: np.ndarray[Any, Any], batches: Sequence[MicroBatch]) -> Iterator[Loss]:
    """The sums of the task's loss for each micro-batch of this process, from the report of the step.

    Args:
        columns: what its numbers are.
        reports: of all micro-batches of the global batch, (micro-batches, numbers).
        batches: of this process.
    """
    parts = columns.split(np.asarray(reports, dtype=np.float64))
    for micro in batches:
        sums, weights, metrics = (parts[kind][micro.number].tolist() for kind in ("sums", "weights", "metrics"))
        pairs = dict(zip(columns.metrics, zip(metrics[::2], metrics[1::2], strict=True), strict=True))
        yield Loss(
            dict(zip(columns.terms, sums, strict=True)), dict(zip(columns.terms, weights, strict=True)), metrics=pairs
        )


def local_outputs(outputs: Any, batches: Sequence[MicroBatch]) -> Iterator[Any]:
    """What the task returned for each micro-batch of this process, without rows that pad.

    Args:
        outputs: of all devices, (passes, devices, rows, …).
        batches: of this process, one device's after the other's.
    """
    own = jax.tree.map(_local_part, outputs)
    for place, micro in enumerate(batches):
        yield jax.tree.map(lambda array, at=place, size=micro.size: _drop_padding(array[at], size), own)


def _local_part(array: jax.Array) -> np.ndarray[Any, Any]:
    """This process's part, (micro-batches, rows, …) in the order of the devices."""
    pieces = sorted(array.addressable_shards, key=lambda piece: piece.index[1].start or 0)
    return np.concatenate([np.asarray(piece.data)[:, 0] for piece in pieces])


def _drop_padding(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return array[:size] if array.ndim and len(array) > size else array
