"""The data loader: threads or processes build the micro-batches of a plan, a bounded number ahead.

The order is decided before a worker sees anything, so workers and prefetch change when a micro-batch is ready, never
what is in it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading import checksum, worker_autotuning, workers
from unisono.data.loading.batch_builder import (
    BatchBuilder,
    MaskedSample,
    MicroBatch,
    Request,
    build_sample,
    refuse_mask,
)
from unisono.data.loading.draws import describe_draws, global_generator_states, moved_generators
from unisono.data.loading.prefetch import Prefetcher
from unisono.data.order.order import Indices
from unisono.data.order.plan import Plan
from unisono.runtime import heartbeat
from unisono.runtime.communicator import ProcessInfo, usable_cores
from unisono.runtime.errors import DataError
from unisono.runtime.rng import generator
from unisono.task import SampleContext, Source, Task, run_setup

__all__ = ["Loader", "MeasuredLengths", "MicroBatch", "check_draws"]
log = logging.getLogger(__name__)
_LENGTHS_PER_REQUEST = 64  # samples whose lengths a worker is asked for
_MAX_REPORTED = 3  # samples left out that are told one by one
_CHECKED_SAMPLES = 8  # samples that are made to see from where a task draws


class Loader:
    """The micro-batches of one process, step by step.

    Args:
        task: gives `sample`, `collate`, `counts` and `work`.
        source: the rows.
        plan: which rows each step consumes.
        split: which of them are this process's.
        rank: of this process.
        purpose: part of the address of every random draw: `train`, or `eval` for held-out rows.
        workers: that make micro-batches; `auto` measures what making one takes.
        worker_kind: `threads` or `processes`; `auto` measures whether making one holds Python's lock.
        prefetch: micro-batches prepared ahead.
        prefetch_mb: MB prepared ahead at most, but always one micro-batch.
        on_error: `stop`, or `mask` to leave out samples that cannot be made.
        timeout: seconds that a micro-batch may take.
        contents: say of every sample what it holds, for the ledger.
        processes: that train on this host.

    Raises:
        DataError: for a task that cannot be sent to worker processes.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        plan: Plan,
        split: BatchSplit,
        rank: int,
        *,
        purpose: str = "train",
        workers: int | str = 1,
        worker_kind: str = "threads",
        prefetch: int = 4,
        prefetch_mb: float = 512.0,
        on_error: str = "stop",
        timeout: float = 600.0,
        contents: bool = False,
        processes: int = 1,
    ) -> None:
        run_setup(task)  # before there are threads
        if on_error == "mask":
            refuse_mask(task)
        self._plan, self._split, self._rank = plan, split, rank
        self._purpose, self._asked_kind, self._timeout = purpose, worker_kind, timeout
        self._max_bytes = 1e6 * prefetch_mb
        self._maker = BatchBuilder(
            task,
            source,
            plan.seed,
            purpose,
            mask=on_error == "mask",
            contents=contents,
            keep=int(self._max_bytes),
            capacity=plan.capacity,
        )
        if isinstance(measured := getattr(plan, "lengths", None), MeasuredLengths):
            measured.measure = self.lengths
        self._largest = 0  # bytes of a micro-batch, as far as any was made
        self._built, self._seconds = 0, np.zeros(3)
        self._masked, self._reported, self._news = 0, -1, deque[str]()
        self._first_request: Request | None = None
        self._feed: Prefetcher[Request, MicroBatch] | None = None
        self._asked, self._asked_ahead, self._processes = workers, prefetch, processes

    @classmethod
    def from_config(
        cls,
        task: Task,
        source: Source,
        plan: Plan,
        split: BatchSplit,
        place: ProcessInfo,
        config: RunConfig,
        **more: Any,
    ) -> Loader:
        """With the settings of a run; see the class for the arguments."""
        data = config.data
        return cls(
            task, source, plan, split, place.rank, workers=data.workers, worker_kind=data.worker_kind,
            prefetch=data.prefetch, prefetch_mb=data.prefetch_mb, on_error=data.on_error,
            timeout=config.launch.timeout, processes=place.local_world_size, **more,
        )  # fmt: skip

    def start(self) -> None:
        """Start the workers, if they are not yet; the first micro-batch that is asked for does it, too."""
        _ = self._workers

    def steps(self, first: int = 0) -> Iterator[list[MicroBatch]]:
        """The micro-batches of this process for each step from `first` on; always `split.passes` of them."""
        self.start()
        requests = self._requests(range(first, self._plan.steps))
        feed = Prefetcher(requests, lambda request: self._workers.ask("make", request), lambda: self._ahead)
        self._feed = feed
        try:
            for step in range(first, self._plan.steps):
                batches: list[MicroBatch] = []
                while len(batches) < self._split.passes:
                    with heartbeat.phase("data"):
                        batches.append(self._wait(feed.next))
                    self._largest = max(self._largest, checksum.byte_size(batches[-1].arrays))
                self._tell(step, batches)
                yield batches
        finally:
            feed.close()

    def lengths(self, rows: Indices, epochs: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Units that samples take of a packed row, by making them; threads keep what they made, for as long as it fits.

        A sample that cannot be made takes 1, if such samples are left out. Before there are workers, and when they are
        gone, samples are made here: how many workers there are to be can depend on how long that takes.
        """
        if (workers := vars(self).get("_workers")) is None:
            return self._maker.lengths(rows, epochs)
        parts = range(0, len(rows), _LENGTHS_PER_REQUEST)
        asked = [
            workers.ask("lengths", rows[n : n + _LENGTHS_PER_REQUEST], epochs[n : n + _LENGTHS_PER_REQUEST])
            for n in parts
        ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(self._wait(future.result) for future in asked)])

    def counters(self) -> dict[str, float]:
        """Micro-batches ready and requested, samples built and masked, seconds of reading, sampling and collating."""
        ready, asked = self._feed.queue_state if self._feed is not None else (0, 0)
        names = ("read_seconds", "sample_seconds", "collate_seconds")
        seconds = dict(zip(names, self._seconds.tolist(), strict=True))
        return {"ready": ready, "asked": asked, "built": self._built, "masked": self._masked, **seconds}

    def facts(self) -> str:
        """A line about how micro-batches are made."""
        each = self._largest / 1e6
        size = f" of {each:.2g} MB" if self._largest else ""
        kind = self._kind if self._count > 1 else {"threads": "thread", "processes": "process"}[self._kind]
        return f"{self._count} {kind}, {self._ahead} micro-batches ahead{size}; {self._stages}"

    def news(self, wait: float = 0.0) -> Iterator[str]:
        """What is worth a line on the console since the last call.

        Args:
            wait: share of the last step's time that was waiting for data.
        """
        while self._news:
            yield self._news.popleft()
        if line := self._waits.step(wait, lambda: self._stages):
            yield line

    def rest(self) -> None:
        """Let go of what is started again in no time; processes stay."""
        if self._kind == "threads":
            self.close()

    def close(self) -> None:
        """End the workers; what threads are busy with is finished first."""
        if self._feed is not None:  # of steps that somebody may still hold
            self._feed.close()
            self._feed = None
        if "_workers" in vars(self):
            self._workers.close()
            del self._workers

    @cached_property
    def _count(self) -> int:
        """Workers."""
        if isinstance(self._asked, int):
            return self._asked
        return worker_autotuning.choose_count(usable_cores(), self._processes, self._stages.total * self._split.passes)

    @cached_property
    def _kind(self) -> str:
        """`threads` or `processes`."""
        return worker_autotuning.choose_kind(self._stages) if self._asked_kind == "auto" else self._asked_kind

    @cached_property
    def _waits(self) -> worker_autotuning.WaitMonitor:
        return worker_autotuning.WaitMonitor(self._count, self._kind, usable_cores() // self._processes)

    @cached_property
    def _workers(self) -> workers.Workers:
        if self._count * self._processes > usable_cores():
            self._news.append(
                f"data.workers={self._count} on {self._processes} "
                f"{'process' if self._processes == 1 else 'processes'} of this host are more than its {usable_cores()} "
                "cores, so they slow down each other and the training; set fewer, or auto"
            )
        return workers.start_workers(self._maker, self._kind, self._count, self._purpose)

    @cached_property
    def _stages(self) -> worker_autotuning.StageTimes:
        return worker_autotuning.measure_stages(self._maker, self._first_request or next(self._requests([0])))

    @property
    def _ahead(self) -> int:
        """Micro-batches to prepare besides the one that is waited for: one, until it is known how large they are."""
        asked = self._asked_ahead if isinstance(self._asked, int) else max(self._asked_ahead, 2 * self._count)
        return max(1, min(asked, int(self._max_bytes / self._largest) if self._largest else 1))

    def _wait(self, wait: Callable[[float], Any]) -> Any:
        try:
            return wait(self._timeout)
        except TimeoutError:
            rows = ", ".join(map(str, self._workers.busy[:8]))
            raise DataError(
                f"no micro-batch was ready within {self._timeout:g} s (launch.timeout); the worker {self._kind} are at "
                f"rows {rows or '?'} of the source"
            ) from None

    def _requests(self, steps: Iterable[int]) -> Iterator[Request]:
        for step in steps:
            length = self._plan.rows(step)
            for number in self._split.micro_batches(self._rank):
                own = self._split.rows(number, length)
                idle = len(own) == 0
                # Idle: the batch's first micro-batch again, so that its shape is one the model knows.
                take = range(min(self._split.micro_batch, length)) if idle else own
                request = Request(number, own, self._plan.samples(step, take), idle)
                self._first_request = self._first_request or request
                yield request

    def _tell(self, step: int, batches: list[MicroBatch]) -> None:
        if step <= self._reported:  # made again, as the first one is
            return
        self._reported = step
        for made in (micro.info for micro in batches if micro.info):
            self._built += len(made.samples)
            self._seconds += made.seconds
        for sample in (sample for micro in batches if micro.info for sample in micro.info.masked):
            self._masked += 1
            log.warning("step %d: row %d of the source left out: %s", step + 1, sample.row, sample.reason)
            if self._masked <= _MAX_REPORTED:
                self._news.append(f"step {step + 1}: left out: {_shorten_reason(sample)}")
            elif str(self._masked).strip("0") == "1":
                self._news.append(f"step {step + 1}: {self._masked} samples left out so far; the ledger has them all")


class MeasuredLengths:
    """Lengths of samples that are found out by making them, for a plan that is made before its loader is.

    A `PackedPlan` calls it; its loader's workers do the work, as soon as there is a loader that finds it as the plan's
    `lengths`.

    Args:
        task: gives `sample` and `length`.
        source: the rows.
        seed: of the run.
        mask: a sample that cannot be made takes 1.
    """

    def __init__(self, task: Task, source: Source, seed: int, mask: bool = False) -> None:
        self.measure: Callable[[Indices, Indices], Indices] = BatchBuilder(
            task, source, seed, "train", mask=mask
        ).lengths

    def __call__(self, rows: Indices, epochs: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Units that samples take of a packed row."""
        return self.measure(rows, epochs)


def check_draws(task: Task, source: Source, *, mask: bool = False, training: bool = True) -> None:
    """Make a few samples, and refuse a task that draws what it should not.

    Draws from a generator that all threads share would depend on which thread comes first, and disturb those of the
    model. Draws for held-out rows would augment what is to be measured, unless the task says that it means to.

    Args:
        task: that draws.
        source: its rows.
        mask: continue where a sample cannot be built.
        training: whether these are rows to train on, or held-out ones.

    Raises:
        DataError: naming the generator, or the held-out row that is drawn for.
    """
    before = global_generator_states()
    for row in range(min(_CHECKED_SAMPLES, len(source))):
        rng = generator(0, "check", row)
        unused = repr(rng.bit_generator.state)
        try:
            build_sample(task, source, row, SampleContext(rng, training))
        except DataError:
            if not mask:
                raise
        if not (training or task.draws_in_evaluation) and repr(rng.bit_generator.state) != unused:
            name = type(task).__name__
            raise DataError(
                f"{name}.sample draws random numbers for held-out rows (row {row}), which would augment what is "
                "evaluated. Augment only under `if context.training:`; if the evaluation is meant to draw, as that of "
                f"a masked language model, set draws_in_evaluation = True in {name}",
                fault="Held-out rows are augmented",
            )
    if moved := moved_generators(before):

        def build() -> None:
            for row in range(min(_CHECKED_SAMPLES, len(source))):
                task.sample(source[row], SampleContext(generator(0, "check", row), training))

        raise DataError(
            f"{type(task).__name__}: data() or sample() drew from {describe_draws(moved, build)}, which all threads "
            "share, so a run could not be repeated. Draw from context.rng of sample() (a torch.Generator can be seeded "
            "from it).",
            fault="The samples depend on the call",
        )


def _shorten_reason(sample: MaskedSample) -> str:
    return sample.reason if len(sample.reason) < 300 else sample.reason[:300] + " …"
