"""A JAX run's arrays: compared between devices, and for checkpoints in pieces as on the devices, and read back.

They are named by their path in the pytree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, keystr

from unisono.engines.jax.guards import replicas
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.step import State
from unisono.engines.state import ArrayShard, StateReader, check_arrays, check_dtype

log = logging.getLogger(__name__)
MODEL, AVERAGE, OPTIMIZER, CARRY = "model/", "ema/", "optimizer/", "carry/"


@dataclass
class HeldArrays:
    """All arrays of a run.

    Attributes:
        grid: the devices.
        devices: the same in a row.
        state: what a step changes.
        constants: arrays that are not trained, by name.
    """

    grid: Grid
    devices: Sequence[jax.Device]
    state: State
    constants: dict[str, Any]

    def digests(self) -> dict[str, Any]:
        """By the name of every array a number for each device; collective."""
        return replicas.digests(named_arrays(self.state, self.constants), self.grid)

    def find_differing(self, digests: Mapping[str, Any]) -> dict[str, str]:
        """Arrays whose copies differ by their digests, with the devices."""
        arrays = named_arrays(self.state, self.constants)
        return replicas.find_differing(digests, arrays, self.grid, [device.process_index for device in self.devices])

    def exceeds_rounding(self, squares: Mapping[str, float], lr: float) -> bool:
        """Whether an update at this rate changes a parameter by more than rounding loses; collective.

        As in the torch engine, but by the norm of a parameter's gradient (the root of `squares`, by the parameter's
        name in a checkpoint): its elements are not there any more.
        """
        parameters = self.state.parameters
        smallest = jax.jit(lambda arrays: jax.tree.map(lambda array: jnp.abs(array).min(), arrays))(parameters)
        return any(
            lr * min(1.0, (squares[f"{MODEL}{name}"] / array.size) ** 0.5)
            > float(jnp.finfo(array.dtype).eps * smallest[name])
            for name, array in parameters.items()
        )

    def load(self, reader: StateReader, weights_only: bool) -> None:
        """Load a saved state, except that of rows; see `Engine.load`."""
        kinds: tuple[str, ...] = (MODEL,) if weights_only else (MODEL, OPTIMIZER)
        averaged = bool(self.state.average)
        saved = any(name.startswith(AVERAGE) for name in reader.shapes)
        kinds += (AVERAGE,) if averaged and saved else ()
        self.state, self.constants = load(self.state, self.constants, reader, kinds)
        if averaged and not saved:
            log.warning("the checkpoint has no moving average of the weights; it starts from the current weights")
            weights = self.state.parameters
            self.state.average = {name: weights[name].copy() for name in self.state.average}


def named_arrays(state: State, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Every array but those of rows, by its name in a checkpoint."""
    return {
        **{f"{MODEL}{name}": array for name, array in {**state.parameters, **constants}.items()},
        **{f"{AVERAGE}{name}": array for name, array in state.average.items()},
        **dict(optimizer_arrays(state.optimizer, state.parameters)),
    }


