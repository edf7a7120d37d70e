"""Requests the next micro-batches in a thread of its own, so that the training thread never waits for planning."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

_PATIENCE = 5.0  # seconds for the thread to end

Requested = TypeVar("Requested")
Result = TypeVar("Result")


class Prefetcher(Generic[Requested, Result]):
    """What was asked for, in order, a bounded number ahead.

    Args:
        requests: what to ask for. They are drawn in the thread.
        ask: for one of them.
        ahead: how many to ask for besides the one that is waited for; at least one is.
    """

    def __init__(
        self, requests: Iterator[Requested], ask: Callable[[Requested], Future[Result]], ahead: Callable[[], int]
    ) -> None:
        self._requests, self._ask, self._ahead = requests, ask, ahead
        self._waiting: deque[Future[Result]] = deque()
        self._change = threading.Condition()
        self._closed = False
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="unisono-feed", daemon=True)
        self._thread.start()

    def next(self, timeout: float) -> Result:
        """What was asked for next.

        Raises:
            TimeoutError: if it does not come in so many seconds.
            BaseException: what asking or making it ended in.
        """
        with self._change:
            if not self._change.wait_for(lambda: self._waiting or self._fault, timeout):
                raise TimeoutError
            if not self._waiting:
                assert self._fault is not None
                raise self._fault
            future = self._waiting.popleft()
            self._change.notify()
        return future.result(timeout)

    @property
    def queue_state(self) -> tuple[int, int]:
        """How many are ready, and how many were asked for."""
        with self._change:
            return sum(future.done() for future in self._waiting), len(self._waiting)

    def close(self) -> None:
        """Ask for no more."""
        with self._change:
            self._closed = True
            for future in self._waiting:
                future.cancel()
            self._change.notify()
        self._thread.join(_PATIENCE)

    def _run(self) -> None:
        try:
            for request in self._requests:
                with self._change:
                    self._change.wait_for(lambda: self._closed or len(self._waiting) < max(1, self._ahead()))
                    if self._closed:
                        return
                    self._waiting.append(self._ask(request))
                    self._change.notify()
            raise IndexError("there is nothing more to ask for")
        except BaseException as error:
            with self._change:
                self._fault = error
                self._change.notify()
