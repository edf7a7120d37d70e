"""Prepares samples shard by shard: in parallel, in parts on several machines, and safe to interrupt at any time.

The content of a shard depends only on the source: it is a range of records, planned in advance. So the number of
workers, partitions and interruptions never change a byte of it. A shard appears atomically, followed by a note with
its hash; `manifest.json`, which marks the folder as finished, is compiled from all notes.
"""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from unisono.data.cache_lock import lock_entry
from unisono.data.prepare.manifest import (
    FORMAT,
    MANIFEST_FILE,
    Lengths,
    Plan,
    ShardNote,
    Units,
    read_json,
    read_manifest,
    write_json,
)
from unisono.data.prepare.partitions import (
    PLAN_FILE,
    Partition,
    PlannedShard,
    build_shards,
    describe_difference,
    manifest_entry,
    merge_partitions,
    remove_leftovers,
)
from unisono.data.prepare.shards import Shards, ShardWriter
from unisono.data.sources import create_cache_folder
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import DataError
from unisono.runtime.files import atomic_file, file_hash, fsync_path

SHARD_MB = 64.0  # of the source, per shard
ALL_SHARDS = Partition()
_LOCK_TIMEOUT = 3600.0  # seconds to wait for another process that prepares the same partition

ProgressCallback = Callable[[int, int], None]  # numbers of records and units since the last call


@dataclass(frozen=True)
class Made:
    """A batch of prepared rows.

    Attributes:
        values: their concatenated units, (n,).
        lengths: units of each row, (rows,).
        records: number of source records they were made from.
        left_out: number of these that gave no row.
    """

    values: Units
    lengths: Lengths
    records: int
    left_out: int = 0


class RowBuilder(Protocol):
    """Builds rows from records. Must be picklable, since it is sent to processes, and draw no random numbers."""

    @property
    def column(self) -> str:
        """Name of the shards' column."""

    @property
    def dtype(self) -> str:
        """Dtype of the units in NumPy's notation: `<u1`, `<u2` or `<u4`."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Everything that determines the rows, as JSON: the source's fingerprint, the tokenizer's digest."""

    def make(self, first: int, last: int) -> Iterator[Made]:
        """The rows of the records `first..last-1`, in order, in parts of any size."""


class Preparation(Protocol):
    """A description of the rows to prepare from a source."""

    @property
    def records(self) -> int:
        """Number of records in the source."""

    @property
    def known_inputs(self) -> Mapping[str, Any]:
        """What determines the result, as far as it is known before anything is read, as JSON."""

    def bounds(self, shard_mb: float) -> Sequence[int]:
        """The first record of each shard, and the end: ascending numbers from 0 to `records`."""

    def begin(self, folder: Path) -> RowBuilder:
        """Write files that accompany the shards (a tokenizer), unless they exist; called under a lock."""


def even_bounds(records: int, size: float, shard_mb: float, blocks: Lengths | None = None) -> list[int]:
    """Bounds of shards with equally many records.

    Args:
        records: number of records in the source.
        size: of the source, in bytes.
        shard_mb: MB of the source per shard.
        blocks: records per block, if the source is read block by block; shards then begin with a block.
    """
    count = max(1, min(records, math.ceil(size / (shard_mb * 1e6))))
    bounds = np.arange(count + 1, dtype=np.int64) * records // count
    if blocks is not None:
        starts = np.concatenate([[0], np.cumsum(blocks)])
        bounds = starts[np.searchsorted(starts, bounds)]
    return [int(bound) for bound in np.unique(np.concatenate([[0], bounds, [records]]))]


def prepare(
    preparation: Preparation,
    folder: Path,
    *,
    share: Partition = ALL_SHARDS,
    workers: int | None = 1,
    kind: Literal["threads", "processes"] = "threads",
    shard_mb: float | None = None,
    progress: ProgressCallback = lambda records, units: None,
) -> Shards | None:
    """Prepare the missing shards of a folder.

    Args:
        preparation: what to prepare.
        folder: for the shards; waits for another process that prepares the same partition.
        share: the partition to prepare.
        workers: number of shards to prepare at the same time; None for the number of cores.
        kind: use processes if most time is spent in Python.
        shard_mb: MB of the source per shard; None for 64, or the value that the folder was started with.
        progress: called as rows are prepared; by any thread, but never concurrently.

    Returns:
        The finished rows; None for one of several partitions, to be combined with `merge_partitions`.

    Raises:
        DataError: if records cannot be read, the folder contains something else, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder, f"share-{share.number}-of-{share.count}"):
            with _hold_lock(folder, "plan"):
                shards = _load_plan(preparation, folder, shard_mb)
                maker = preparation.begin(folder)
                if _is_complete(folder, shards, maker):
                    return Shards(folder)
            own = [shards[number] for number in share.shards(len(shards))]
            _make_all(maker, folder, own, workers or usable_cores(), kind, progress)
            if share.count > 1:
                return None
            with _hold_lock(folder, "plan"):
                return merge_partitions(folder)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder (out=…, or data.cache)"
        ) from error


# one folder -------------------------------------------------------------------------------------------------------


def _load_plan(preparation: Preparation, folder: Path, shard_mb: float | None) -> list[PlannedShard]:
    """The planned shards of a folder; writes the plan if there is none."""
    if not preparation.records:
        raise DataError(f"{folder}: there is nothing to prepare: the source has no records")
    inputs = json.loads(json.dumps(preparation.known_inputs))
    path = folder / PLAN_FILE
    if not path.is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.suffix != ".writing")
        if others:
            raise DataError(
                f"{folder} is not empty and has no prepared data (it contains {others[0]}); choose another folder"
            )
        bounds = list(preparation.bounds(shard_mb or SHARD_MB))
        assert bounds[0] == 0 and bounds[-1] == preparation.records
        write_json(path, {"format": FORMAT, "asked": inputs, "shard_mb": shard_mb or SHARD_MB, "bounds": bounds})
    create_cache_folder(folder)
    found = read_json(path, Plan)
    if found["format"] != FORMAT or found["asked"] != inputs:
        raise _other_data_error(f"{folder} was started with", found["asked"], inputs, "asked")
    if shard_mb is not None and found["shard_mb"] != shard_mb:
        raise DataError(
            f"{folder} was started with shard_mb={found['shard_mb']:g}, not {shard_mb:g}; omit it, or choose another "
            "folder (out=…)"
        )
    return build_shards(found["bounds"])


def _is_complete(folder: Path, shards: list[PlannedShard], maker: RowBuilder) -> bool:
    """Whether a folder is finished. If one of its shards is damaged, the folder is marked as unfinished again."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    manifest = read_manifest(folder)
    if manifest["of"] != dict(maker.inputs):
        raise _other_data_error(f"{folder} contains rows made from", manifest["of"], dict(maker.inputs), "of")
    whole = {
        entry["file"]: entry for entry in manifest["shards"] if file_hash(folder / entry["file"]) == entry["sha256"]
    }
    if len(whole) == len(shards):
        remove_leftovers(folder)
        return True
    for shard in shards:
        if shard.file in whole:
            write_json(folder / shard.note, _build_note(shard, maker, whole[shard.file]))
    (folder / MANIFEST_FILE).unlink()
    fsync_path(folder)
    return False


