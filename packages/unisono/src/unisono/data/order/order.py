"""The order of samples: a pure function from position to row.

Ranks, workers and prefetch depth are not arguments, so they cannot change the order, and resuming only needs an offset.
`Order` can also be used on its own, in a plain training loop:

>>> order = Order(size=10, seed=0)
>>> sorted(order(np.arange(10)).tolist())
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
>>> bool((order(np.arange(10, 20)) == order(np.arange(10))).all())  # the second epoch has its own order
False
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.errors import DataError
from unisono.runtime.rng import key

Indices = NDArray[np.int64]
_ROUNDS = 8


@dataclass(frozen=True)
class Shuffle:
    """A keyed permutation of `0..size-1` that needs no memory.

    Eight Feistel rounds over the next even power of two, with cycle walking back into range (Black & Rogaway, "Ciphers
    with arbitrary finite domains", 2002). Every element takes the same time.
    """

    size: int
    key: int

    def __call__(self, index: Indices) -> Indices:  # (n,) -> (n,)
        """The elements at these indices, which must be in `0..size-1`."""
        return apply_shuffles(index, np.zeros(np.shape(index), dtype=np.int64), [self])

    @property
    def half(self) -> int:
        """Half the bits of the power of two."""
        return max(1, (max(self.size - 1, 1).bit_length() + 1) // 2)


def apply_shuffles(index: Indices, which: Indices, shuffles: Sequence[Shuffle]) -> Indices:  # (n,), (n,) -> (n,)
    """The elements at these indices, each in the permutation selected by `which`, computed in one pass."""
    keys = np.array([_round_keys(shuffle.key) for shuffle in shuffles], dtype=np.uint64)  # (permutations, rounds)
    half = np.array([shuffle.half for shuffle in shuffles], dtype=np.uint64)
    size = np.array([shuffle.size for shuffle in shuffles], dtype=np.uint64)
    result = np.array(index, dtype=np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        one = which[walking] if len(shuffles) > 1 else slice(None)  # a scalar, if there is only one
        bits, value = half[one], result[walking]
        mask = (np.uint64(1) << bits) - np.uint64(1)
        left, right = value >> bits, value & mask
        for number in range(_ROUNDS):
            left, right = right, left ^ (mix_bits(right ^ keys[one, number]) & mask)
        value = (left << bits) | right
        result[walking] = value
        walking = walking[value >= size[one]]
    return result.astype(np.int64)


@lru_cache(maxsize=4096)
def _round_keys(address: int) -> tuple[int, ...]:
    return tuple(key(address, "round", number) for number in range(_ROUNDS))


def mix_bits(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, 2014): every input bit reaches every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """Maps positions `0, 1, 2, …` of a run to rows of a source, epoch after epoch, each epoch in its own order.

    Attributes:
        size: number of rows in the source.
        seed: of the run.
        shuffle: False to keep the source's order, as in evaluation.
    """

    size: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the source has no rows")

    def __call__(self, positions: Indices) -> Indices:  # (n,) -> (n,)
        """Rows at these positions."""
        positions = np.asarray(positions, dtype=np.int64)
        places = positions % self.size
        if not self.shuffle:
            return places
        epochs, which = np.unique(self.epochs(positions), return_inverse=True)  # usually one or two
        addresses = [key(self.seed, "shuffle", epoch) for epoch in epochs.tolist()]
        return apply_shuffles(places, which.reshape(-1), [Shuffle(self.size, address) for address in addresses])

    def epochs(self, positions: Indices) -> Indices:  # (n,) -> (n,)
        """Number of complete passes over the source before these positions."""
        return np.asarray(positions, dtype=np.int64) // self.size

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:  # (n,) -> (n,), (n,)
        """Rows and epochs at these positions."""
        return self(positions), self.epochs(positions)
