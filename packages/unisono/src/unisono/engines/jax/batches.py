"""Micro-batches of this process as global arrays (passes, devices, rows, …) of one shape.

A short micro-batch is padded with its last row, and records which rows are real. The arrays of the next step are
copied to the devices while this one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from unisono.config.batch_split import BatchSplit
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.jax.numerics import precision
from unisono.engines.jax.parallel.mesh import Grid
from unisono.engines.peekable import Peekable
from unisono.runtime.errors import ConfigError

HostArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DeviceBatch:
    """Micro-batches stacked by pass and device; inside a pass, one of them.

    Attributes:
        arrays: the batch, (passes, devices, rows, …).
        numbers: all else that is known of them, in one array since each costs a transfer; read it by the properties.
        terms: how many terms `Task.counts` names.
        units: how many units `Task.work` names.
    """

    arrays: Any
    numbers: Any
    terms: int
    units: int

    @classmethod
    def on_host(
        cls, arrays: Any, number: int, valid: HostArray, counts: Sequence[float], work: Sequence[float], dtype: Any
    ) -> DeviceBatch:
        """One micro-batch as NumPy arrays; arguments as the properties, `dtype` is that of sums."""
        numbers = np.array([number, *counts, *work], dtype=dtype)  # a micro-batch's number is exact: it is below 2²⁴
        return cls(arrays, np.concatenate([numbers, valid.astype(dtype)]), len(counts), len(work))

    @property
    def number(self) -> Any:
        """Which micro-batches of the global batch they are, (passes, devices)."""
        return self.numbers[..., 0].astype(np.uint32)

    @property
    def counts(self) -> Any:
        """What `Task.counts` says, (passes, devices, terms), by name in order."""
        return self.numbers[..., 1 : 1 + self.terms]

    @property
    def work(self) -> Any:
        """What `Task.work` says, (passes, devices, units)."""
        return self.numbers[..., 1 + self.terms : self._before_rows]

    @property
    def valid(self) -> Any:
        """Which of their rows are real, (passes, devices, rows)."""
        return self.numbers[..., self._before_rows :] > 0

    def with_rows(self, arrays: Any, valid: Any) -> DeviceBatch:
        """The same with other rows."""
        known = self.numbers[..., : self._before_rows]
        numbers = jnp.concatenate([known, jnp.asarray(valid, self.numbers.dtype)], axis=-1)
        return replace(self, arrays=arrays, numbers=numbers)

    @property
    def _before_rows(self) -> int:
        return 1 + self.terms + self.units


jax.tree_util.register_dataclass(DeviceBatch, data_fields=["arrays", "numbers"], meta_fields=["terms", "units"])


@dataclass(frozen=True)
class ColumnNames:
    """Names of columns.

    Attributes:
        terms: of the loss, as `Task.counts` names them.
        work: units.
    """

    terms: tuple[str, ...]
    work: tuple[str, ...]

    @classmethod
    def from_micro_batch(cls, micro: MicroBatch) -> ColumnNames:
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

    def __init__(
        self, split: BatchSplit, grid: Grid, kind: str, part: Callable[[str], AbstractContextManager[Any]]
    ) -> None:
        self._split, self._grid, self._kind, self._part = split, grid, kind, part
        self._upcoming: Peekable | None = None
        self._started: tuple[list[MicroBatch], DeviceBatch] | None = None

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same steps; `look_ahead` can copy the next one to the devices."""
        self._upcoming, self._started = Peekable(steps), None
        return self._upcoming

    def look_ahead(self) -> None:
        """Copy the next step's arrays to the devices; call it while they compute this step."""
        if self._upcoming is not None and (batches := self._upcoming.peek()):
            with suppress(ConfigError):  # it is raised when the turn of these batches comes
                self._started = batches, self.to_devices(batches)

    def take(self, batches: list[MicroBatch]) -> DeviceBatch:
        """The arrays of a step, which may already be on the devices."""
        begun, self._started = self._started, None
        return begun[1] if begun is not None and begun[0] is batches else self.to_devices(batches)

    def to_devices(self, batches: Sequence[MicroBatch], rows: int | None = None) -> DeviceBatch:
        """Micro-batches of one step as global arrays.

        Args:
            batches: all of this process, `passes · devices` of them.
            rows: of a full micro-batch, where it is not the split's.

        Raises:
            ConfigError: naming an array that is not as wide in every micro-batch, or cannot be padded.
        """
        with self._part("transfer"):
            return self._put([self.pad(micro, rows or self._split.micro_batch) for micro in batches])

    def pad(self, micro: MicroBatch, rows: int) -> DeviceBatch:
        """A micro-batch of so many rows, as NumPy arrays without an axis for passes or devices."""
        size = micro.size

        def fill(path: Any, value: Any) -> HostArray:
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

        wide = np.dtype(precision.wide_dtype(self._kind))
        return DeviceBatch.on_host(
            jax.tree_util.tree_map_with_path(fill, micro.arrays),
            micro.number,
            np.arange(rows) < (0 if micro.idle else size),
            [micro.counts[name] for name in sorted(micro.counts)],
            list(micro.work.values()),
            wide,
        )

    def _put(self, padded: Sequence[DeviceBatch]) -> DeviceBatch:
        if len({jax.tree.structure(one) for one in padded}) > 1:
            raise ConfigError(
                "collate() returned different arrays, or counts() or work() different names, for micro-batches of the "
                "same step"
            )

        def side_by_side(path: Any, *arrays: HostArray) -> HostArray:
            if len({array.shape for array in arrays}) > 1:
                name = keystr(path[1:], simple=True, separator=".")
                shapes = sorted({array.shape for array in arrays})
                raise ConfigError(
                    f"the batch's '{name}' has the shapes {shapes} in micro-batches of one step; a JAX step is "
                    "compiled for one shape, so pad to a fixed length in collate()"
                )
            # Device by device: each computes a contiguous stretch of micro-batches, one in each pass.
            return np.stack(arrays).reshape(self._split.devices, -1, *arrays[0].shape).swapaxes(0, 1)

        stacked: DeviceBatch = self.spread(jax.tree_util.tree_map_with_path(side_by_side, padded[0], *padded[1:]))
        return stacked

    def spread(self, local: Any) -> Any:
        """Global arrays of this process's parts (passes, its devices, …)."""
        first, sharding = self._grid.first_local_index, self._grid.batch

        def place(part: HostArray) -> jax.Array:
            def piece(index: Any) -> HostArray:
                at = (index[1].start or 0) - first
                return np.ascontiguousarray(part[:, at : at + 1])

            # The shortest way there is: `device_put`, and an array of what it gives, take the host three times as long.
            return jax.make_array_from_callback((part.shape[0], self._grid.devices, *part.shape[2:]), sharding, piece)

        return jax.tree.map(place, local)


def signature(batch: DeviceBatch) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Name, shape and dtype of every array, which determine what is compiled."""
    leaves = jax.tree_util.tree_leaves_with_path(batch.arrays)
    return tuple((keystr(path, simple=True, separator="."), leaf.shape, str(leaf.dtype)) for path, leaf in leaves)
