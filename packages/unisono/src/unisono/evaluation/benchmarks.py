"""Benchmarks: what an evaluation measures beside held-out rows, by asking the model in training.

Rank 0 alone runs a benchmark, so that the libraries, downloads and programs of others exist once. Whenever it asks the
model, every process computes a share of the rows, so any layout can answer. Batches do not depend on the number of
processes, so the answers do not either. Meanwhile the benchmark has a thread of its own: the process itself reports
once a second that it is alive, and ends a benchmark that has asked nothing, or an environment that has not ended, until
its deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from unisono.protocols import Benchmark, ReadOutputs, WeightsBenchmark
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Channel, Json
from unisono.runtime.communication.consensus import raise_everywhere, share_first
from unisono.runtime.errors import DeadlineError
from unisono.runtime.files import remove_folder

_SIGN_OF_LIFE = 1.0  # seconds between two


class EvaluationInterruptedError(Exception):
    """A benchmark was given up because the run has to end; raised on all ranks at the same point."""


def run_benchmark(
    benchmark: Benchmark,
    channel: Channel,
    read_outputs: ReadOutputs,
    *,
    batch: int,
    deadline: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    leaving: Callable[[], bool] = lambda: False,
    asks: bool = True,
) -> dict[str, float]:
    """The values of a benchmark, on every rank; collective.

    Args:
        benchmark: the same on every rank.
        channel: of all processes.
        read_outputs: as of `RunInfo`.
        batch: rows that are computed together.
        deadline: seconds without a question after which the benchmark is given up.
        progress: is given the rows of a question that are answered, and those in all.
        leaving: whether this process has to end.
        asks: whether it asks anything; otherwise `deadline` is that of the whole benchmark.

    Raises:
        EvaluationInterruptedError: on every rank, if one of them has to end.
        DeadlineError: on every rank, if the benchmark asks nothing until its deadline.
        UnisonoError: of the benchmark.
    """
    leader = _Leader(benchmark, batch * channel.size, deadline, asks) if channel.rank == 0 else None
    try:
        while True:
            with heartbeat.phase("evaluate", benchmark.name):
                event = raise_everywhere(channel, leader.next_event if leader else None, benchmark.name)[0]
            if any(channel.gather(leaving(), "whether the run has to end")):
                raise EvaluationInterruptedError
            if "values" in event:
                return dict(event["values"])
            rows = event.get("rows")
            if not rows:
                continue
            progress(event["done"], event["total"])
            # A process without rows computes the last ones again: all make as many passes.
            first = min(channel.rank, (len(rows) - 1) // batch) * batch
            own = rows[first : first + batch]
            answers = raise_everywhere(channel, partial(benchmark.answer, own, read_outputs), benchmark.name)
            if leader is not None:
                shares = answers[: -(-len(rows) // batch)]
                leader.answers.put([one for share in shares for one in share])
    finally:
        if leader is not None:
            leader.answers.put(None)  # a benchmark that still waits ends


def run_on_weights(
    benchmark: WeightsBenchmark,
    channel: Channel,
    write: Callable[[Path], Path],
    folder: Path,
    *,
    deadline: float,
    leaving: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """The values of a benchmark that loads the model, on every rank; collective.

    Args:
        benchmark: the same on every rank.
        channel: of all processes.
        write: writes the weights into a new folder, all processes together, and returns where in it they are.
        folder: for the time of the benchmark; what an earlier start has left there is removed.
        deadline: seconds after which the benchmark is given up.
        leaving: whether this process has to end.

    Raises:
        EvaluationInterruptedError: on every rank, if one of them has to end.
        DeadlineError: on every rank, if the benchmark has not ended by then.
        UnisonoError: of the benchmark, or where the weights cannot be written.
    """

    def begin() -> None:
        remove_folder(folder)
        folder.mkdir()

    share_first(channel, begin, f"a folder for {benchmark.name}")
    try:
        with heartbeat.phase("evaluate", f"the weights for {benchmark.name}"):
            weights = write(folder)
        asked = _OnWeights(benchmark, weights)
        try:
            return run_benchmark(asked, channel, _asks_nothing, batch=1, deadline=deadline, leaving=leaving, asks=False)
        finally:
            if channel.rank == 0:
                benchmark.stop()
    finally:
        if channel.rank == 0:
            remove_folder(folder)


class _OnWeights:
    """A benchmark that loads the model, as one that asks it nothing."""

    def __init__(self, benchmark: WeightsBenchmark, weights: Path) -> None:
        self.name, self.prefix = benchmark.name, benchmark.prefix
        self._benchmark, self._weights = benchmark, weights

    def measure(self, ask: object) -> Mapping[str, float]:
        return self._benchmark.measure_folder(self._weights)

    def answer(self, rows: object, read_outputs: object) -> list[Json]:
        raise AssertionError("it asks nothing")


def _asks_nothing(samples: object, read: object) -> None:
    raise AssertionError("it asks nothing")


class _Leader:
    """The thread in which rank 0 runs a benchmark.

    Attributes:
        answers: to each question, one per row; None if there will be none.
    """

    def __init__(self, benchmark: Benchmark, rows_together: int, deadline: float, asks: bool) -> None:
        self._benchmark, self._rows_together, self._deadline = benchmark, rows_together, deadline
        self._asks = asks
        self.answers: queue.SimpleQueue[list[Json] | None] = queue.SimpleQueue()
        self._events: queue.SimpleQueue[dict[str, Json] | Exception] = queue.SimpleQueue()
        self._last = time.monotonic()
        threading.Thread(target=self._run, name=benchmark.name, daemon=True).start()

    def next_event(self) -> dict[str, Json]:
        """`rows` that are asked for, the `values` at the end, or nothing as a sign of life; raises its error."""
        try:
            event = self._events.get(timeout=_SIGN_OF_LIFE)
        except queue.Empty:
            if time.monotonic() - self._last > self._deadline:
                late = (
                    f"asked the model nothing for {self._deadline:g} s, nor ended"
                    if self._asks
                    else f"not ended after {self._deadline:g} s"
                )
                raise DeadlineError(
                    f"{self._benchmark.name} has {late}; if that is not a fault, set launch.deadlines.evaluate higher"
                ) from None
            return {}
        self._last = time.monotonic()
        if isinstance(event, Exception):
            raise event
        return event

    def _run(self) -> None:
        try:
            values: Mapping[str, float] = self._benchmark.measure(self._ask)
            self._events.put({"values": {name: float(value) for name, value in values.items()}})
        except Exception as error:
            self._events.put(error)

    def _ask(self, rows: Sequence[Json]) -> list[Json]:
        found: list[Json] = []
        for first in range(0, len(rows), self._rows_together):
            some = list(rows[first : first + self._rows_together])
            self._events.put({"rows": some, "done": first, "total": len(rows)})
            answers = self.answers.get()
            if answers is None:
                raise DeadlineError(f"{self._benchmark.name} was given up")
            found += answers
        return found
