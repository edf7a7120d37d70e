"""Weights of a checkpoint as the pytree that a task builds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from unisono.engines.jax import model, state
from unisono.engines.jax.numerics import precision
from unisono.engines.state import StateReader, check_arrays, check_dtype
from unisono.runtime.errors import RunError
from unisono.task import Task


def build_model(task: Task, seed: int, kind: str | None = None) -> Any:
    """The model of a task, as it is before the first step; in the dtype in which a run of this precision keeps it."""
    built = task.build(model.init_key(seed))
    if kind is None:
        return built
    master = precision.MASTER[kind]
    return jax.tree.map(
        lambda leaf: leaf.astype(master) if model.is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
        built,
    )


def load_arrays(pytree: Any, reader: StateReader, ema: bool, folder: str) -> Any:
    """The same pytree with the arrays of a checkpoint, in its own dtypes.

    Args:
        pytree: as the task's `build` makes it.
        reader: of the checkpoint.
        ema: whether to take the moving average of what is trained.
        folder: of the run, for errors.

    Raises:
        RunError: where there is no average.
        CheckpointError: for a checkpoint of another model; see `check_arrays`.
    """
    if ema and not any(name.startswith(state.AVERAGE) for name in reader.shapes):
        raise RunError(f"{folder} has no moving average of its weights; it was trained without ema.decay")
    arrays = {f"{state.MODEL}{name}": array for name, array in model.named_arrays(pytree).items()}
    saved = {name: shape for name, shape in reader.shapes.items() if name.startswith(state.MODEL)}
    check_arrays({name: array.shape for name, array in arrays.items()}, saved)

    def array(path: Any, leaf: Any) -> Any:
        if not model.is_array(leaf):
            return leaf
        own = keystr(path, simple=True, separator=".")
        name = f"{state.AVERAGE}{own}" if ema and f"{state.AVERAGE}{own}" in reader.shapes else f"{state.MODEL}{own}"
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)  # a NumPy array of 64 bits is one of 32 in JAX
        check_dtype(name, reader.dtype(name), dtype.name)
        return jnp.asarray(reader.read(name, (0,) * leaf.ndim, leaf.shape), dtype)

    return jax.tree_util.tree_map_with_path(array, pytree)
