"""A micro-batch: what is asked of a worker, what it makes of that, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.data.order.order import Indices
from unisono.data.order.plan import SampleIndices
from unisono.task import Batch


@dataclass(frozen=True)
class MaskedSample:
    """A sample that could not be built.

    Attributes:
        slot: its row of the global batch.
        row: of the source.
        epoch: number of passes over the source before.
        first: the first unit of the requested piece; 0 unless the sample is cut.
        reason: why it could not be built.
    """

    slot: int
    row: int
    epoch: int
    first: int
    reason: str


@dataclass(frozen=True)
class BatchInfo:
    """How a micro-batch was built.

    Attributes:
        slots: the requested rows of the global batch; empty if idle.
        samples: the samples in it; empty if idle.
        contents: a checksum of each sample, (samples,) uint64; empty unless requested.
        masked: samples that could not be built.
        seconds: time spent on reading, on sampling, and on cutting, packing and collating.
        delay: of these seconds, the time in which this thread had no core because others had them.
    """

    slots: range
    samples: SampleIndices
    contents: np.ndarray[Any, np.dtype[np.uint64]]
    masked: tuple[MaskedSample, ...] = ()
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    delay: float = 0.0


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one process.

    Attributes:
        number: its number in the global batch.
        rows: source rows of its samples, shape (samples,); a packed row has several.
        arrays: the result of `Task.collate`.
        counts: the result of `Task.counts`; zeros if idle.
        work: the result of `Task.work`, and `rows`; zeros if idle. With `data.on_error=mask` also `masked`.
        idle: real rows with weight zero, for a process that has none left in a short batch.
        packed: number of packed rows; None if rows are samples.
        info: how it was built.
    """

    number: int
    rows: Indices
    arrays: Batch
    counts: dict[str, float]
    work: dict[str, float]
    idle: bool = False
    packed: int | None = None
    info: BatchInfo | None = None

    @property
    def size(self) -> int:
        """Number of rows of the global batch in it."""
        return len(self.rows) if self.packed is None else self.packed

    @property
    def by_row(self) -> bool:
        """Whether its arrays can be sliced by row: none is nested, and the first axis of each is the row."""
        sized = [array for array in self.arrays.values() if hasattr(array, "__len__")]
        nested = any(isinstance(array, Mapping | list | tuple) or len(array) != self.size for array in sized)
        return self.packed is None and not nested

    def select_row(self, row: int) -> MicroBatch:
        """One row as a micro-batch; requires `by_row`."""
        arrays = {n: a[row : row + 1] if hasattr(a, "__len__") else a for n, a in self.arrays.items()}
        return replace(self, arrays=arrays, rows=self.rows[row : row + 1])


@dataclass(frozen=True)
class Request:
    """A request for a micro-batch.

    Attributes:
        number: its number in the global batch.
        slots: its rows of the global batch; empty if idle.
        samples: the samples to build.
        idle: whether it has weight zero.
    """

    number: int
    slots: range
    samples: SampleIndices
    idle: bool = False
