"""The name map between the two engines: an array's path in the JAX model, with dots, is its name in the torch model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray


def name_of(path: tuple[Any, ...]) -> str:
    """The name in torch of a leaf's path in JAX, e.g. `nets.0.layers.1.swiglu.down.weight`."""
    parts = (getattr(key, "name", getattr(key, "key", getattr(key, "idx", None))) for key in path)
    return ".".join(map(str, parts))


def arrays_of(model: Any) -> dict[str, NDArray[Any]]:
    """The arrays of a JAX model by their names in torch."""
    import equinox as eqx
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {name_of(path): np.asarray(leaf) for path, leaf in leaves}


def with_arrays(model: Any, arrays: Mapping[str, Any]) -> Any:
    """A JAX model with other arrays, given by their names in torch.

    Raises:
        KeyError: for an array that is missing.
    """
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    def replaced(path: tuple[Any, ...], leaf: Any) -> Any:
        if not eqx.is_array(leaf):
            return leaf
        value = jnp.asarray(np.asarray(arrays[name_of(path)]), leaf.dtype)
        assert value.shape == leaf.shape, f"{name_of(path)}: {value.shape} for {leaf.shape}"
        return value

    return jax.tree_util.tree_map_with_path(replaced, model)
