"""Plans which samples are in which row of each step's global batch, before anything is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.config.batch_split import BatchSplit
from unisono.data.order.order import Indices
from unisono.runtime.errors import ConfigError

_LOOKAHEAD = 1024  # positions computed at a time


@dataclass(frozen=True)
class SampleIndices:
    """Samples and their places in a batch; arrays of shape (samples,).

    Attributes:
        slots: row of the global batch, ascending; a packed row has several samples.
        rows: row of the source.
        epochs: number of passes over the source before.
        first: first unit (token) of the sample; 0 unless it is cut.
        last: one past the last unit; -1 for a whole sample.
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
        """Some of the samples, selected by a slice or a mask of shape (samples,)."""
        return SampleIndices(*(column[which] for column in self.columns))

    def __iter__(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Slot, row, epoch, first and last unit of each sample."""
        return zip(*(column.tolist() for column in self.columns), strict=True)

    @property
    def columns(self) -> tuple[Indices, Indices, Indices, Indices, Indices]:
        """The arrays, in the order of the constructor."""
        return self.slots, self.rows, self.epochs, self.first, self.last


NO_SAMPLES = SampleIndices(*[np.zeros(0, dtype=np.int64)] * 3)


class Stream(Protocol):
    """The rows at the positions `0, 1, 2, …` of a run: a pure function with the same cost at any position."""

    @property
    def size(self) -> int:
        """Positions in one epoch."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Rows of the source, and numbers of passes over it before, (n,) -> (n,), (n,)."""


class Plan(Protocol):
    """Which samples each step consumes."""

    @property
    def global_batch(self) -> int:
        """Rows of a full step."""

    @property
    def capacity(self) -> int | None:
        """Units in a packed row; None if rows are samples."""

    @property
    def seed(self) -> int:
        """The seed of the run."""

    @property
    def steps(self) -> int:
        """Steps in the whole run."""

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step."""

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The samples in these rows of the global batch of a step."""

    def state(self, step: int, rows: range) -> Any:
        """The state needed to resume these rows at this step, as JSON; None if the plan is a function of the step."""

    def resume(self, states: list[Any]) -> None:
        """Restore the `state` of all processes of an earlier run, by rank; their number may differ."""


@dataclass(frozen=True, eq=False)
class LengthGroups:
    """Groups rows of similar length within a global batch, so that micro-batches hold little padding.

    A global batch keeps its rows, so its gradient does not change. Their places follow from their lengths alone, on any
    layout.

    Attributes:
        lengths: units of each row of the source, (rows,).
        size: rows of a group; None for the longest first, to be cut where groups cost the same.
    """

    lengths: Indices
    size: int | None

    def __call__(self, rows: Indices) -> Indices:  # (n,) -> (n,)
        """Which row of a global batch stands at each place.

        Rows are sorted, the longest first, and cut into groups. These are dealt to the halves of the batch, and in them
        to their halves, as in a snake draft, so that the share of each process has as much to compute as the others.

        >>> LengthGroups(np.array([10, 20, 30, 40, 50, 60, 70, 80]), 2)(np.arange(8)).tolist()
        [7, 6, 1, 0, 5, 4, 3, 2]
        """
        by_length = np.argsort(-self.lengths[rows], kind="stable")
        if self.size is None:
            return by_length
        groups = list(range(-(-len(rows) // self.size)))
        return np.concatenate([by_length[number * self.size : (number + 1) * self.size] for number in _deal(groups)])


def cut_evenly(lengths: Indices, count: int) -> list[range]:  # (rows,), longest first
    """Cut rows into groups whose largest padded size, rows times the longest, is as small as it can be.

    Args:
        lengths: Units of each row, in descending order.
        count: Groups, at most as many as there are rows.

    >>> cut_evenly(np.array([100, 50, 40, 30, 20, 20, 10, 10]), 3)
    [range(0, 1), range(1, 4), range(4, 8)]
    """
    costs = np.maximum(lengths, 1)

    def cut(most: int) -> list[range]:
        groups, first = list[range](), 0
        while first < len(costs):
            last = min(len(costs), first + most // int(costs[first]))
            groups.append(range(first, last))
            first = last
        return groups

    low, high = int(costs[0]), int(costs[0]) * len(costs)
    while low < high:  # the smallest size with which there are no more groups than wanted
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= count else (middle + 1, high)
    groups = cut(low)
    while len(groups) < count:  # every process has something to compute in every pass
        largest = max(range(len(groups)), key=lambda n: (len(groups[n]) > 1, len(groups[n]) * int(costs[groups[n][0]])))
        own = groups[largest]
        middle = (own.start + own.stop) // 2
        groups[largest : largest + 1] = [range(own.start, middle), range(middle, own.stop)]
    return groups


def _deal(groups: list[int]) -> list[int]:
    """Groups in an order in which each half, quarter, … has as long ones as the others."""
    if len(groups) < 3:
        return groups
    first = [group for place, group in enumerate(groups) if place % 4 in (0, 3)]
    second = [group for place, group in enumerate(groups) if place % 4 in (1, 2)]
    return [*_deal(first), *_deal(second)]


@dataclass(frozen=True)
class StreamPlan:
    """One position per row: step `s` consumes the positions `[s·B, (s+1)·B)`, up to the end of the run.

    Attributes:
        stream: maps positions to rows of the source.
        global_batch: rows per full step.
        length: positions in the whole run; only the last batch of a run counted in epochs may be short.
        groups: where the rows of a batch stand in it; None for their order.
    """

    stream: Stream
    global_batch: int
    length: int
    groups: LengthGroups | None = None
    capacity: None = field(default=None, init=False)  # rows are samples
    _near: list[tuple[int, Indices, Indices]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def create(
        cls,
        stream: Stream,
        global_batch: int,
        steps: int | None,
        epochs: float | None,
        groups: LengthGroups | None = None,
    ) -> StreamPlan:
        """The plan of a run counted in steps or in epochs."""
        if steps is not None:
            return cls(stream, global_batch, steps * global_batch, groups)
        assert epochs is not None
        length = round(epochs * stream.size)
        if length < 1:
            raise ConfigError(f"train.epochs={epochs} of {stream.size} rows is less than one row")
        return cls(stream, global_batch, length, groups)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.stream.seed

    @property
    def steps(self) -> int:
        """Steps in the whole run."""
        return -(-self.length // self.global_batch)

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step."""
        return min(self.global_batch, self.length - step * self.global_batch)

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The samples in these rows of the global batch of a step."""
        first, slots = step * self.global_batch, np.arange(rows.start, rows.stop, dtype=np.int64)
        if self.groups is None:
            return SampleIndices(slots, *self._lookup(first + rows.start, first + rows.stop))
        taken, epochs = self._lookup(first, first + self.rows(step))
        places = self.groups(taken)[slots]
        return SampleIndices(slots, taken[places], epochs[places])

    def cut(self, step: int, rows: int) -> list[range] | None:
        """The rows of each micro-batch of a step, of so many on average; None if all have as many."""
        if self.groups is None or self.groups.size is not None:
            return None
        length = self.rows(step)
        return cut_evenly(self.groups.lengths[self.batch(step)], -(-length // rows))

    def batch(self, step: int) -> Indices:  # -> (rows,)
        """Source rows of the global batch of a step, in order."""
        return self.samples(step, range(self.rows(step))).rows

    def _lookup(self, first: int, last: int) -> tuple[Indices, Indices]:
        """Rows and epochs at positions, computed in blocks and cached, since a thousand take little longer than one."""
        near = self._near[0] if self._near else None  # read once: another thread may replace it
        if near is None or not (near[0] <= first and last <= near[0] + len(near[1])):
            until = max(last, min(first + _LOOKAHEAD, self.length))
            near = (first, *self.stream.locate(np.arange(first, until, dtype=np.int64)))
            self._near[:] = [near]
        start, rows, epochs = near
        return rows[first - start : last - start], epochs[first - start : last - start]

    def state(self, step: int, rows: range) -> None:
        """None: the plan is a function of the step."""

    def resume(self, states: list[Any]) -> None:
        """Do nothing: there is no state."""


def rows_of_micro_batches(plan: Plan, split: BatchSplit, step: int, rank: int) -> Iterator[tuple[int, range, range]]:
    """Number and rows of each micro-batch of a process, and the rows to compute: those of another, where it has none.

    They are a function of the plan and the rows of a micro-batch, whatever process computes them.
    """
    length = plan.rows(step)
    cuts = plan.cut(step, split.micro_batch) if isinstance(plan, StreamPlan) else None
    first = split.rows(0, length) if cuts is None else cuts[0]
    for number in split.micro_batches(rank):
        if cuts is None:
            own = split.rows(number, length)
        else:
            own = cuts[number] if number < len(cuts) else range(length, length)
        yield number, own, own or first  # the batch's first micro-batch again, to avoid a new shape
