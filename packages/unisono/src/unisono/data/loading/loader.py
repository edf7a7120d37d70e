"""The data loader: threads or processes build the micro-batches of a plan, a bounded number ahead.

The order is decided before workers read anything, so the number of workers and prefetching only affect when a
micro-batch is ready, never its content.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading import checksum, worker_autotuning, workers
from unisono.data.loading.batch_builder import BatchBuilder, build_sample, refuse_mask
from unisono.data.loading.draws import describe_draws, global_generator_states, moved_generators
from unisono.data.loading.micro_batch import MicroBatch, Request
from unisono.data.loading.prefetch import Prefetcher
from unisono.data.order.mixture import sources_of
from unisono.data.order.order import Indices
from unisono.data.order.plan import Plan, SampleIndices, rows_of_micro_batches
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import DataError
from unisono.runtime.fault_names import FaultName
from unisono.runtime.rng import generator
from unisono.task import SampleContext, Source, Task, run_setup

log = logging.getLogger(__name__)
_LENGTHS_PER_REQUEST = 64  # samples per request for lengths
_LEAST_AHEAD = 4  # micro-batches to prefetch at least, unless a number is given
_MAX_REPORTED = 3  # masked samples that are reported one by one
_CHECKED_SAMPLES = 8  # samples built to check which generators a task draws from


class Loader:
    """The micro-batches of one process, step by step.

    Args:
        task: defines `sample`, `collate`, `counts` and `work`.
        source: the rows.
        plan: which rows each step consumes.
        split: which of them belong to this process.
        rank: of this process.
        purpose: part of the key of every random draw: `train`, or `eval` for held-out rows.
        workers: number of workers; `auto` measures how long a micro-batch takes.
        worker_kind: `threads` or `processes`; `auto` measures whether building a batch holds Python's lock.
        prefetch: number of micro-batches to prefetch; None for two per worker, and at least 4.
        prefetch_mb: limit of prefetching in MB; one micro-batch is always prefetched.
        on_error: `stop`, or `mask` to skip samples that cannot be built.
        timeout: seconds to wait for a micro-batch.
        contents: compute a checksum of every sample, for the ledger.
        cores: that this process has, the training included; None for all that it may use.
        remote: rows are read from remote storage, where workers wait most of the time.
        blocks: that a process reads as a whole; None if it reads row by row. Workers wait for one block together.

    Raises:
        DataError: if a task cannot be sent to worker processes.
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
        workers: int | str = "auto",
        worker_kind: str = "threads",
        prefetch: int | None = None,
        prefetch_mb: float = 512.0,
        on_error: str = "stop",
        timeout: float = 600.0,
        contents: bool = False,
        cores: int | None = None,
        remote: bool = False,
        blocks: int | None = None,
    ) -> None:
        run_setup(task)  # before there are threads
        if on_error == "mask":
            refuse_mask(task)
        self._plan, self._split, self._rank = plan, split, rank
        self._purpose, self._worker_kind, self._timeout = purpose, worker_kind, timeout
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
        self._largest = 0  # bytes of the largest micro-batch so far
        self._building, self._masked, self._reported, self._messages = 0.0, 0, -1, deque[str]()
        self._first_request: Request | None = None
        self._feed: Prefetcher[Request, MicroBatch] | None = None
        self._configured_count, self._configured_ahead = workers, prefetch
        self._cores, self._remote, self._blocks = cores or ProcessInfo().own_cores(), remote, blocks

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
        """A loader with the settings of a run, and no more workers than are of use; see the class for the arguments."""
        data, cores = config.data, place.own_cores()
        remote = is_remote_source(source) if data.storage == "auto" else data.storage == "remote"
        blocks = _count_blocks(source, place.world_size) if data.shuffle == "blocks" else None
        workers, most = data.workers, _most_workers(cores, remote, blocks)
        if isinstance(workers, int):
            workers = min(workers, most or workers)
        loader = cls(
            task, source, plan, split, place.rank, workers=workers, worker_kind=data.worker_kind,
            prefetch=data.prefetch, prefetch_mb=data.prefetch_mb, on_error=data.on_error,
            timeout=config.launch.timeout, cores=cores, remote=remote, blocks=blocks,
            **more,
        )  # fmt: skip
        if workers != data.workers:
            why = (
                f"reads {blocks} block{'s' * (blocks != 1)}, and more would wait for the same blocks"
                if remote
                else "more would slow each other down; if they mostly wait for storage, set data.storage=remote"
            )
            loader._messages.append(
                f"data.workers={data.workers}: using {workers}, since this process has {cores} "
                f"core{'s' * (cores != 1)} of this host, and {why}"
            )
        return loader

    def start(self) -> None:
        """Start the workers unless they are running. The first request does so, too."""
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
                self._note_built(step, batches)
                yield batches
        finally:
            feed.close()

    def lengths(self, rows: Indices, epochs: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Lengths of samples in a packed row, found by building them; worker threads cache the samples, if they fit.

        A sample that cannot be built has length 1 if such samples are masked. Without running workers, samples are
        built here, since the number of workers may depend on how long that takes.
        """
        if (workers := vars(self).get("_workers")) is None:
            return self._maker.lengths(rows, epochs)
        parts = range(0, len(rows), _LENGTHS_PER_REQUEST)
        futures = [
            workers.ask("lengths", rows[n : n + _LENGTHS_PER_REQUEST], epochs[n : n + _LENGTHS_PER_REQUEST])
            for n in parts
        ]
        return np.concatenate([np.zeros(0, dtype=np.int64), *(self._wait(future.result) for future in futures)])

    def facts(self) -> str:
        """A line that describes how micro-batches are loaded."""
        each = self._largest / 1e6
        size = f" of {each:.2g} MB" if self._largest else ""
        size += " from remote storage" if self._remote else ""
        kind = self._kind if self._count > 1 else {"threads": "thread", "processes": "process"}[self._kind]
        return f"{self._count} {kind}, {self._ahead} micro-batches ahead{size}; {self._stages}"

    def messages(self, wait: float = 0.0, seconds: float = 0.0) -> Iterator[str]:
        """Lines to show on the console since the last call.

        Args:
            wait: fraction of the last step's time spent waiting for data.
            seconds: that the last step took.
        """
        while self._messages:
            yield self._messages.popleft()
        if line := self._waits.step(wait, seconds, self._building, lambda: self._stages):
            yield line

    def stop_threads(self) -> None:
        """Stop threads, which are quick to restart; worker processes keep running."""
        if self._kind == "threads":
            self.close()

    def close(self) -> None:
        """Stop the workers; threads finish their current request first."""
        if self._feed is not None:  # of an iterator that may not be exhausted
            self._feed.close()
            self._feed = None
        if "_workers" in vars(self):
            self._workers.close()
            del self._workers

    @cached_property
    def _count(self) -> int:
        if isinstance(self._configured_count, int):
            return self._configured_count
        if self._kind == "threads" and not self._remote and self._stages.holds_lock:
            return 1  # more threads would wait for each other
        seconds = self._stages.total * self._split.passes
        waiting = worker_autotuning.REMOTE_WORKERS if self._remote else 0
        return worker_autotuning.choose_count(self._cores, seconds, min(waiting, self._blocks or waiting))

    @cached_property
    def _kind(self) -> str:
        """`threads` or `processes`."""
        return worker_autotuning.choose_kind(self._stages) if self._worker_kind == "auto" else self._worker_kind

    @cached_property
    def _waits(self) -> worker_autotuning.WaitMonitor:
        # Workers that wait need no core.
        cores = max(self._cores, 2 * self._count + 1) if self._remote else self._cores
        return worker_autotuning.WaitMonitor(self._count, self._kind, cores)

    @cached_property
    def _workers(self) -> workers.Workers:
        kind = workers.ProcessWorkers if self._kind == "processes" else workers.ThreadWorkers
        return kind(self._maker, self._count, self._purpose)

    @cached_property
    def _stages(self) -> worker_autotuning.StageTimes:
        request = self._first_request or next(self._requests([0]))
        try:
            return worker_autotuning.measure_stages(self._maker, request, self._timeout)
        except TimeoutError:
            raise self._too_late("thread that measures the loading is", self._maker.busy) from None

    @property
    def _ahead(self) -> int:
        """Micro-batches to prefetch besides the one being waited for; one until their size is known."""
        configured = self._configured_ahead or max(_LEAST_AHEAD, 2 * self._count)
        return max(1, min(configured, int(self._max_bytes / self._largest) if self._largest else 1))

    def _wait(self, wait: Callable[[float], Any]) -> Any:
        try:
            return wait(self._timeout)
        except TimeoutError:
            raise self._too_late(f"worker {self._kind} are", self._workers.busy) from None

    def _too_late(self, who: str, busy: Sequence[int]) -> DataError:
        rows = ", ".join(map(str, busy[:8]))
        return DataError(
            f"no micro-batch was ready within {self._timeout:g} s (launch.timeout); the {who} busy with rows "
            f"{rows or '?'} of the source"
        )

    def _requests(self, steps: Iterable[int]) -> Iterator[Request]:
        for step in steps:
            for number, own, take in rows_of_micro_batches(self._plan, self._split, step, self._rank):
                request = Request(number, own, self._plan.samples(step, take), not own)
                self._first_request = self._first_request or request
                yield request

    def _note_built(self, step: int, batches: list[MicroBatch]) -> None:
        if step <= self._reported:  # built again, like the first step
            return
        self._reported = step
        self._building = sum(sum(micro.info.seconds) - micro.info.delay for micro in batches if micro.info)
        for sample in (sample for micro in batches if micro.info for sample in micro.info.masked):
            self._masked += 1
            log.warning("step %d: left out: %s", step + 1, sample.reason)
            if self._masked <= _MAX_REPORTED:
                reason = sample.reason if len(sample.reason) < 300 else f"{sample.reason[:300]} …"
                self._messages.append(f"step {step + 1}: left out: {reason}")
            elif str(self._masked).strip("0") == "1":
                self._messages.append(
                    f"step {step + 1}: {self._masked} samples left out so far; the ledger has them all"
                )


class MeasuredLengths:
    """Lengths of samples, found by building them, for a plan that is created before its loader.

    A `PackedPlan` calls it. Once a loader finds it as the plan's `lengths`, the loader's workers build the samples.

    Args:
        task: defines `sample` and `length`.
        source: the rows.
        seed: of the run.
        mask: a sample that cannot be built has length 1.
    """

    def __init__(self, task: Task, source: Source, seed: int, mask: bool = False) -> None:
        self.measure: Callable[[Indices, Indices], Indices] = BatchBuilder(
            task, source, seed, "train", mask=mask
        ).lengths

    def __call__(self, rows: Indices, epochs: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Lengths of samples in units of a packed row."""
        return self.measure(rows, epochs)


def is_remote_source(source: Source) -> bool:
    """Whether reading waits for a network, as `source.remote` says; of several sources, whether any does."""
    return any(bool(getattr(one, "remote", False)) for one in sources_of(source).values())


def _count_blocks(source: Source, world_size: int) -> int | None:
    """How many blocks a process reads in an epoch; None if the source has none."""
    blocks = getattr(source, "blocks", None)
    return None if blocks is None else -(-len(blocks) // world_size)


def _most_workers(cores: int, remote: bool, blocks: int | None) -> int | None:
    """Workers that are of use: each needs a core, or a row or block of remote storage that no other waits for."""
    if not remote:
        return cores
    return None if blocks is None else max(cores, blocks)


def _check_sample_batch(task: Task, source: Source, purpose: str, mask: bool) -> None:
    """Reject a task whose `sample_batch` builds other samples than its `sample`."""
    rows = np.arange(min(_CHECKED_SAMPLES, len(source)))
    together, alone = (BatchBuilder(task, source, 0, purpose, mask=mask, together=way) for way in (True, False))
    if not together.together or not len(rows):
        return
    indices = SampleIndices(rows, rows, np.zeros_like(rows))
    made, each = (checksum.checksums(builder.pieces(indices)[1]) for builder in (together, alone))
    if different := [row for row, one, other in zip(rows.tolist(), made, each, strict=True) if one != other]:
        name = type(task).__name__
        raise DataError(
            f"{name}: sample_batch() builds another sample for row {different[0]} of the source than sample(); both "
            "must return the same values, types and fields, from the same draws (docs/tasks.md)",
            fault=FaultName.SAMPLES_BY_CALL,
        )


def check_draws(task: Task, source: Source, *, mask: bool = False, training: bool = True) -> None:
    """Build a few samples, and reject a task that draws random numbers it should not.

    Draws from a generator shared by all threads would depend on thread timing, and change the model's draws. Draws for
    held-out rows would augment what is evaluated, unless the task declares that it intends to.

    Args:
        task: the task.
        source: its rows.
        mask: skip samples that cannot be built.
        training: whether these are training rows or held-out rows.

    Raises:
        DataError: naming the generator, or the held-out row.
    """
    name = type(task).__name__

    def build() -> None:
        for row in range(min(_CHECKED_SAMPLES, len(source))):
            rng = generator(0, "check", row)
            unused = repr(rng.bit_generator.state)
            try:
                build_sample(task, source, row, SampleContext(rng, training))
            except DataError:
                if not mask:
                    raise
            if not (training or task.draws_in_evaluation) and repr(rng.bit_generator.state) != unused:
                raise DataError(
                    f"{name}.sample draws random numbers for held-out rows (row {row}), which would augment what is "
                    "evaluated. Augment only under `if context.training:`; if the evaluation is meant to draw, as that "
                    f"of a masked language model, set draws_in_evaluation = True in {name}",
                    fault=FaultName.AUGMENTED_HELD_OUT_ROWS,
                )

    before = global_generator_states()
    build()
    _check_sample_batch(task, source, "train" if training else "eval", mask)
    if moved := moved_generators(before):
        before = global_generator_states()
        where = describe_draws(moved, build)
        if not moved_generators(before):
            log.warning(
                "%s moved while the first samples were built, but not when they were built again. Other threads draw "
                "from it, too, as a client of a remote store does before it tries again; if %s draws from it just "
                "once, its samples cannot be repeated",
                " and ".join(moved), name,
            )  # fmt: skip
            return
        raise DataError(
            f"{name}: data() or sample() drew from {where}, which all threads share, so a run could not be repeated. "
            "Draw from context.rng of sample() (a torch.Generator can be seeded from it).",
            fault=FaultName.SAMPLES_BY_CALL,
        )
