"""A cache of the most recently used objects (blocks, open files, samples), bounded by their memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """A thread-safe LRU cache. If several threads need the same entry, one creates it and the others wait.

    Args:
        budget: limit of the total weight.
        least: number of entries that are kept whatever their weight.
        weigh: the weight of an entry.
    """

    def __init__(self, budget: float, least: int = 1, weigh: Callable[[T], float] = lambda _: 1.0) -> None:
        self.least = least
        self._budget, self._weigh, self._lock = budget, weigh, threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[T, float]] = OrderedDict()
        self._making: dict[Hashable, Future[T]] = {}
        self._weight = 0.0

    def get(self, name: Hashable, make: Callable[[], T]) -> T:
        """The entry with this name, created by `make` if it is not cached."""
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name][0]
            waited = self._making.get(name)
            if waited is None:
                promised: Future[T] = Future()
                self._making[name] = promised
        if waited is not None:
            return waited.result()
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._making[name]
            promised.set_exception(error)
            raise
        weight = self._weigh(value)
        with self._lock:
            del self._making[name]
            self._kept[name] = (value, weight)
            self._weight += weight
            while self._weight > self._budget and len(self._kept) > self.least:
                self._weight -= self._kept.popitem(last=False)[1][1]
        promised.set_result(value)
        return value

    def peek(self, name: Hashable) -> T | None:
        """The entry with this name, or None; it does not count as a use."""
        return self._kept[name][0] if name in self._kept else None

    def pop(self, name: Hashable) -> T | None:
        """Remove and return the entry with this name, or None."""
        with self._lock:
            value, weight = self._kept.pop(name, (None, 0.0))
            self._weight -= weight
        return value

    def __len__(self) -> int:
        return len(self._kept)
