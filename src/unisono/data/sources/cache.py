"""A cache of the most recently used things (blocks, open files), bounded by their memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class LruCache(Generic[T]):
    """Least recently used goes first. Threads that want the same thing wait for one of them to make it.

    Args:
        budget: of the weights of what is kept; the last ones stay whatever they weigh.
        least: how many stay whatever they weigh.
        weigh: the weight of one.
    """

    def __init__(self, budget: float, least: int = 1, weigh: Callable[[T], float] = lambda _: 1.0) -> None:
        self.least = least
        self._budget, self._weigh, self._lock = budget, weigh, threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[T, float]] = OrderedDict()
        self._making: dict[Hashable, Future[T]] = {}
        self._weight = 0.0

    def get(self, name: Hashable, make: Callable[[], T]) -> T:
        """What has this name, made now if it is not there."""
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
            made = make()
        except BaseException as error:
            with self._lock:
                del self._making[name]
            promised.set_exception(error)
            raise
        weight = self._weigh(made)
        with self._lock:
            del self._making[name]
            self._kept[name] = (made, weight)
            self._weight += weight
            while self._weight > self._budget and len(self._kept) > self.least:
                self._weight -= self._kept.popitem(last=False)[1][1]
        promised.set_result(made)
        return made

    def __len__(self) -> int:
        return len(self._kept)
