"""Mixtures with `data.mixture.grouped`: no micro-batch has rows of two sources, in training or in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from unisono.config.schema.run import RunConfig
from unisono.data.order.mixture import Joined, locate_rows
from unisono.data.order.order import Indices, Order
from unisono.data.order.plan import Plan, SampleIndices, Stream, StreamPlan
from unisono.task import Source


@dataclass(frozen=True)
class GroupedOrder:
    """Gives each source the same rows of every global batch, side by side; a `Stream`.

    So a micro-batch can hold rows of one source, and a row can keep a state that only its source has.

    Attributes:
        streams: of the sources.
        starts: the number of each source's first row, and finally the total number of rows.
        rows: of a global batch, of each source.
        seed: of the run.
        until: whether an epoch ends with the `first` source or with `all`.
    """

    streams: tuple[Stream, ...]
    starts: tuple[int, ...]
    rows: tuple[int, ...]
    seed: int
    until: str = "all"

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """Rows and epochs at these positions, from the streams of their sources."""
        own = np.asarray(self.rows, dtype=np.int64)
        ends = np.cumsum(own)
        steps, places = np.divmod(np.asarray(positions, dtype=np.int64), ends[-1])
        numbers = np.searchsorted(ends, places, side="right")
        return locate_rows(self.streams, self.starts, numbers, steps * own[numbers] + places - (ends - own)[numbers])

    @property
    def size(self) -> int:
        """Positions until the first source, or all sources, are exhausted."""
        begins, batch = np.cumsum(self.rows) - self.rows, sum(self.rows)
        ends: list[int] = []
        for stream, begin, own in zip(self.streams, begins.tolist(), self.rows, strict=True):
            if own:
                step, place = divmod(stream.size - 1, own)
                ends.append(step * batch + begin + place + 1)
        return min(ends) if self.until == "first" else max(ends)


@dataclass(frozen=True)
class GroupedPlan:
    """Rows once through, for an evaluation; a `Plan`.

    Attributes:
        batches: rows of the source in each step.
        global_batch: rows of a full step.
    """

    batches: tuple[Indices, ...]
    global_batch: int
    capacity: None = field(default=None, init=False)  # rows are samples
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps in the whole evaluation."""
        return len(self.batches)

    def rows(self, step: int) -> int:
        """Rows in the global batch of a step."""
        return len(self.batches[step])

    def samples(self, step: int, rows: range) -> SampleIndices:
        """The samples in these rows of the global batch of a step."""
        taken = self.batches[step][rows.start : rows.stop]
        return SampleIndices(np.arange(rows.start, rows.stop, dtype=np.int64), taken, np.zeros_like(taken))

    def state(self, step: int, rows: range) -> None:
        """None: the plan is a function of the step."""

    def resume(self, states: list[object]) -> None:
        """Do nothing: there is no state."""


def plan_evaluation(source: Source, config: RunConfig, batch: int, rows: int) -> Plan:
    """The plan of an evaluation: rows in order, or a random subset that is the same every time.

    Args:
        source: of the rows.
        config: of the run; in a mixture with groups, those of one source come after those of another.
        batch: rows of a step.
        rows: number of rows.
    """
    order = Order(len(source), seed=0, shuffle=rows < len(source))
    if config.data.mixture is None or not config.data.mixture.grouped:
        return StreamPlan(order, batch, rows)
    chosen = order(np.arange(rows, dtype=np.int64))
    ends = np.cumsum([0, *_sizes(source)])
    groups = [chosen[(begin <= chosen) & (chosen < end)] for begin, end in pairwise(ends)]
    cut = [group[first : first + batch] for group in groups for first in range(0, len(group), batch)]
    return GroupedPlan(tuple(cut), batch)


def _sizes(source: Source) -> Iterator[int]:
    """Rows of each source, of which some may be joined themselves."""
    if not isinstance(source, Joined):
        yield len(source)
        return
    for one in source.sources.values():
        yield from _sizes(one)
