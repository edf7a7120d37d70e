"""Random numbers are addressed: every draw is keyed by its purpose, never by the process that draws.

A key is the SHA-256 of a JSON address such as `[seed, "dropout", step, micro_batch]`, cut to 63 bits. Rank, worker and
wall clock are never part of an address, so no layout can change a draw.

`Generators` are those of many addresses at once. NumPy has no call for that, and creating or reseeding a generator for
each row takes longer than what is drawn from it; so Philox, a pure function of key and counter, is computed here for
all rows together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011): Philox4x64 with ten rounds.
_MULTIPLIERS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], dtype=np.uint64)
_WEYL = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], dtype=np.uint64)
_ROUNDS = 10
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def key(*address: int | str) -> int:
    """Return a 63-bit seed for an address.

    >>> key(0, "dropout", 3, 1) == key(0, "dropout", 3, 1)
    True
    >>> key(0, "dropout", 3, 1) == key(0, "dropout", 31)
    False
    """
    digest = hashlib.sha256(json.dumps(address).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*address: int | str) -> np.random.Generator:
    """Return a NumPy generator (Philox, counter-based) keyed by an address."""
    return np.random.Generator(np.random.Philox(key=key(*address)))


def generators(*address: int | str, rows: Sequence[Sequence[int]] | NDArray[np.int64]) -> Generators:
    """Return the generators of many addresses that begin alike.

    >>> many = generators(0, "augmentation", rows=[[3, 1], [3, 2]])
    >>> bool((many.random(5)[1] == generator(0, "augmentation", 3, 2).random(5)).all())
    True

    Args:
        address: how all of them begin.
        rows: how each goes on, (rows, integers).
    """
    begin = json.dumps(address)[:-1] + (", " if address else "")
    ends = rows.tolist() if isinstance(rows, np.ndarray) else [list(row) for row in rows]
    sha256 = hashlib.sha256
    # The text of a list of integers is its JSON.
    digests = b"".join([sha256(f"{begin}{str(end)[1:]}".encode()).digest()[:8] for end in ends])
    return Generators(np.frombuffer(digests, dtype=">u8").astype(np.uint64) >> np.uint64(1))


@dataclass(frozen=True)
class Generators:
    """A generator for each of many rows.

    Attributes:
        keys: of each, (rows,).
    """

    keys: Words

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, row: int) -> np.random.Generator:
        """The generator of a row, from its beginning."""
        return np.random.Generator(np.random.Philox(key=int(self.keys[row])))

    def __iter__(self) -> Iterator[np.random.Generator]:
        return (self[row] for row in range(len(self)))

    def random(self, count: int) -> NDArray[np.float64]:
        """The first `count` numbers from 0 to 1 of each, as its `random(count)` returns them, (rows, count)."""
        blocks = -(-count // 4)
        words = _philox(np.repeat(self.keys, blocks), np.tile(np.arange(1, blocks + 1, dtype=np.uint64), len(self)))
        numbers: NDArray[np.float64] = (words >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
        return numbers.reshape(len(self), 4 * blocks)[:, :count]


def _philox(keys: Words, counters: Words) -> Words:
    """A block of each pair of a key and a counter, both below 2^64: (n,), (n,) -> (n, 4)."""
    size = len(keys)
    even = np.stack([counters, np.zeros(size, dtype=np.uint64)])  # words 0 and 2, which are multiplied
    odd = np.zeros((2, size), dtype=np.uint64)  # words 1 and 3
    pair = np.stack([keys, np.zeros(size, dtype=np.uint64)])
    factors = _MULTIPLIERS[:, None]
    low_factors, high_factors = factors & _LOW, factors >> _HALF
    with np.errstate(over="ignore"):
        for _ in range(_ROUNDS):
            low, high = even & _LOW, even >> _HALF
            middle = high * low_factors + ((low * low_factors) >> _HALF)
            other = low * high_factors + (middle & _LOW)
            upper = high * high_factors + (middle >> _HALF) + (other >> _HALF)
            even, odd = upper[::-1] ^ odd ^ pair, (even * factors)[::-1]
            pair = pair + _WEYL[:, None]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)
