"""The model as an observer sees it: by name, and whole whatever the layout; see `unisono.engines.observers.ModelView`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from unisono.data.loading.loader import MicroBatch
from unisono.engines.jax import state
from unisono.engines.jax.batches import Names
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.observers import Array, Kind
from unisono.runtime import rng

if TYPE_CHECKING:
    from unisono.engines.jax.engine import JaxEngine


class JaxModelView:
    """The model of one process.

    Attributes:
        gradients: by name, while a step is observed; else none.
    """

    def __init__(self, engine: JaxEngine) -> None:
        self._engine = engine
        structure = engine.structure
        floats = [n for n in structure.names if jnp.issubdtype(structure.shapes[n].dtype, jnp.floating)]
        self.module = structure
        self.trainable = [name for name in floats if name in structure.trained]
        self.frozen = [name for name in floats if name not in structure.trained]
        self.local_buffers: list[str] = []
        self.size = sum(math.prod(structure.shapes[name].shape) for name in floats)
        self.gradients: Mapping[str, jax.Array] = {}
        self._scalars: Mapping[str, float] = {}

    def whole(self, kind: Kind) -> dict[str, Array]:
        """Whole arrays by name, on rank 0; collective."""
        found = {name: self._whole(array) for name, array in self._arrays(kind).items()}
        return found if self._engine.communicator.rank == 0 else {}

    def _whole(self, array: jax.Array) -> Array:
        if not array.is_fully_replicated:
            array = jax.jit(lambda a: a, out_shardings=self._engine.grid.replicated)(array)
        return np.asarray(array)

    def _arrays(self, kind: Kind) -> dict[str, Any]:
        engine = self._engine
        constants, trained = engine.constants, engine.train_state
        match kind:
            case "parameters":
                return {**trained.parameters, **{name: constants[name] for name in self.frozen}}
            case "gradients":
                return dict(self.gradients)
            case "optimizer state":
                return dict(state.of_optimizer(trained.optimizer, trained.parameters))
            case "buffers":
                return {name: array for name, array in constants.items() if name not in self.frozen}
            case "EMA":
                return dict(trained.average)

    def has_gradients(self) -> bool:
        """Whether any gradient is left from before."""
        return bool(self.gradients)

    def begin(self, scalars: Mapping[str, float]) -> None:
        """Take note of the scheduled values of a step."""
        self._scalars = scalars

    def learning_rates(self) -> list[float]:
        """Of every group of parameters that are given the same."""
        scales = dict.fromkeys(self._engine.optimizer.chosen.values())
        return [self._scalars["lr"] * one.lr_scale for one in scales]

    def differing_replicas(self) -> list[str]:
        """Arrays of which devices hold copies with other bits; collective."""
        differing = self._engine.find_differing()
        return [f"{name}: {devices}" for name, devices in differing.items()]

    def digests(self) -> dict[str, Any]:
        """Digests of all arrays; there is no mode and no random state that an evaluation could leave behind."""
        return {"parameters": {name: value.tolist() for name, value in self._engine.digests().items()}}

    def flatten(self, outputs: Any) -> dict[str, Array]:
        """The arrays of a pytree by name, in double precision."""
        found = {}
        for path, leaf in tree_leaves_with_path(outputs):
            array = np.asarray(leaf)
            wide = array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array
            found[keystr(path) or "output"] = wide
        return found

    @contextmanager
    def without_trace(self) -> Iterator[None]:
        """The context of passes that do not count: a pure function leaves nothing to put back."""
        yield

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        """What the task returns for a micro-batch in training, on one device; see `ModelView`."""
        engine = self._engine
        forward = engine.programs.forward(True, scalars, Names.of(micro), Grid.one(jax.local_devices()[0]))
        inputs = engine.programs.inputs(0, scalars, False, {})

        def made(parameters: Any, constants: Any, one: Any, inputs: Any) -> Any:
            context = forward.context(one, inputs, carry=forward.carry(None, one, inputs))
            return forward.outputs(parameters, constants, one, context)

        one = engine.batches.padded(micro, micro.size)
        return jax.jit(made)(engine.train_state.parameters, engine.constants, one, inputs)

    def perturb(self, size: float) -> None:
        """Change every parameter by a random relative change of at most this size."""
        engine = self._engine

        def changed(name: str, array: jax.Array) -> jax.Array:
            whole = self._whole(array)
            change = rng.generator(engine.seed, "perturb", name).uniform(-size, size, whole.shape)
            return self._placed(whole * (1 + change), array)

        parameters = {name: changed(name, array) for name, array in engine.train_state.parameters.items()}
        engine.constants |= {name: changed(name, engine.constants[name]) for name in self.frozen}
        engine.train_state.parameters = parameters

    def update_from(self, gradients: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients, those not named being zero."""
        engine = self._engine
        given = {
            name: self._placed(np.asarray(gradients[name]).reshape(array.shape), array)
            if name in gradients
            else jnp.zeros_like(array)
            for name, array in engine.train_state.parameters.items()
        }
        engine.update_from(given, step, scalars)

    def _placed(self, whole: Array, like: jax.Array) -> jax.Array:
        """A whole array, which every process has, as it lies on the devices."""
        whole = whole.astype(like.dtype)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: whole[index])


def local_outputs(outputs: Any, batches: Sequence[MicroBatch]) -> Iterator[Any]:
    """What the task returned for each micro-batch of this process, without rows that pad.

    Args:
        outputs: of all devices, (passes, devices, rows, …).
        batches: of this process, one device's after the other's.
    """
    own = jax.tree.map(_own, outputs)
    for place, micro in enumerate(batches):
        yield jax.tree.map(lambda array, at=place, size=micro.size: _cut(array[at], size), own)


def _own(array: jax.Array) -> np.ndarray[Any, Any]:
    """This process's part, (micro-batches, rows, …) in the order of the devices."""
    pieces = sorted(array.addressable_shards, key=lambda piece: piece.index[1].start or 0)
    return np.concatenate([np.asarray(piece.data)[:, 0] for piece in pieces])


def _cut(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    return array[:size] if array.ndim and len(array) > size else array
