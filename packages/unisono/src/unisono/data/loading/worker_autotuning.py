"""Chooses the number and kind of workers from a few measured rows, and warns when steps wait for data."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter, sleep

import numpy as np

from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.micro_batch import Request

_TARGET_SECONDS = 0.02  # seconds in which the micro-batches of a step should be ready; hardly any step is shorter
_PROBE_ROWS = 8  # rows of a micro-batch built to measure it
_MAX_LOCKED = 0.3  # fraction of the time in Python's lock above which more threads are of little use
REMOTE_WORKERS = 8  # workers for remote storage, which wait for an answer most of the time and need no core for it
_NAP = 2e-4  # seconds that the probe sleeps at a time
_WINDOW = 8  # steps averaged; the first is left out, which waits for the first rows on any host
_MAX_WAIT_SHARE, _REPEAT_AFTER = 0.1, 500  # fraction of waiting that is too much; steps between warnings


@dataclass(frozen=True)
class StageTimes:
    """The time to build a micro-batch on one core.

    Attributes:
        read: seconds in `source[row]`.
        sample: seconds in `Task.sample`.
        rest: seconds for cutting, packing and collating.
        locked: fraction of that time in which Python's global lock was held, blocking other threads.
    """

    read: float
    sample: float
    rest: float
    locked: float

    @property
    def total(self) -> float:
        """Total seconds."""
        return self.read + self.sample + self.rest

    @property
    def holds_lock(self) -> bool:
        """Whether more threads are of little use."""
        return self.locked > _MAX_LOCKED

    def __str__(self) -> str:
        parts = (("read", self.read), ("sample", self.sample), ("collate", self.rest))
        return " + ".join(f"{name} {1e3 * seconds:.2g}" for name, seconds in parts) + " ms a micro-batch"


def measure_stages(maker: BatchBuilder, request: Request, timeout: float = math.inf) -> StageTimes:
    """Build the first rows of a micro-batch, and extrapolate to all of them; all of them if one call builds them.

    Raises:
        TimeoutError: if that takes longer than so many seconds.
    """
    taken, few = request.samples, request.samples[: None if maker.together else _PROBE_ROWS]
    seconds = np.zeros(3)
    fault: list[BaseException] = []

    def make() -> None:
        try:
            made = maker.make(replace(request, samples=few)).info
            assert made is not None
            seconds[:] = made.seconds
        except BaseException as error:
            fault.append(error)

    locked = lock_share(make, timeout)
    if fault:
        raise fault[0]
    read, sample, rest = (seconds * len(taken) / max(1, len(few))).tolist()
    return StageTimes(read, sample, rest, locked)


def lock_share(act: Callable[[], None], timeout: float = math.inf) -> float:
    """The fraction of time in which an action holds Python's global lock.

    While it runs, this thread sleeps repeatedly, and wakes up late whenever the lock is held.

    Raises:
        TimeoutError: if it takes longer than so many seconds.
    """
    thread = threading.Thread(target=act, daemon=True)
    late, began = 0.0, perf_counter()
    thread.start()
    while thread.is_alive():
        asleep = perf_counter()
        sleep(_NAP)
        late += max(0.0, perf_counter() - asleep - 2 * _NAP)
        if perf_counter() - began > timeout:
            raise TimeoutError
    return min(1.0, late / (perf_counter() - began))


def choose_count(cores: int, seconds: float, waiting: int = 0) -> int:
    """The number of workers to have a step's micro-batches ready in time, leaving one core for training.

    Args:
        cores: of this process.
        seconds: time on one core for the micro-batches of a process in a step.
        waiting: how many may wait for remote storage at a time, for which they need no core.

    >>> [choose_count(*asked) for asked in ((8, 0.1), (8, 9.0), (8, 0.001), (1, 9.0))]
    [5, 7, 1, 1]
    >>> choose_count(1, 9.0, waiting=8)
    8
    """
    most = max(cores - 1, waiting)
    return max(1, min(most, math.ceil(seconds / _TARGET_SECONDS)))


def choose_kind(stages: StageTimes) -> str:
    """Threads if building a micro-batch releases Python's lock (as native decoders and features do), else processes.

    >>> choose_kind(StageTimes(1e-3, 1e-3, 0.1, locked=0.02)), choose_kind(StageTimes(1e-3, 0.1, 1e-3, locked=0.9))
    ('threads', 'processes')
    """
    return "processes" if stages.holds_lock else "threads"


class WaitMonitor:
    """Watches how long steps wait for data, and suggests what to change if it is too long.

    On a busy machine, steps also wait for batches that are quickly built, but by threads that get no core; no change of
    the loading helps there. So only that part of a wait counts which the building explains by the time that it takes
    without the time in which the builder had no core.

    Args:
        workers: number of workers of this process.
        kind: `threads` or `processes`.
        cores: number of cores per training process on this host.
    """

    def __init__(self, workers: int, kind: str, cores: int) -> None:
        self._workers, self._kind, self._cores = workers, kind, cores
        self._last: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._quiet, self._begun = 0, False

    def step(self, share: float, seconds: float, building: float, stages: Callable[[], StageTimes]) -> str | None:
        """The warning to show, if any, after a step.

        Args:
            share: of its time, spent waiting.
            seconds: that it took.
            building: seconds that the process's micro-batches of the step take on a core of their own.
            stages: where they go.
        """
        if not self._begun:
            self._begun = True
            return None
        explained = min(share * seconds, building / min(self._workers, max(1, self._cores)))
        self._last.append((share, explained, seconds))
        self._quiet -= 1
        mean, explained, seconds = (sum(values) / _WINDOW for values in zip(*self._last, strict=True))
        if len(self._last) < _WINDOW or self._quiet > 0 or min(mean, explained / max(seconds, 1e-9)) < _MAX_WAIT_SHARE:
            return None
        self._quiet = _REPEAT_AFTER
        return f"steps wait for data for {100 * mean:.0f} % of their time; {self._advice(stages())}"

    def _advice(self, stages: StageTimes) -> str:
        more = min(2 * self._workers, max(1, self._cores - 1))
        if self._kind == "threads" and stages.locked > 0.5 and stages.sample + stages.rest > stages.read:
            return (
                f"building batches holds Python's lock for {100 * stages.locked:.0f} % of the time ({stages}), so more "
                "threads do not help: set data.worker_kind=processes, or prepare the data in advance"
            )
        if more > self._workers:
            return f"{stages}: set data.workers={more} (now {self._workers} {self._kind}), or data.workers=auto"
        if stages.read > stages.sample + stages.rest:
            return f"{stages}: reading takes longest; set data.workers={2 * self._workers}, or use faster storage"
        return f"{stages}, and all cores are in use: prepare the data in advance, or make sample() and collate() faster"
