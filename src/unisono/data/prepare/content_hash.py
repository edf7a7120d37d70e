"""A hash of rows that does not depend on their division into shards."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.rng import key

_PRIME = (1 << 127) - 1
_BASE = key("content of a row")

Units = NDArray[Any]  # unsigned integers, (n,)
Lengths = NDArray[np.int64]


class ContentHash:
    """An order-dependent hash of rows that can be combined from parts: the hashes of rows are the digits of a number.

    `H(a + b) = H(a) · base^rows(b) + H(b)` modulo a prime, so shards can be hashed in parallel.
    """

    def __init__(self) -> None:
        self.rows, self._number = 0, 0

    @classmethod
    def combine(cls, entries: Sequence[Mapping[str, Any]]) -> ContentHash:
        """The hash of concatenated shards, from their manifest entries."""
        whole = cls()
        for entry in entries:
            whole._number = (whole._number * pow(_BASE, entry["rows"], _PRIME) + int(entry["content"], 16)) % _PRIME
            whole.rows += entry["rows"]
        return whole

    def add(self, values: Units, lengths: Lengths) -> None:
        """Add rows: their units, (n,), and lengths, (rows,)."""
        data, size, begin, number = values.data.cast("B"), values.itemsize, 0, self._number
        for end in (np.cumsum(lengths) * size).tolist():
            digit = int.from_bytes(hashlib.blake2b(data[begin:end], digest_size=16).digest(), "little")
            number, begin = (number * _BASE + digit) % _PRIME, end
        self._number = number
        self.rows += len(lengths)

    @property
    def hex(self) -> str:
        """The hash as 32 hexadecimal digits."""
        return f"{self._number:032x}"
