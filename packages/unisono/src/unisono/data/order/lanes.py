"""Lanes: parts of the order that are each read sequentially by one process.

In every round over all lanes, each lane has a fixed number of consecutive positions. The number of lanes does not
depend on the world size, so any world size that divides it can continue the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unisono.config.batch_split import divisors
from unisono.data.order.order import Indices
from unisono.runtime.errors import ConfigError

_MAX_LANES = 64  # by default; also the largest world size that can continue the order


@dataclass(frozen=True)
class Lanes:
    """How positions are dealt to lanes: `stretch` to the first, as many to the second, and so on, round after round.

    A single lane has all positions, in order.

    Attributes:
        count: number of lanes.
        stretch: consecutive positions of a lane: its rows of a global batch, or the samples of a chunk.
    """

    count: int = 1
    stretch: int = 1

    def __call__(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """The lane of each position, and the position within the lane.

        >>> Lanes(count=2, stretch=3)(np.arange(8))
        (array([0, 0, 0, 1, 1, 1, 0, 0]), array([0, 1, 2, 0, 1, 2, 3, 4]))
        """
        rounds, inside = np.divmod(np.asarray(positions, dtype=np.int64), self.count * self.stretch)
        lane, offset = np.divmod(inside, self.stretch)
        return lane, rounds * self.stretch + offset

    def positions(self, lane: Indices, place: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """The global positions of positions within lanes: the inverse of calling it."""
        rounds, offset = np.divmod(place, self.stretch)
        return (rounds * self.count + lane) * self.stretch + offset


SINGLE_LANE = Lanes()


def resolve_lane_count(configured: int | None, global_batch: int, world_size: int, blocks: int | None = None) -> int:
    """The number of lanes.

    Args:
        configured: `data.lanes`.
        global_batch: number of rows, of which each lane has an equal share.
        world_size: number of processes, each of which has whole lanes.
        blocks: number of blocks of the largest source; None if lanes do not read blocks.

    Raises:
        ConfigError: with the possible numbers.
    """
    most = min(_MAX_LANES, blocks or _MAX_LANES)
    lanes = configured or next(number for number in range(most, 0, -1) if global_batch % number == 0)
    if global_batch % lanes:
        raise ConfigError(
            f"data.lanes={lanes} does not divide train.global_batch={global_batch}, and each lane has an equal share "
            f"of it. These numbers do: {divisors(global_batch)}"
        )
    if blocks is not None and lanes > blocks:
        raise ConfigError(
            f"data.lanes={lanes}, but there are {blocks} blocks to read: some lanes would have none. Use one of "
            f"{[n for n in divisors(global_batch) if n <= blocks]}, or data.shuffle=full; for prepared data, "
            f"`unisono data reshard DIR shards={lanes} out=DIR2` creates at least {lanes} blocks"
        )
    if lanes % world_size:
        others = [n for n in divisors(global_batch) if n % world_size == 0 and (blocks is None or n <= blocks)]
        raise ConfigError(
            f"layout.world_size={world_size} does not divide the {lanes} lanes (data.lanes), and a lane is read by one "
            f"process. These world sizes do: {divisors(lanes)}"
            + (f"; or, for a new run, data.lanes={' or '.join(map(str, others))}" if others else "")
            + (
                f"; or, since there are only {blocks} blocks, split prepared data with `unisono data reshard DIR "
                f"shards={world_size} out=DIR2`"
                if blocks is not None and blocks < world_size
                else ""
            )
        )
    return lanes


def group_equal(numbers: Indices) -> Iterator[Indices]:  # (n,) -> (k,) each
    """The indices of each distinct number, the smallest number first."""
    if len(numbers) and (numbers == numbers[0]).all():  # the common case
        yield np.arange(len(numbers))
        return
    order = np.argsort(numbers, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else []
