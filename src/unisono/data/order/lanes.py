"""Lanes: parts of the order that are read one after the other, each by one process, whichever that is.

A lane has a fixed stretch of consecutive positions in every round of all lanes. Their number does not depend on the
world size, so every world size that divides it continues the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unisono.config.batch_split import divisors
from unisono.data.order.order import Indices
from unisono.runtime.errors import ConfigError

_MAX_LANES = 64  # where nobody says: as many processes as share an order


@dataclass(frozen=True)
class Lanes:
    """How positions are dealt to lanes: `stretch` to the first, as many to the second, and so on, round after round.

    One lane has all positions, in their order.

    Attributes:
        count: lanes.
        stretch: consecutive positions of a lane: the rows that it has of a global batch, or the samples of a chunk.
    """

    count: int = 1
    stretch: int = 1

    def __call__(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """The lane of each position, and its place in it.

        >>> Lanes(count=2, stretch=3)(np.arange(8))
        (array([0, 0, 0, 1, 1, 1, 0, 0]), array([0, 1, 2, 0, 1, 2, 3, 4]))
        """
        rounds, inside = np.divmod(np.asarray(positions, dtype=np.int64), self.count * self.stretch)
        lane, offset = np.divmod(inside, self.stretch)
        return lane, rounds * self.stretch + offset

    def positions(self, lane: Indices, place: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Where these places of these lanes stand: the inverse."""
        rounds, offset = np.divmod(place, self.stretch)
        return (rounds * self.count + lane) * self.stretch + offset


SINGLE_LANE = Lanes()


def resolve_lane_count(asked: int | None, global_batch: int, world_size: int, blocks: int | None = None) -> int:
    """The number of lanes.

    Args:
        asked: `data.lanes`.
        global_batch: rows, of which each lane has an equal part.
        world_size: processes, each of which has whole lanes.
        blocks: what there is to deal to them, of the largest source; None where that is not what they are for.

    Raises:
        ConfigError: with the numbers that can be had.
    """
    most = min(_MAX_LANES, blocks or _MAX_LANES)
    lanes = asked or next(number for number in range(most, 0, -1) if global_batch % number == 0)
    if global_batch % lanes:
        raise ConfigError(
            f"data.lanes={lanes} does not divide train.global_batch={global_batch}, and each lane has an equal part of "
            f"it. These numbers do: {divisors(global_batch)}"
        )
    if blocks is not None and lanes > blocks:
        raise ConfigError(
            f"data.lanes={lanes}, but there are {blocks} blocks to read: some lanes would have none. Use one of "
            f"{[n for n in divisors(global_batch) if n <= blocks]}, or data.shuffle=full; of prepared data, "
            f"`unisono data reshard DIR shards={lanes} out=DIR2` makes {lanes} blocks and more"
        )
    if lanes % world_size:
        others = [n for n in divisors(global_batch) if n % world_size == 0 and (blocks is None or n <= blocks)]
        raise ConfigError(
            f"layout.world_size={world_size} does not divide the {lanes} lanes (data.lanes), and a lane is read by one "
            f"process. These world sizes do: {divisors(lanes)}"
            + (f"; or, for a new run, data.lanes={' or '.join(map(str, others))}" if others else "")
            + (
                f"; or, as there are but {blocks} blocks to deal to them, of prepared data `unisono data reshard DIR "
                f"shards={world_size} out=DIR2`"
                if blocks is not None and blocks < world_size
                else ""
            )
        )
    return lanes


def group_equal(numbers: Indices) -> Iterator[Indices]:  # (n,) -> (k,) each
    """The places at which each of the numbers stands, the smallest number first."""
    if len(numbers) and (numbers == numbers[0]).all():  # mostly
        yield np.arange(len(numbers))
        return
    order = np.argsort(numbers, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
