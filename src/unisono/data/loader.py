"""From positions to micro-batches: records are read, sampled and collated by threads, a bounded number ahead.

The order is decided before a thread sees anything, so workers and prefetch change when a micro-batch is ready, never
what is in it.
"""

from __future__ import annotations

import random
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.config.split import Split
from unisono.data.order import Indices
from unisono.data.plan import Plan, Taken
from unisono.errors import DataError, UnisonoError
from unisono.keys import generator
from unisono.task import Batch, Source, Task

_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one process.

    Attributes:
        number: which micro-batch of the global batch.
        rows: source rows of its samples, shape (samples,); packed rows hold several.
        arrays: what `Task.collate` made of them.
        counts: what `Task.counts` says; zeros if idle.
        work: what `Task.work` says, and `rows`; zeros if idle.
        idle: real rows at weight zero, for a process that has none left in a short batch.
        packed: rows it has, where these are not its samples.
    """

    number: int
    rows: Indices
    arrays: Batch
    counts: dict[str, float]
    work: dict[str, float]
    idle: bool = False
    packed: int | None = None

    @property
    def size(self) -> int:
        """Rows of the global batch in it."""
        return len(self.rows) if self.packed is None else self.packed

    @property
    def by_row(self) -> bool:
        """Whether its arrays can be cut by row: none is nested, and the first axis of each is the row."""
        sized = [array for array in self.arrays.values() if hasattr(array, "__len__")]
        nested = any(isinstance(array, Mapping | list | tuple) or len(array) != self.size for array in sized)
        return self.packed is None and not nested

    def one(self, row: int) -> MicroBatch:
        """One row of it, for itself; only where they can be cut by row."""
        arrays = {n: a[row : row + 1] if hasattr(a, "__len__") else a for n, a in self.arrays.items()}
        return replace(self, arrays=arrays, rows=self.rows[row : row + 1])


@dataclass(frozen=True)
class _Order:
    """What a thread is asked for."""

    number: int
    taken: Taken
    idle: bool


class Loader:
    """The micro-batches of one process, step by step.

    Args:
        task: gives `sample`, `collate`, `counts` and `work`.
        source: the rows.
        plan: which rows each step consumes.
        split: which of them are this process's.
        rank: of this process.
        purpose: part of the address of every random draw, e.g. `train`.
        workers: threads.
        prefetch: micro-batches prepared ahead.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        plan: Plan,
        split: Split,
        rank: int,
        *,
        purpose: str = "train",
        workers: int = 1,
        prefetch: int = 4,
    ) -> None:
        self._task, self._source, self._plan, self._split, self._rank = task, source, plan, split, rank
        self._purpose, self._prefetch = purpose, prefetch
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=f"unisono-{purpose}")

    def steps(self, first: int = 0) -> Iterator[list[MicroBatch]]:
        """The micro-batches of this process for each step from `first` on; always `split.passes` of them."""
        waiting: deque[Future[MicroBatch]] = deque()
        orders = self._orders(range(first, self._plan.steps))
        try:
            for _ in range(first, self._plan.steps):
                batches: list[MicroBatch] = []
                while len(batches) < self._split.passes:
                    while len(waiting) <= self._prefetch and (order := next(orders, None)) is not None:
                        waiting.append(self._pool.submit(self._make, order))
                    batches.append(waiting.popleft().result())
                yield batches
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Stop the threads; what they are busy with is finished first."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _orders(self, steps: Iterable[int]) -> Iterator[_Order]:
        for step in steps:
            length = self._plan.rows(step)
            for number in self._split.micro_batches(self._rank):
                own = self._split.rows(number, length)
                idle = len(own) == 0
                # Idle: the batch's first micro-batch again, so that its shape is one the model knows.
                take = range(min(self._split.micro_batch, length)) if idle else own
                yield _Order(number, self._plan.taken(step, take), idle)

    def _make(self, order: _Order) -> MicroBatch:
        taken = order.taken
        samples = [self._sample(int(row), int(epoch)) for row, epoch in zip(taken.rows, taken.epochs, strict=True)]
        try:
            arrays = self._task.collate(samples)
            counts = {name: float(count) for name, count in self._task.counts(arrays).items()}
            work = {**self._task.work(arrays), "rows": float(len(samples))}
        except UnisonoError:
            raise
        except Exception as error:
            raise DataError(f"rows {_some(taken.rows)} cannot be made a batch: {_told(error)}") from error
        if order.idle:
            counts, work = dict.fromkeys(counts, 0.0), dict.fromkeys(work, 0.0)
        return MicroBatch(order.number, taken.rows, arrays, counts, work, order.idle)

    def _sample(self, row: int, epoch: int) -> Any:
        return _sampled(self._task, self._source, row, generator(self._plan.seed, self._purpose, epoch, row))


def check_draws(task: Task, source: Source, rows: int = 8) -> None:
    """Make a few samples, and refuse a task that draws from a generator that all threads share.

    Such draws would depend on which thread comes first, and disturb those of the model.

    Raises:
        DataError: naming the generator.
    """
    before = _shared_generators()
    for row in range(min(rows, len(source))):
        _sampled(task, source, row, generator(0, "check", row))
    for name, state in _shared_generators().items():
        if name in before and state != before[name]:
            raise DataError(
                f"{type(task).__name__}: data() or sample() drew from {name}, which all threads share, so a run could "
                "not be repeated. Draw from the rng that sample() is given (a torch.Generator can be seeded from it)."
            )


def _sampled(task: Task, source: Source, row: int, rng: np.random.Generator) -> Any:
    try:
        return task.sample(source[row], rng)
    except UnisonoError:
        raise
    except Exception as error:
        raise DataError(f"row {row} of the source cannot be made a sample: {_told(error)}") from error


def _shared_generators() -> dict[str, bytes]:
    """The state of every generator that a task should not draw from."""
    states = {"Python's random": repr(random.getstate()).encode()}
    legacy: Any = np.random.get_state(legacy=False)
    states["NumPy's global generator"] = legacy["state"]["key"].tobytes() + bytes([legacy["state"]["pos"] % 256])
    if "torch" in sys.modules:
        states["torch's global generator"] = sys.modules["torch"].get_rng_state().numpy().tobytes()
    return states


def _told(error: Exception) -> str:
    """An error with the last line of the user's code that it came through, not the library's line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((f for f in reversed(frames[1:]) if not f.filename.startswith(_LIBRARIES)), frames[-1])
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno} in {frame.name})"


def _some(rows: Indices) -> str:
    return ", ".join(map(str, rows[:8].tolist())) + (", …" if len(rows) > 8 else "")
