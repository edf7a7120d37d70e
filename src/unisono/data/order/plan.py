"""Which samples stand in which row of each step's global batch, decided before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.data.order.order import Indices
from unisono.runtime.errors import ConfigError

_LOOKAHEAD = 1024  # positions that are worked out at once


@dataclass(frozen=True)
class SampleIndices:
    """Samples and where they stand, each array of shape (samples,).

    Attributes:
        slots: row of the global batch, ascending; packed rows hold several samples.
        rows: row of the source.
        epochs: how often the source was passed before.
        first: the first unit (token) of the sample that is taken, 0 unless it was cut.
        last: one past the last; -1 for a whole sample.
    """

    slots: Indices
    rows: Indices
    epochs: Indices
    first: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    last: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def __post_init__(self) -> None:
        if len(self.first) != len(self.rows):  # whole samples
            object.__setattr__(self, "first", np.zeros(len(self.rows), dtype=np.int64))
            object.__setattr__(self, "last", np.full(len(self.rows), -1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice | NDArray[np.bool_]) -> SampleIndices:
        """Some of the samples: a stretch of them, or where a mask of shape (samples,) is true."""
        return SampleIndices(*(column[which] for column in self.columns))

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Slot, row, epoch, first and last unit of each sample."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    @property
    def columns(self) -> tuple[Indices, Indices, Indices, Indices, Indices]:
        """Its arrays, in the order in which they are given."""
        return self.slots, self.rows, self.epochs, self.first, self.last


NO_SAMPLES = SampleIndices(*[np.zeros(0, dtype=np.int64)] * 3)


class Stream(Protocol):
    """What stands at the positions `0, 1, 2, …` of a run: a pure function, whose cost no position changes."""

    @property
    def size(self) -> int:
        """Positions in one epoch."""

    @property
    def seed(self) -> int:
        """Of the run."""

    def at(self, positions: Indices) -> tuple[Indices, Indices]:
        """Rows of the source, and how often it was passed before, (n,) -> (n,), (n,)."""


class Plan(Protocol):
    """Which samples each step takes."""

    @property
    def global_batch(self) -> int:
        """Rows of a full step."""

    @property
    def capacity(self) -> int | None:
        """Units that a row holds, where samples share rows; None where a row is a sample."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def steps(self) -> int:
        """Steps in the whole run."""

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step."""

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The samples that stand in these rows of the global batch of a step."""

    def state(self, step: int, rows: range) -> Any:
        """What a resume at this step needs for these rows, as JSON; None for a pure function of the step."""

    def resume(self, states: list[Any]) -> None:
        """Go on from what the processes of an earlier run, whatever their number, said in `state`, by rank."""


@dataclass(frozen=True)
class StreamPlan:
    """A position for a row: step `s` takes `[s·B, (s+1)·B)`, cut off at the end of the run.

    Attributes:
        stream: positions to rows of the source.
        global_batch: rows per full step.
        length: positions in the whole run; only the last batch of a run counted in epochs is short.
    """

    stream: Stream
    global_batch: int
    length: int
    capacity: None = field(default=None, init=False)  # a row is a sample
    _near: list[tuple[int, Indices, Indices]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def create(cls, stream: Stream, global_batch: int, steps: int | None, epochs: float | None) -> StreamPlan:
        """The plan of a run counted in steps or in epochs."""
        if steps is not None:
            return cls(stream, global_batch, steps * global_batch)
        assert epochs is not None
        length = round(epochs * stream.size)
        if length < 1:
            raise ConfigError(f"train.epochs={epochs} of {stream.size} rows is less than one row")
        return cls(stream, global_batch, length)

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.stream.seed

    @property
    def steps(self) -> int:
        """Steps in the whole run."""
        return -(-self.length // self.global_batch)

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step."""
        return min(self.global_batch, self.length - step * self.global_batch)

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The samples that stand in these rows of the global batch of a step."""
        first = step * self.global_batch + rows.start
        return SampleIndices(np.arange(rows.start, rows.stop, dtype=np.int64), *self._lookup(first, first + len(rows)))

    def batch(self, step: int) -> Indices:  # -> (rows,)
        """Source rows of the global batch of a step, in order."""
        return self.samples(step, range(self.rows(step))).rows

    def _lookup(self, first: int, last: int) -> tuple[Indices, Indices]:
        """Rows and epochs at positions; a thousand of them cost no more than a few, so they are kept for the next."""
        near = self._near[0] if self._near else None  # another thread may come and put others there
        if near is None or not (near[0] <= first and last <= near[0] + len(near[1])):
            until = max(last, min(first + _LOOKAHEAD, self.length))
            near = (first, *self.stream.at(np.arange(first, until, dtype=np.int64)))
            self._near[:] = [near]
        start, rows, epochs = near
        return rows[first - start : last - start], epochs[first - start : last - start]

    def state(self, step: int, rows: range) -> None:
        """Nothing: the step says it all."""

    def resume(self, states: list[Any]) -> None:
        """Nothing to do."""
