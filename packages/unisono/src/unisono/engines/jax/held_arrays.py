"""The arrays that a run has on its devices: compared between devices, saved and loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from unisono.engines.jax import state as saved_state
from unisono.engines.jax.guards import replicas
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.jax.step import State
from unisono.engines.state import StateReader

log = logging.getLogger(__name__)


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
        return replicas.digests(saved_state.named_arrays(self.state, self.constants), self.grid)

    def find_differing(self, digests: Mapping[str, Any]) -> dict[str, str]:
        """Arrays whose copies differ by their digests, with the devices."""
        arrays = saved_state.named_arrays(self.state, self.constants)
        return replicas.find_differing(digests, arrays, self.grid, [device.process_index for device in self.devices])

    def exceeds_rounding(self, squares: Mapping[str, float], lr: float) -> bool:
        """Whether an update at this rate changes a parameter by more than rounding loses; collective.

        As in the torch engine, but by the norm of a parameter's gradient (the root of `squares`, by the parameter's
        name in a checkpoint): its elements are not there any more.
        """
        parameters = self.state.parameters
        smallest = jax.jit(lambda arrays: jax.tree.map(lambda array: jnp.abs(array).min(), arrays))(parameters)
        return any(
            lr * min(1.0, (squares[f"{saved_state.MODEL}{name}"] / array.size) ** 0.5)
            > float(jnp.finfo(array.dtype).eps * smallest[name])
            for name, array in parameters.items()
        )

    def load(self, reader: StateReader, weights_only: bool) -> None:
        """Load a saved state, except that of rows; see `Engine.load`."""
        kinds: tuple[str, ...] = (saved_state.MODEL,) if weights_only else (saved_state.MODEL, saved_state.OPTIMIZER)
        averaged = bool(self.state.average)
        saved = any(name.startswith(saved_state.AVERAGE) for name in reader.shapes)
        kinds += (saved_state.AVERAGE,) if averaged and saved else ()
        self.state, self.constants = saved_state.load(self.state, self.constants, reader, kinds)
        if averaged and not saved:
            log.warning("the checkpoint has no moving average of the weights; it starts from the current weights")
            weights = self.state.parameters
            self.state.average = {name: weights[name].copy() for name in self.state.average}
