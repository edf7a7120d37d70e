"""Caches samples that were built to measure their lengths for packing, until their micro-batch is built."""

from __future__ import annotations

import threading
from typing import Any

from unisono.data.loading import checksum

Key = tuple[int, int]  # row of the source, and epoch


class SampleCache:
    """A bounded cache of samples; the oldest are dropped first. Threads may share it.

    Args:
        capacity: in bytes; larger samples are not cached.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._samples: dict[Key, tuple[int, Any]] = {}
        self._lock = threading.Lock()

    def put(self, key: Key, sample: Any) -> None:
        """Cache a sample, evicting older ones if necessary."""
        needed = checksum.byte_size(sample)
        if needed > self._capacity:
            return
        with self._lock:
            self._drop(key)
            while self._used + needed > self._capacity:
                self._drop(next(iter(self._samples)))
            self._samples[key] = (needed, sample)
            self._used += needed

    def peek(self, key: Key) -> Any:
        """The sample, or None. It stays in the cache, since another piece of it may be needed."""
        return self._samples.get(key, (0, None))[1]

    def pop(self, key: Key) -> Any:
        """Remove and return the sample, or None."""
        if not self._samples:
            return None
        with self._lock:
            return self._drop(key)

    def _drop(self, key: Key) -> Any:
        size, sample = self._samples.pop(key, (0, None))
        self._used -= size
        return sample