def _make_all(
    maker: RowBuilder, folder: Path, shards: list[PlannedShard], workers: int, kind: str, progress: ProgressCallback
) -> None:
    missing = []
    for shard in shards:
        for rest in folder.glob(f"{shard.stem}.*.writing"):
            rest.unlink()
        if _is_shard_made(folder, shard, maker):
            note = read_json(folder / shard.note, ShardNote)
            progress(shard.last - shard.first, note["units"])
        else:
            missing.append(shard)
    workers = max(1, min(workers, len(missing)))
    stopped, reporting = threading.Event(), threading.Lock()

    def counted(records: int, units: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        with reporting:
            progress(records, units)

    pool: Executor
    if kind == "processes":
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads can deadlock
        each = max(1, usable_cores() // workers)
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_init_worker, initargs=(each,))
    else:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="unisono-prepare")
    counter = None if kind == "processes" else counted
    jobs = {pool.submit(_make_shard, maker, folder, shard, counter): shard for shard in missing}
    try:
        for job in as_completed(jobs):
            note = job.result()
            if kind == "processes":
                progress(jobs[job].last - jobs[job].first, note["units"])
    except BaseException:
        stopped.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _make_shard(
    maker: RowBuilder, folder: Path, shard: PlannedShard, progress: ProgressCallback | None
) -> dict[str, Any]:
    """Write one shard and its note, each atomically."""
    records = left_out = 0
    try:
        with atomic_file(folder / shard.file) as temporary:
            with ShardWriter(temporary, maker.column, maker.dtype) as writer:
                for made in maker.make(shard.first, shard.last):
                    writer.add(made.values, made.lengths)
                    records, left_out = records + made.records, left_out + made.left_out
                    if progress is not None:
                        progress(made.records, len(made.values))
                entry = {**writer.close(), "left_out": left_out}
            assert records == shard.last - shard.first, f"{records} records of {shard}"
        note = _build_note(shard, maker, entry)
        write_json(folder / shard.note, note, lasting=False)  # a shard without a note is prepared again
        return note
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{folder}: no space for shard {shard.number} of {shard.total} ({os.strerror(error.errno)}). Finished "
                "shards are kept; free some space and run the same command again to resume"
            ) from error
        raise


def _build_note(shard: PlannedShard, maker: RowBuilder, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **manifest_entry(entry),
        "format": FORMAT,
        "range": [shard.first, shard.last],
        "column": maker.column,
        "dtype": maker.dtype,
        "of": dict(maker.inputs),
    }


def _is_shard_made(folder: Path, shard: PlannedShard, maker: RowBuilder) -> bool:
    path = folder / shard.note
    if not path.is_file():
        return False
    note = read_json(path, ShardNote)
    if note["range"] != [shard.first, shard.last] or note["of"] != dict(maker.inputs):
        raise _other_data_error(f"{path} was made from", note["of"], dict(maker.inputs), "of")
    return file_hash(folder / shard.file) == str(note["sha256"])


def _other_data_error(what: str, there: Any, here: Any, name: str) -> DataError:
    difference = describe_difference(there, here, name)
    return DataError(
        f"{what} other data or settings: {difference} (there, here); choose another folder (out=…), or remove this one"
    )


class _StoppedError(Exception):
    """Another shard has failed."""


def _init_worker(threads: int) -> None:
    """Give a worker process its share of the cores (native libraries would use all), and end it with its parent."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _hold_lock(folder: Path, name: str) -> AbstractContextManager[None]:
    """Hold a lock file of the folder; the kernel releases it when this process ends for any reason."""
    return lock_entry(folder / f".{name}", _LOCK_TIMEOUT)
