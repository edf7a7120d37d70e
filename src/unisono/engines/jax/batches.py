"""Micro-batches of this process as global arrays (passes, devices, rows, …) of one shape.

A short micro-batch is padded by its last row, and says how many of its rows are real. The arrays of the next step are
put on the devices while this one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from unisono.config.batch_split import Split
from unisono.data.loading.loader import MicroBatch
from unisono.engines.jax.numerics import precision
from unisono.engines.jax.parallel.mesh import BATCH, Grid
from unisono.engines.peekable import Peekable
from unisono.runtime.errors import ConfigError

Host = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Pass:
    """Micro-batches side by side, in pass and device; inside of a pass, one of them.

    Attributes:
        arrays: the batch, (passes, devices, rows, …).
        number: which micro-batches of the global batch they are, (passes, devices).
        valid: which of their rows are real, (passes, devices, rows).
        counts: what `Task.counts` says, (passes, devices, terms), by name in order.
        work: what `Task.work` says, (passes, devices, units).
    """

    arrays: Any
    number: Any
    valid: Any
    counts: Any
    work: Any


jax.tree_util.register_dataclass(Pass)


@dataclass(frozen=True)
class Names:
    """What columns mean.

    Attributes:
        terms: of the loss, as `Task.counts` names them.
        work: units.
    """

    terms: tuple[str, ...]
    work: tuple[str, ...]

    @classmethod
    def of(cls, micro: MicroBatch) -> Names:
        """Those of a micro-batch."""
        return cls(tuple(sorted(micro.counts)), tuple(micro.work))


class Batches:
    """Puts micro-batches on the devices of this process.

    Args:
        split: of the global batch.
        grid: of devices.
        kind: precision of the run.
        part: the context of a part of the step, for a profile.
    """

    def __init__(self, split: Split, grid: Grid, kind: str, part: Callable[[str], AbstractContextManager[Any]]) -> None:
        self._split, self._grid, self._kind, self._part = split, grid, kind, part
        self._here = split.devices
        self._coming: Peekable | None = None
        self._begun: tuple[list[MicroBatch], Pass] | None = None

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same steps, the next of which `look_ahead` can put on the devices."""
        self._coming, self._begun = Peekable(steps), None
        return self._coming

    def look_ahead(self) -> None:
        """Put what the next step is made of on the devices: to be called while they compute this one."""
        if self._coming is not None and (batches := self._coming.peek()):
            with suppress(ConfigError):  # it is raised when the turn of these batches comes
                self._begun = batches, self.of(batches)

    def taken(self, batches: list[MicroBatch]) -> Pass:
        """The arrays of a step, which may be on the devices already."""
        begun, self._begun = self._begun, None
        return begun[1] if begun is not None and begun[0] is batches else self.of(batches)

    def of(self, batches: Sequence[MicroBatch], rows: int | None = None) -> Pass:
        """Micro-batches of one step as global arrays.

        Args:
            batches: all of this process, `passes · devices` of them.
            rows: of a full micro-batch, where it is not the split's.

        Raises:
            ConfigError: naming an array that is not as wide in every micro-batch, or cannot be padded.
        """
        with self._part("transfer"):
            return self._put([self.padded(micro, rows or self._split.micro_batch) for micro in batches])

    def padded(self, micro: MicroBatch, rows: int) -> Pass:
        """A micro-batch of so many rows, as NumPy arrays without an axis for passes or devices."""
        size = micro.size

        def fill(path: Any, value: Any) -> Host:
            name = keystr(path, simple=True, separator=".")
            array = np.asarray(value)
            if array.dtype.kind not in "fiubV" and array.dtype.name != "bfloat16":
                raise ConfigError(f"the batch's '{name}' is of {array.dtype}; a JAX task's collate() returns numbers")
            if size < rows:
                if array.ndim == 0 or len(array) != size:
                    raise ConfigError(
                        f"the batch's '{name}' of shape {array.shape} cannot be padded from {size} to {rows} rows: its "
                        "first axis is not the row"
                    )
                array = np.concatenate([array, np.repeat(array[-1:], rows - size, axis=0)])
            return precision.on_host(array, self._kind, name)

        wide = np.dtype(precision.wide(self._kind))
        return Pass(
            jax.tree_util.tree_map_with_path(fill, micro.arrays),
            np.uint32(micro.number),
            np.arange(rows) < (0 if micro.idle else size),
            np.array([micro.counts[name] for name in sorted(micro.counts)], dtype=wide),
            np.array(list(micro.work.values()), dtype=wide),
        )

    def _put(self, padded: Sequence[Pass]) -> Pass:
        structures = {jax.tree.structure(one.arrays) for one in padded}
        if len(structures) > 1:
            raise ConfigError("collate() returned other arrays for one micro-batch than for another of the same step")

        def side_by_side(path: Any, *arrays: Host) -> jax.Array:
            if len({array.shape for array in arrays}) > 1:
                name = keystr(path[1:], simple=True, separator=".")
                shapes = sorted({array.shape for array in arrays})
                raise ConfigError(
                    f"the batch's '{name}' has the shapes {shapes} in micro-batches of one step; a JAX step is compiled "
                    "for one shape, so pad to a fixed length in collate()"
                )
            # Device by device: each computes a contiguous stretch of micro-batches, one in each pass.
            local = np.stack(arrays).reshape(self._here, -1, *arrays[0].shape).swapaxes(0, 1)
            return self.spread(local)

        return jax.tree_util.tree_map_with_path(side_by_side, padded[0], *padded[1:])

    def spread(self, local: Host) -> jax.Array:
        """This process's part (passes, its devices, …) of a global array."""
        shape = (local.shape[0], self._grid.devices, *local.shape[2:])
        return jax.make_array_from_process_local_data(self._grid.batch, np.ascontiguousarray(local), shape)


def specs_of(batch: Pass) -> Pass:
    """How every array of it is cut."""
    return jax.tree.map(lambda _: BATCH, batch)


def signature(batch: Pass) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Name, shape and dtype of every array, which decide what is compiled."""
    leaves = jax.tree_util.tree_leaves_with_path(batch.arrays)
    return tuple((keystr(path, simple=True, separator="."), leaf.shape, str(leaf.dtype)) for path, leaf in leaves)
