"""Builds a micro-batch from the samples that the plan selects: read, sample, cut, pack, collate.

A `BatchBuilder` holds everything this needs; the result does not depend on which thread or process builds it, or when.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Any

import numpy as np

from unisono.data.loading import checksum
from unisono.data.loading.micro_batch import BatchInfo, MaskedSample, MicroBatch, Request
from unisono.data.loading.run_delay import run_delay
from unisono.data.order.order import Indices
from unisono.data.order.plan import NO_SAMPLES, SampleIndices
from unisono.data.sources.cache import LruCache
from unisono.protocols import Recurrent, Vectorised, require_packable
from unisono.runtime.code.user_code import describe_error
from unisono.runtime.errors import BadSamplesError, ConfigError, DataError, UnisonoError
from unisono.runtime.rng import generator, generators, key
from unisono.task import EVERY_TERM, Batch, SampleContext, SampleContexts, Source, Task, read_records, run_setup

_MAX_TRIES = 64  # rows tried as a substitute if all samples of a micro-batch are bad


@dataclass
class _StageTimer:
    """Seconds of the stages of one micro-batch."""

    read: float = 0.0
    sample: float = 0.0
    rest: float = 0.0


class BatchBuilder:
    """Builds micro-batches from a task's rows.

    Args:
        task: defines `sample`, `cut`, `pack`, `collate`, `counts` and `work`.
        source: the rows.
        seed: of the run.
        purpose: part of the key of every random draw: `train`, or `eval` for held-out rows.
        mask: skip samples that cannot be built; otherwise they are an error.
        contents: compute a checksum of every sample, for the ledger.
        keep: maximum bytes of samples to cache that were built to measure their lengths.
        capacity: units in a packed row; None if rows are samples.
        together: build all samples of a micro-batch in one call, if the task is `Vectorised`.
    """

    def __init__(
        self,
        task: Task,
        source: Source,
        seed: int,
        purpose: str,
        *,
        mask: bool = False,
        contents: bool = False,
        keep: int = 0,
        capacity: int | None = None,
        together: bool = True,
    ) -> None:
        self.task, self.source, self.seed, self.purpose = task, source, seed, purpose
        self._mask, self._contents, self._keep, self._capacity = mask, contents, keep, capacity
        self._rows = "the held-out rows" if purpose == "eval" else "the source"  # in errors
        self.together = together and capacity is None and isinstance(task, Vectorised)
        self._set_up()

    def _set_up(self) -> None:
        self._now: dict[int, int] = {}  # thread -> row of the source it is building
        self.note_row: Callable[[int], None] = self._note_row
        self._kept: LruCache[Any] = LruCache(self._keep, least=0, weigh=checksum.byte_size)
        self._stand_in: tuple[int, Any] | None = None
        self._contexts = _ContextPool(training=self.purpose != "eval")
        self._draws = getattr(self.task.sample, "__func__", None) is not Task.sample

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _PROCESS_LOCAL}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        run_setup(self.task)
        self._set_up()

    @property
    def busy(self) -> list[int]:
        """Rows of the source that threads are building."""
        return sorted(set(self._now.values()))

    def make(self, request: Request) -> MicroBatch:
        """Build a micro-batch.

        Raises:
            DataError: naming the row or rows that cannot be built, and the line of the user's code.
        """
        watch, waited = _StageTimer(), run_delay()
        taken, pieces, masked = self.pieces(request.samples, watch)
        began = perf_counter()
        while True:
            rows, slots, given = taken.rows, taken.slots, pieces
            if not pieces:  # the batch needs some rows, which get weight zero
                row, sample = self._find_stand_in(masked[0].reason)
                slots = np.unique(request.samples.slots)
                given, rows = [sample] * len(slots), np.full(len(slots), row, dtype=np.int64)
            try:
                arrays, counts, work, size = self._batch(given, rows, slots)
                break
            except BadSamplesError as error:  # rejected by collate(): try again without them
                reasons = {n: f"row {rows[n]} of {self._rows}: {text}" for n, text in error.reasons.items()}
                if not self._mask or self._capacity is not None or not pieces:
                    raise BadSamplesError(reasons) from error
                for number, (slot, row, epoch, first, _) in enumerate(taken):
                    if number in reasons:
                        masked.append(MaskedSample(slot, row, epoch, first, reasons[number]))
                good = np.array([number not in reasons for number in range(len(pieces))])
                taken, pieces = taken[good], [piece for piece, fine in zip(pieces, good, strict=True) if fine]
        watch.rest += perf_counter() - began
        idle = request.idle or not pieces
        contents = [] if idle or not self._contents else checksum.checksums(pieces)
        if idle:
            counts, work = dict.fromkeys(counts, 0.0), dict.fromkeys(work, 0.0)
        if self._mask:
            work["masked"] = 0.0 if request.idle else float(len(masked))
        made = BatchInfo(
            request.slots, NO_SAMPLES if idle else taken, np.array(contents, dtype=np.uint64),
            () if request.idle else tuple(masked), (watch.read, watch.sample, watch.rest),
            max(0.0, run_delay() - waited),
        )  # fmt: skip
        packed = None if self._capacity is None else size
        return MicroBatch(request.number, rows, arrays, counts, work, idle, packed, made)

    def pieces(
        self, taken: SampleIndices, watch: _StageTimer | None = None
    ) -> tuple[SampleIndices, Sequence[Any], list[MaskedSample]]:
        """Build samples or pieces of them; returns their indices, the pieces, and the samples that failed."""
        watch, made, masked = watch or _StageTimer(), list[Any](), list[MaskedSample]()
        failed: Exception | None = None
        if self.together and len(taken):
            try:
                return taken, self._build_together(taken, watch), []
            except Exception as error:
                failed = error  # one by one shows which of them fails
            finally:
                self.mark_idle()
        good = np.ones(len(taken), dtype=bool)
        for number, (slot, row, epoch, first, last) in enumerate(taken):
            try:
                made.append(self._piece(row, epoch, first, last, watch))
            except DataError as error:
                if not self._mask:
                    raise
                good[number] = False
                masked.append(MaskedSample(slot, row, epoch, first, str(error)))
        if failed is not None and not masked:
            raise DataError(
                f"rows {_first_few(taken.rows)} of {self._rows}: sample_batch() of {type(self.task).__name__} failed, "
                f"while sample() builds each of them: {describe_error(failed)}"
            ) from failed
        self.mark_idle()
        return (taken if not masked else taken[good]), made, masked

    def _build_together(self, taken: SampleIndices, watch: _StageTimer) -> Sequence[Any]:
        assert isinstance(self.task, Vectorised)
        rows = taken.rows.tolist()
        self.note_row(rows[0])
        addresses = np.stack([taken.epochs, taken.rows], axis=1)
        contexts = SampleContexts(generators(self.seed, self.purpose, rows=addresses), self.purpose != "eval")
        began = perf_counter()
        records = read_records(self.source, rows)
        read = perf_counter()
        made = self.task.sample_batch(records, contexts)
        watch.read += read - began
        watch.sample += perf_counter() - read
        if len(made) != len(rows):
            raise DataError(f"sample_batch() returned {len(made)} samples for {len(rows)} records")
        return made

    def lengths(self, rows: Indices, epochs: Indices) -> Indices:  # (n,), (n,) -> (n,)
        """Lengths of samples in units of a packed row; 1 for a sample that cannot be built, if those are masked."""
        found = np.ones(len(rows), dtype=np.int64)
        watch = _StageTimer()
        for number, (row, epoch) in enumerate(zip(rows.tolist(), epochs.tolist(), strict=True)):
            try:
                sample = self._sample(row, epoch, watch)
            except DataError:
                if not self._mask:
                    raise
                continue
            try:
                found[number] = require_packable(self.task).length(sample)
            except UnisonoError:
                raise
            except Exception as error:
                raise DataError(f"row {row} of {self._rows}: length() failed: {describe_error(error)}") from error
            self._kept.get((row, epoch), lambda sample=sample: sample)  # type: ignore[misc]
        self.mark_idle()
        return found

    def _piece(self, row: int, epoch: int, first: int, last: int, watch: _StageTimer) -> Any:
        sample = self._kept.pop((row, epoch)) if last == -1 else self._kept.peek((row, epoch))
        if sample is None:
            sample = self._sample(row, epoch, watch)
        if last == -1:
            return sample
        began = perf_counter()
        try:
            return require_packable(self.task).cut(sample, first, last)
        except UnisonoError:
            raise
        except Exception as error:
            raise DataError(
                f"row {row} of {self._rows}: cut() to units {first} to {last} failed: {describe_error(error)}"
            ) from error
        finally:
            watch.rest += perf_counter() - began

    def _sample(self, row: int, epoch: int, watch: _StageTimer) -> Any:
        self.note_row(row)
        context = self._contexts.get(key(self.seed, self.purpose, epoch, row)) if self._draws else _UNUSED_CONTEXT
        return build_sample(self.task, self.source, row, context, watch, self._rows)

    def _batch(
        self, pieces: Sequence[Any], rows: Indices, slots: Indices
    ) -> tuple[Batch, dict[str, float], dict[str, float], int]:
        """The arrays, counts, work and number of rows of a batch."""
        try:
            if self._capacity is not None:
                pieces = [require_packable(self.task).pack(group) for group in _group_by_slot(pieces, slots)]
            arrays = self.task.collate(pieces)
            counts = {name: float(count) for name, count in self.task.counts(arrays).items()}
            self._check_default_count(counts, len(pieces))
            work = {**self.task.work(arrays), "rows": float(len(pieces))}
        except UnisonoError:
            raise
        except Exception as error:
            where = f"rows {_first_few(rows)} of {self._rows}"
            raise DataError(f"{where}: building the batch failed: {describe_error(error)}") from error
        return arrays, counts, work, len(pieces)

    def _check_default_count(self, counts: Mapping[str, float], rows: int) -> None:
        """Refuse to count rows by default where the first axis of the batch is something else.

        Raises:
            ConfigError: naming what the batch has instead.
        """
        if EVERY_TERM not in counts:
            return
        task = type(self.task).__name__
        if self._capacity is not None:
            raise ConfigError(
                f"data.packing puts several samples in a row, so {task} has to say what its loss counts (e.g. tokens): "
                "define counts(batch) (docs/tasks.md#sums-and-counts)"
            )
        if counts[EVERY_TERM] != rows:
            raise ConfigError(
                f"{task}.collate made arrays of length {counts[EVERY_TERM]:g} from {rows} samples, so their first axis "
                "is not the row; define counts(batch), which returns what each term of the loss counts "
                "(docs/tasks.md#sums-and-counts)"
            )

    def _find_stand_in(self, reason: str) -> tuple[int, Any]:
        """A row of the source that can be built, and its sample; the same in every process."""
        for turn in range(_MAX_TRIES if self._stand_in is None else 0):
            row = key(self.seed, "stand-in", turn) % len(self.source)
            try:
                sample = self._sample(row, 0, _StageTimer())
                if self._capacity is None:
                    self.task.collate([sample])
                self._stand_in = row, sample
                break
            except DataError:
                continue
        if self._stand_in is None:
            raise DataError(
                f"data.on_error=mask leaves nothing to train on: a whole micro-batch and {_MAX_TRIES} other rows of "
                f"the source could not be used. First error: {reason}"
            )
        row, sample = self._stand_in
        if self._capacity is not None and require_packable(self.task).length(sample) > self._capacity:
            return row, require_packable(self.task).cut(sample, 0, self._capacity)
        return row, sample

    def _note_row(self, row: int) -> None:
        self._now[threading.get_ident()] = row

    def mark_idle(self) -> None:
        """Mark this thread as not building any row."""
        self.note_row(-1)
        self._now.pop(threading.get_ident(), None)


_PROCESS_LOCAL = ("_now", "note_row", "_kept", "_stand_in", "_contexts", "_draws")  # attributes that are not pickled
_UNUSED_CONTEXT = SampleContext(generator("unused"), training=True)  # for tasks that do not define sample()


class _ContextPool(threading.local):
    """Contexts with a keyed generator, which is reseeded, since creating one can take longer than reading a row.

    Each thread has its own. If a task has kept a reference to the last one, which its reference count shows, a new one
    is created.
    """

    def __init__(self, training: bool) -> None:
        self._training = training
        self._new()

    def _new(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._context = SampleContext(np.random.Generator(self._bits), self._training)
        self._state: Any = self._bits.state
        self._alone = self._references()

    def _references(self) -> tuple[int, int, int]:
        return sys.getrefcount(self._context), sys.getrefcount(self._context.rng), sys.getrefcount(self._bits)

    def get(self, seed: int) -> SampleContext:
        """A context whose generator equals that of `unisono.runtime.rng.generator` for an address with this key."""
        if self._references() != self._alone:
            self._new()
        self._state["state"]["key"][0] = seed
        self._bits.state = self._state
        return self._context


def build_sample(
    task: Task,
    source: Source,
    row: int,
    context: SampleContext,
    watch: _StageTimer | None = None,
    rows: str = "the source",
) -> Any:
    """Build the sample of a source row.

    Raises:
        DataError: naming the row and the line of the user's code.
    """
    watch = watch or _StageTimer()
    began = perf_counter()
    try:
        record = source[row]
        read = perf_counter()
        watch.read += read - began
        sample = task.sample(record, context)
        watch.sample += perf_counter() - read
    except UnisonoError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(f"row {row} of {rows}: building the sample failed: {describe_error(error)}") from error
    return sample


def refuse_mask(task: Task) -> None:
    """Reject `data.on_error=mask` for a task whose rows must keep their positions from step to step."""
    if isinstance(task, Recurrent):
        raise ConfigError(
            f"data.on_error=mask: {type(task).__name__} carries state from step to step, by row of the global batch, "
            "and a row that is left out would shift the others; use data.on_error=stop"
        )


def _first_few(rows: Indices) -> str:
    return ", ".join(map(str, rows[:8].tolist())) + (", …" if len(rows) > 8 else "")


def _group_by_slot(pieces: Sequence[Any], slots: Indices) -> Iterator[list[Any]]:
    places = slots.tolist()
    for _, group in groupby(range(len(pieces)), key=places.__getitem__):
        yield [pieces[number] for number in group]
