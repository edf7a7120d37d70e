"""How a global batch is split into micro-batches, and these among processes.

Global micro-batch *k* is rows `[k·m, (k+1)·m)` of the global batch, whichever process computes it; process *r* owns a
contiguous range of micro-batches. A short last batch keeps the same owners: those without rows are idle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError


@dataclass(frozen=True)
class BatchSplit:
    """A split of a global batch.

    Attributes:
        global_batch: Rows of a full global batch, a multiple of `world_size · micro_batch`.
        world_size: Number of processes.
        micro_batch: Rows of a full micro-batch.
        devices: Devices per process that compute micro-batches at the same time.
    """

    global_batch: int
    world_size: int
    micro_batch: int
    devices: int = 1

    @classmethod
    def create(
        cls,
        global_batch: int,
        world_size: int,
        micro_batch: int | str | None,
        devices: int = 1,
        of_sources: Sequence[int] = (),
    ) -> BatchSplit:
        """Create a split, or raise an error that lists valid numbers.

        `micro_batch=None` gives each device all its rows at once, and so does `auto` until it is resolved; of a mixture
        with groups (`of_sources`, from `rows_of_sources`), as many as leave no micro-batch with rows of two sources.
        """
        micro_batch = micro_batch if isinstance(micro_batch, int) else None
        if world_size > global_batch:
            raise ConfigError(
                f"layout.world_size={world_size} is more than the {global_batch} rows of train.global_batch: some "
                f"processes would get no row. Use at most {global_batch} processes or a larger global batch."
            )
        if global_batch % world_size:
            raise ConfigError(
                f"train.global_batch={global_batch} cannot be split evenly over layout.world_size={world_size} "
                f"processes. These world sizes can: {divisors(global_batch)}; or these global batches: "
                f"{_nearest_multiples(global_batch, world_size)}."
            )
        who, count = ("processes", world_size) if devices == 1 else ("devices", world_size * devices)
        if global_batch % count:
            raise ConfigError(
                f"train.global_batch={global_batch} cannot be split evenly over {world_size} × {devices} devices "
                "(layout.world_size × layout.devices); these global batches can: "
                f"{_nearest_multiples(global_batch, count)}."
            )
        rows = global_batch // count
        largest = math.gcd(rows, *of_sources)
        micro_batch = micro_batch or largest
        if largest % micro_batch and not rows % micro_batch:
            raise ConfigError(
                f"layout.micro_batch={micro_batch} would put rows of two sources into a micro-batch: with "
                f"data.mixture.grouped they have {', '.join(map(str, of_sources))} rows of each global batch. These "
                f"micro-batches do not: {divisors(largest)}."
            )
        if rows % micro_batch:
            raise ConfigError(
                f"layout.micro_batch={micro_batch} does not divide the {rows} rows that each of {count} {who} "
                f"has of train.global_batch={global_batch}. These micro-batches do: {divisors(rows)}; or these global "
                f"batches: {_nearest_multiples(global_batch, count * micro_batch)}."
            )
        return cls(global_batch, world_size, micro_batch, devices)

    @property
    def passes(self) -> int:
        """Micro-batches per process and step, including idle ones; a device computes `passes / devices` of them."""
        return self.global_batch // (self.world_size * self.micro_batch)

    def micro_batches(self, rank: int) -> range:
        """Return the numbers of the global micro-batches that a process owns.

        >>> BatchSplit(global_batch=12, world_size=2, micro_batch=2).micro_batches(1)
        range(3, 6)
        """
        return range(rank * self.passes, (rank + 1) * self.passes)

    def rows_of(self, rank: int) -> range:
        """Return the rows of a full global batch that a process owns.

        >>> BatchSplit(global_batch=12, world_size=2, micro_batch=2).rows_of(1)
        range(6, 12)
        """
        rows = self.passes * self.micro_batch
        return range(rank * rows, (rank + 1) * rows)

    def rows(self, micro_batch: int, length: int) -> range:
        """Return the rows of a micro-batch in a global batch of `length` rows; empty if a short batch lacks them.

        >>> BatchSplit(global_batch=12, world_size=2, micro_batch=4).rows(2, length=10)
        range(8, 10)
        """
        first = micro_batch * self.micro_batch
        return range(min(first, length), min(first + self.micro_batch, length))


def resolve_split(config: RunConfig) -> BatchSplit:
    """Return the split of a run's global batch, from its concrete layout; its micro-batch may be undecided.

    Raises:
        ConfigError: As for `BatchSplit.create`.
    """
    layout = config.layout
    assert isinstance(layout.world_size, int)
    of_sources = rows_of_sources(config, config.train.global_batch)
    return BatchSplit.create(
        config.train.global_batch, layout.world_size, layout.micro_batch, layout.devices_each, of_sources
    )


def rows_of_sources(config: RunConfig, global_batch: int) -> list[int]:
    """Return the rows that each source has of every global batch with `data.mixture.grouped`, by name; else nothing.

    Raises:
        ConfigError: If the weights do not divide the global batch.
    """
    mixture = config.data.mixture
    if mixture is None or not mixture.grouped:
        return []
    weights = [Fraction(str(weight)) for _, weight in sorted(mixture.weights.items())]  # as written: 0.1 is a tenth
    shares = [weight * global_batch / sum(weights) for weight in weights]
    if any(share.denominator > 1 for share in shares):
        least = math.lcm(*((weight / sum(weights)).denominator for weight in weights))
        raise ConfigError(
            f"train.global_batch={global_batch} cannot be divided into whole rows by data.mixture.weights, as "
            f"data.mixture.grouped asks; these global batches can: {_nearest_multiples(global_batch, least)}"
        )
    return [int(share) for share in shares]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest_multiples(number: int, step: int) -> list[int]:
    below = number // step * step
    return [n for n in (below, below + step) if n > 0]
