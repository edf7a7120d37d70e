"""What `train.precision` means in JAX: dtypes of master weights and of the computation, and the precision of products.

`fp64` switches JAX's 64-bit mode on, and a cast to fewer bits inside of the model is refused with its line, since it
would put a floor of 1e-7 under every comparison. `bf16` computes `outputs` with parameters and batch in bfloat16, over
fp32 master weights; losses are computed in fp32. Products of matrices in fp32 are pinned to full fp32: accelerators
would else use fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from unisono.runtime.errors import ConfigError

MASTER = {"fp64": jnp.float64, "fp32": jnp.float32, "bf16": jnp.float32}
COMPUTE = {"fp64": jnp.float64, "fp32": jnp.float32, "bf16": jnp.bfloat16}
_PRODUCTS = {"fp64": "highest", "fp32": "highest", "bf16": "default"}


def pin(precision: str) -> dict[str, Any]:
    """Set JAX's options for a precision; returns the previous ones, for `unpin`."""
    before = {name: getattr(jax.config, name) for name in _switches(precision)}
    unpin(_switches(precision))
    return before


def unpin(switches: Mapping[str, Any]) -> None:
    """Set JAX's switches."""
    for name, value in switches.items():
        jax.config.update(name, value)


def _switches(precision: str) -> dict[str, Any]:
    return {
        "jax_enable_x64": precision == "fp64",
        "jax_default_matmul_precision": _PRODUCTS[precision],
        "jax_threefry_partitionable": True,  # draws do not depend on how what is drawn is cut
        "jax_default_prng_impl": "threefry2x32",
    }


def wide_dtype(precision: str) -> Any:
    """The dtype in which sums are reported."""
    return MASTER[precision]


def to_master(arrays: Mapping[str, jax.Array], precision: str) -> dict[str, jax.Array]:
    """Parameters in the dtype in which they are kept; integers stay what they are."""
    return {name: _cast(array, MASTER[precision]) for name, array in arrays.items()}


def to_compute(tree: Any, precision: str) -> Any:
    """Arrays in the dtype of the computation; only floats are cast."""
    return jax.tree.map(lambda leaf: _cast(leaf, COMPUTE[precision]), tree)


def to_wide(tree: Any, precision: str) -> Any:
    """What the model returned, in the dtype of losses: bfloat16 becomes fp32."""
    return to_compute(tree, "fp32") if precision == "bf16" else tree


def _cast(array: Any, dtype: Any) -> Any:
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def on_host(array: np.ndarray[Any, Any], precision: str, name: str) -> np.ndarray[Any, Any]:
    """An array of a batch in the dtype in which JAX takes it.

    Raises:
        ConfigError: for integers that JAX's 32 bits would cut off.
    """
    if array.dtype.kind == "f" and array.dtype.itemsize >= 4:
        return array.astype(np.float64 if precision == "fp64" else np.float32, copy=False)
    if precision != "fp64" and array.dtype in (np.int64, np.uint64):
        small = np.dtype(np.int32 if array.dtype == np.int64 else np.uint32)
        limits = np.iinfo(small)
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise ConfigError(
                f"the batch's '{name}' has integers beyond 32 bits ({array.min()} to {array.max()}), which JAX would "
                "truncate; split them in collate(), e.g. into two arrays of 32 bits"
            )
        return array.astype(small)
    return array


def check_no_downcast(jaxpr: Any, task: str) -> None:
    """Refuse a traced fp64 computation that uses fewer bits anywhere.

    Raises:
        ConfigError: with the line of the user's code.
    """
    for equation in _equations(jaxpr):
        doubles = any(_dtype(v) == np.float64 for v in equation.invars)
        made = (d for v in equation.outvars if (d := _dtype(v)) is not None and jnp.issubdtype(d, jnp.floating))
        lower = [dtype for dtype in made if jnp.finfo(dtype).bits < 64]
        if doubles and lower:
            line = source_info_util.summarize(equation.source_info)
            raise ConfigError(
                f"{task}: train.precision=fp64, but {line} casts to {lower[0]}; ask for at least "
                f"that precision instead of exactly that: jnp.promote_types(x.dtype, jnp.{lower[0]})"
            )


def _equations(jaxpr: Any) -> Iterator[Any]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for equation in jaxpr.eqns:
        inner = [value for value in jax.tree.leaves(equation.params, is_leaf=_has_equations) if _has_equations(value)]
        yield from (one for value in inner for one in _equations(value))
        if not inner:
            yield equation


def _has_equations(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def _dtype(variable: Any) -> Any:
    return getattr(getattr(variable, "aval", None), "dtype", None)