def optimizer_arrays(state: Any, parameters: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arrays of an optimizer's state: `optimizer/<parameter>/<slot>`, and `optimizer/<slot>` of all parameters."""
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        own = [entry.key for entry in path if isinstance(entry, DictKey) and entry.key in parameters]
        rest = tuple(entry for entry in path if not (isinstance(entry, DictKey) and entry.key in parameters))
        yield f"{OPTIMIZER}{''.join(f'{name}/' for name in own)}{keystr(rest, simple=True, separator='.')}", array


def shardings(optimizer: Any, parameters: Mapping[str, Any], grid: Grid) -> Any:
    """The shardings of an optimizer's state: those of the parameters, for arrays of the same shape."""
    placed = []
    for name, like in optimizer_arrays(optimizer, parameters):
        parameter = parameters.get(name.removeprefix(OPTIMIZER).rpartition("/")[0])
        same = parameter is not None and tuple(parameter.shape) == tuple(like.shape)
        placed.append(grid.sharding(grid.spec(like.shape)) if same else grid.replicated)
    return jax.tree.unflatten(jax.tree.structure(optimizer), placed)


def shards(state: State, constants: Mapping[str, Any], rows: bool) -> list[ArrayShard]:
    """The pieces that this process saves: one copy of each, divided among the devices that hold it.

    Args:
        state: of the run.
        constants: arrays that are not trained.
        rows: whether a step has left a state of rows.
    """
    trained = {f"{MODEL}{name}" for name in state.parameters}
    pieces = [
        ArrayShard(name, array.shape, _offset(piece.index, array.shape), piece.data, finite=name in trained)
        for number, (name, array) in enumerate(named_arrays(state, constants).items())
        for piece in array.addressable_shards
        if piece.replica_id == number % _copies(array)
    ]
    carried = state.carry.items() if rows else ()
    return pieces + [piece for name, array in carried for piece in _carry_shards(name, array)]


def _carry_shards(name: str, array: jax.Array) -> Iterator[ArrayShard]:
    """The state of rows, (passes, devices, rows, …), as pieces of (rows of the global batch, …)."""
    passes, devices, rows, *rest = array.shape
    for piece in array.addressable_shards:
        first = (piece.index[1].start or 0) * passes * rows
        data = np.asarray(piece.data).reshape(passes * rows, *rest)
        yield ArrayShard(f"{CARRY}{name}", (passes * devices * rows, *rest), (first, *(0 for _ in rest)), data)


def load(
    state: State, constants: dict[str, Any], reader: StateReader, kinds: tuple[str, ...]
) -> tuple[State, dict[str, Any]]:
    """Load a saved state, each device its part.

    Raises:
        CheckpointError: naming arrays that are missing, too many, or of another shape.
    """
    mine = {name: array for name, array in named_arrays(state, constants).items() if name.startswith(kinds)}
    saved = {name: shape for name, shape in reader.shapes.items() if name.startswith(kinds)}
    check_arrays({name: array.shape for name, array in mine.items()}, saved)
    found = {name: _read(reader, name, array) for name, array in mine.items()}

    def loaded(kind: str, like: Mapping[str, Any]) -> dict[str, Any]:
        return {name: found.get(f"{kind}{name}", array) for name, array in like.items()}

    optimizer = state.optimizer
    if OPTIMIZER in kinds:
        names = [name for name, _ in optimizer_arrays(optimizer, state.parameters)]
        optimizer = jax.tree.unflatten(jax.tree.structure(optimizer), [found[name] for name in names])
    averages = loaded(AVERAGE, state.average)
    return State(loaded(MODEL, state.parameters), averages, optimizer, state.carry), loaded(MODEL, constants)


def load_rows(state: State, reader: StateReader) -> bool:
    """Load the state of rows in place; False if none was saved."""
    for name, array in state.carry.items():
        full = f"{CARRY}{name}"
        passes, devices, rows, *rest = array.shape
        shape, none = (passes * rows, *rest), tuple(0 for _ in rest)
        if full not in reader.shapes or not reader.covers(full, (0, *none), (devices * passes * rows, *rest)):
            return False

        def read(index: Any, full: str = full, shape: Any = shape, none: Any = none, like: Any = array) -> Any:
            first = (index[1].start or 0) * shape[0]
            found = np.asarray(reader.read(full, (first, *none), shape))
            return found.reshape(like.shape[0], 1, -1, *like.shape[3:]).astype(like.dtype)

        state.carry[name] = jax.make_array_from_callback(array.shape, array.sharding, read)
    return True


def _copies(array: jax.Array) -> int:
    """Devices that hold the same piece of it."""
    pieces = array.sharding.devices_indices_map(array.shape)
    return len(pieces) // len({str(index) for index in pieces.values()})


def _read(reader: StateReader, name: str, like: jax.Array) -> jax.Array:
    check_dtype(name, reader.dtype(name), like.dtype.name)

    def piece(index: Any) -> Any:
        shape = tuple(len(range(*cut.indices(size))) for cut, size in zip(index, like.shape, strict=True))
        return np.asarray(reader.read(name, _offset(index, like.shape), shape)).astype(like.dtype, copy=False)

    return jax.make_array_from_callback(like.shape, like.sharding, piece)


def _offset(index: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(cut.indices(size)[0] for cut, size in zip(index, shape, strict=True))
