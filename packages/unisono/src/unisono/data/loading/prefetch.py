"""Requests the next micro-batches in a separate thread, so that the training thread never waits for planning."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

_PATIENCE = 5.0  # seconds to wait for the thread to end

Requested = TypeVar("Requested")
Result = TypeVar("Result")


class Prefetcher(Generic[Requested, Result]):
    """Submits requests ahead of their use, up to a bound, and returns the results in order.

    Args:
        requests: the requests; iterated in the thread.
        ask: submits a request.
        ahead: how many requests to submit besides the one being waited for; at least one.
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
        """The next result.

        Raises:
            TimeoutError: if it is not available within `timeout` seconds.
            BaseException: from submitting or processing the request.
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

    def close(self) -> None:
        """Cancel pending requests and stop the thread."""
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
            raise IndexError("all requests have been consumed")
        except BaseException as error:
            with self._change:
                self._fault = error
                self._change.notify()
