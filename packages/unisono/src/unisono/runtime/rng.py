"""Random numbers are addressed: every draw is keyed by its purpose, never by the process that draws.

A key is the SHA-256 of a JSON address such as `[seed, "dropout", step, micro_batch]`, cut to 63 bits. Rank, worker and
wall clock are never part of an address, so no layout can change a draw.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np


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
