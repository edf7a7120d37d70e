"""Prepares samples shard by shard: in parallel, in parts on several machines, and safe to interrupt at any time.

What a shard holds is decided by the source alone: a range of its records, planned before anything is made. So workers,
shares and interruptions change when a shard is there and never a byte of it. A shard appears by one rename, with a note
beside it that has its hash; `manifest.json`, without which nothing takes the folder for finished, is made of all notes.
"""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from unisono.data.cache_lock import locked
from unisono.data.prepare.content_hash import Lengths, Units
from unisono.data.prepare.manifest import FORMAT, MANIFEST_FILE, read_json, read_manifest, write_json
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
from unisono.data.sources import derived
from unisono.runtime.communicator import usable_cores
from unisono.runtime.errors import DataError
from unisono.runtime.files import atomic_file, file_hash, fsync_path

SHARD_MB = 64.0  # of the source, per shard
ALL_SHARDS = Partition()
_LOCK_TIMEOUT = 3600.0  # seconds to wait for another process that is at the same share

ProgressCallback = Callable[[int, int], None]  # records and units made since the last call


@dataclass(frozen=True)
class Made:
    """Some rows, one after the other.

    Attributes:
        values: their units, (n,).
        lengths: units of each row, (rows,).
        records: of the source that they were made of.
        left_out: of these, those that no row was made of.
    """

    values: Units
    lengths: Lengths
    records: int
    left_out: int = 0


class RowBuilder(Protocol):
    """Makes rows of records. It is sent to processes, so it can be pickled; it draws no random numbers."""

    @property
    def column(self) -> str:
        """Name of the shards' column."""

    @property
    def dtype(self) -> str:
        """Of the units, as NumPy writes it: `<u1`, `<u2`, `<u4`."""

    @property
    def of(self) -> Mapping[str, Any]:
        """All that decides what is made, as JSON: the source's fingerprint, the tokenizer's digest."""

    def make(self, first: int, last: int) -> Iterator[Made]:
        """The rows of the records `first..last-1`, in order, in parts of any size."""


class Preparation(Protocol):
    """What is to be made, of what."""

    @property
    def records(self) -> int:
        """Of the source."""

    @property
    def asked(self) -> Mapping[str, Any]:
        """What decides the result, as far as it is known before anything is read, as JSON."""

    def bounds(self, shard_mb: float) -> Sequence[int]:
        """Where shards begin, and the end: ascending record numbers from 0 to `records`."""

    def begin(self, folder: Path) -> RowBuilder:
        """Write what travels with the shards (a tokenizer), unless it is there; by one process at a time."""


