"""Consistency checks: copies hold the same bits, and parameters with a gradient change.

Digests are made on each device of its own piece, and brought together in one small array that every process gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from unisono.engines.jax.parallel import mesh
from unisono.engines.jax.parallel.mesh import Grid
from unisono.runtime.errors import GuardError
from unisono.runtime.fault_names import FaultName

Digests = Mapping[str, np.ndarray[Any, np.dtype[np.uint32]]]


def digests(arrays: Mapping[str, jax.Array], grid: Grid) -> dict[str, np.ndarray[Any, Any]]:
    """By name a number for each device, (devices,), that changes when any bit of its piece changes."""
    names = tuple(arrays)
    cuts = tuple(array.sharding.spec for array in arrays.values())  # type: ignore[attr-defined]
    found = np.asarray(_program(grid, names, cuts)(dict(arrays)))
    return {name: found[:, number] for number, name in enumerate(names)}


def find_differing(
    found: Digests, arrays: Mapping[str, jax.Array], grid: Grid, owners: Sequence[int]
) -> dict[str, str]:
    """Arrays whose copies of the same piece differ, by name, each with the devices that hold them.

    Args:
        found: of all arrays, parameters first.
        arrays: which they are of.
        grid: of devices.
        owners: the process of each device.
    """
    places = np.arange(grid.devices).reshape(grid.replicas, grid.shards)
    differing = {}
    for name, values in found.items():
        cut = mesh.SHARD in tuple(arrays[name].sharding.spec)  # type: ignore[attr-defined]
        for copies in places.T if cut else [places.reshape(-1)]:
            sides: dict[int, list[str]] = {}
            for device in copies.tolist():
                sides.setdefault(int(values[device]), []).append(f"{device} (rank {owners[device]})")
            if len(sides) > 1:
                differing[name] = " and ".join(f"[{', '.join(side)}]" for side in sides.values())
                break
    return differing


def check_copies(differing: Mapping[str, str], count: int, updates: int) -> None:
    """Refuse to continue with copies that differ.

    Args:
        differing: from `find_differing`.
        count: arrays that were compared.
        updates: made when they were compared.

    Raises:
        GuardError: naming the first array that differs, and the devices.
    """
    for name, devices in differing.items():
        if not updates:
            raise GuardError(
                f"the initial weights differ between processes: '{name}' is not the same on devices {devices} "
                f"({len(differing)} of {count} arrays differ). build() reads something beside its key that differs "
                "there: jax.process_index(), a generator without a seed, a file; draw from the key alone",
                fault=FaultName.INITIALISATION_BY_RANK,
            )
        raise GuardError(
            f"replicas differ: step {updates}, '{name}' is not the same on devices {devices} ({len(differing)} of "
            f"{count} arrays differ). A device computed something different: a nondeterministic "
            "kernel, or broken hardware",
            fault=FaultName.REPLICA_DRIFT,
        )


@cache
def _program(grid: Grid, names: tuple[str, ...], cuts: tuple[PartitionSpec, ...]) -> Any:
    specs = dict(zip(names, cuts, strict=True))

    def on_device(arrays: dict[str, jax.Array]) -> jax.Array:
        return mesh.all_gather(jnp.stack([_digest(arrays[name]) for name in names])[None])

    @jax.jit
    def program(arrays: dict[str, jax.Array]) -> Any:
        return grid.per_device(on_device, in_specs=(specs,), out_specs=PartitionSpec())(arrays)

    return program


def _digest(array: jax.Array) -> jax.Array:
    """The sum of all bits as 32-bit integers, weighted by odd numbers: no flipped bit is lost to the wrap."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    width = array.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(array, jnp.uint32 if width >= 4 else {1: jnp.uint8, 2: jnp.uint16}[width])
    flat = bits.astype(jnp.uint32).reshape(-1)
    return (flat * (2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)