def even_bounds(records: int, size: float, shard_mb: float, blocks: Lengths | None = None) -> list[int]:
    """Bounds of shards with equally many records.

    Args:
        records: of the source.
        size: of the source, in bytes.
        shard_mb: MB of the source that a shard is made of.
        blocks: records per block, where the source is read block by block; shards then begin with a block.
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
    progress: ProgressCallback | None = None,
) -> Shards | None:
    """Make what is missing of a folder.

    Args:
        preparation: what to make.
        folder: for the shards; another process at the same share is waited for.
        share: of the shards, where others make the rest.
        workers: shards that are made at the same time; None for as many as this host has cores.
        kind: processes where Python itself is what takes the time.
        shard_mb: MB of the source per shard; None for 64, or what the folder was begun with.
        progress: called as rows are made; by any thread, but never by two at once.

    Returns:
        The finished rows; None for a share of several, which `merge` puts together.

    Raises:
        DataError: for records that cannot be read, a folder that holds something else, or a disk that is full.
    """
    with _wrap_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _hold_lock(folder, f"share-{share.number}-of-{share.count}"):
            with _hold_lock(folder, "plan"):
                shards = _load_plan(preparation, folder, shard_mb)
                maker = preparation.begin(folder)
                if _is_complete(folder, shards, maker):
                    return Shards(folder)
            own = [shards[number] for number in share.shards(len(shards))]
            _make_all(maker, folder, own, workers or usable_cores(), kind, progress or _ignore_progress)
            if share.count > 1:
                return None
            with _hold_lock(folder, "plan"):
                return merge_partitions(folder)


# one folder -------------------------------------------------------------------------------------------------------


def _load_plan(preparation: Preparation, folder: Path, shard_mb: float | None) -> list[PlannedShard]:
    """The shards of a folder; their bounds are written before anything else."""
    if not preparation.records:
        raise DataError(f"{folder}: there is nothing to prepare: the source has no records")
    asked = json.loads(json.dumps(preparation.asked))
    path = folder / PLAN_FILE
    if not path.is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.suffix != ".writing")
        if others:
            raise DataError(
                f"{folder} is not empty and does not hold prepared data (it has {others[0]}); choose another folder"
            )
        bounds = list(preparation.bounds(shard_mb or SHARD_MB))
        assert bounds[0] == 0 and bounds[-1] == preparation.records
        write_json(path, {"format": FORMAT, "asked": asked, "shard_mb": shard_mb or SHARD_MB, "bounds": bounds})
    derived(folder)
    found = read_json(path)
    if found.get("format") != FORMAT or found["asked"] != asked:
        raise DataError(
            f"{folder} was begun with something else: {describe_difference(found.get('asked'), asked, 'asked')} "
            "(there, here); choose another folder (out=…), or remove this one"
        )
    if shard_mb is not None and found["shard_mb"] != shard_mb:
        raise DataError(
            f"{folder} was begun with shard_mb={found['shard_mb']:g}, not {shard_mb:g}: leave it out, or choose "
            "another folder (out=…)"
        )
    return build_shards(found["bounds"])


def _is_complete(folder: Path, shards: list[PlannedShard], maker: RowBuilder) -> bool:
    """Whether all is there. Where a shard of a finished folder is not what it was, the folder is unfinished again."""
    if not (folder / MANIFEST_FILE).is_file():
        return False
    manifest = read_manifest(folder)
    if manifest["of"] != dict(maker.of):
        raise DataError(
            f"{folder} holds rows that were made of something else: "
            f"{describe_difference(manifest['of'], dict(maker.of), 'of')} (there, here); choose another folder "
            "(out=…), or remove this one"
        )
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
    """Make the shards that are not there yet."""
    missing = []
    for shard in shards:
        for rest in folder.glob(f"{shard.stem}.*.writing"):
            rest.unlink()
        if _is_shard_made(folder, shard, maker):
            note = read_json(folder / shard.note)
            progress(shard.last - shard.first, note["units"])
        else:
            missing.append(shard)
    workers = max(1, min(workers, len(missing)))
    stopped, telling = threading.Event(), threading.Lock()

    def counted(records: int, units: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        with telling:
            progress(records, units)

    pool: Executor
    if kind == "processes":
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads can deadlock
        each = max(1, usable_cores() // workers)
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_init_worker, initargs=(each,))
        jobs: dict[Future[dict[str, Any]], PlannedShard] = {
            pool.submit(_make_shard, maker, folder, shard, None): shard for shard in missing
        }
    else:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="unisono-prepare")
        jobs = {pool.submit(_make_shard, maker, folder, shard, counted): shard for shard in missing}
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
    """Make one shard and the note beside it; each appears by one rename."""
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
        write_json(folder / shard.note, note, lasting=False)  # a shard whose note is lost is made again
        return note
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{folder}: no room for shard {shard.number} of {shard.total} ({os.strerror(error.errno)}). Finished "
                "shards are kept; free some space and give the same command again to resume"
            ) from error
        raise


def _build_note(shard: PlannedShard, maker: RowBuilder, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **manifest_entry(entry),
        "format": FORMAT,
        "range": [shard.first, shard.last],
        "column": maker.column,
        "dtype": maker.dtype,
        "of": dict(maker.of),
    }


def _is_shard_made(folder: Path, shard: PlannedShard, maker: RowBuilder) -> bool:
    path = folder / shard.note
    if not path.is_file():
        return False
    note = read_json(path)
    if note["range"] != [shard.first, shard.last] or note["of"] != dict(maker.of):
        raise DataError(
            f"{path} was made of something else: {describe_difference(note['of'], dict(maker.of), 'of')} (there, "
            "here); choose another folder (out=…), or remove this one"
        )
    return file_hash(folder / shard.file) == str(note["sha256"])


class _StoppedError(Exception):
    """Another shard could not be made."""


def _init_worker(threads: int) -> None:
    """Give a worker process its share of the cores, and end it when its parent is killed.

    A native library (tokenizers) would take all cores in each; a pool's process would wait for work for ever.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _hold_lock(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock file of the folder; the kernel lets go of it when this process ends, however it does."""
    with locked(folder / f".{name}", _LOCK_TIMEOUT):
        yield


@contextmanager
def _wrap_write_errors(folder: Path) -> Iterator[None]:
    """Say where it was that something could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder (out=…, or data.cache)"
        ) from error


def _ignore_progress(records: int, units: int) -> None:
    pass
