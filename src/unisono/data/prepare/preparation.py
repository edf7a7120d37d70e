"""Samples made ahead, shard by shard: in parallel, in shares on several machines, and as often interrupted as may be.

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
from filelock import FileLock, Timeout

from unisono.data.prepare.partitions import PLAN, Shard, Share, clean, difference, entry_of, merge, shards_of
from unisono.data.prepare.shards import (
    FORMAT,
    MANIFEST,
    Lengths,
    Shards,
    Units,
    Writer,
    read_json,
    read_manifest,
    write_json,
)
from unisono.data.sources import derived
from unisono.runtime.communicator import cores
from unisono.runtime.errors import DataError
from unisono.runtime.files import file_hash, sync, whole

SHARD_MB = 64.0  # of the source, per shard
WHOLE = Share()
_WAIT = 3600.0  # seconds to wait for another process that is at the same share

Told = Callable[[int, int], None]  # records and units made since the last call


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


class Maker(Protocol):
    """Makes rows of records. It is sent to processes, so it can be pickled; it draws no random numbers."""

    @property
    def column(self) -> str:
        """Name of the shards' column."""

    @property
    def dtype(self) -> str:
        """Of the units, as NumPy writes it: `<u2`, `<u4`."""

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

    def begin(self, folder: Path) -> Maker:
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
    share: Share = WHOLE,
    workers: int | None = 1,
    kind: Literal["threads", "processes"] = "threads",
    shard_mb: float | None = None,
    told: Told | None = None,
) -> Shards | None:
    """Make what is missing of a folder.

    Args:
        preparation: what to make.
        folder: for the shards; another process at the same share is waited for.
        share: of the shards, where others make the rest.
        workers: shards that are made at the same time; None for as many as this host has cores.
        kind: processes where Python itself is what takes the time.
        shard_mb: MB of the source per shard; None for 64, or what the folder was begun with.
        told: called as rows are made; by any thread, but never by two at once.

    Returns:
        The finished rows; None for a share of several, which `merge` puts together.

    Raises:
        DataError: for records that cannot be read, a folder that holds something else, or a disk that is full.
    """
    with _reasons(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _held(folder, f"share-{share.number}-of-{share.count}"):
            with _held(folder, "plan"):
                shards = _planned(preparation, folder, shard_mb)
                maker = preparation.begin(folder)
                if _finished(folder, shards, maker):
                    return Shards(folder)
            own = [shards[number] for number in share.shards(len(shards))]
            _make_all(maker, folder, own, workers or cores(), kind, told or _silent)
            if share.count > 1:
                return None
            with _held(folder, "plan"):
                return merge(folder)


# one folder -------------------------------------------------------------------------------------------------------


def _planned(preparation: Preparation, folder: Path, shard_mb: float | None) -> list[Shard]:
    """The shards of a folder; their bounds are written before anything else."""
    if not preparation.records:
        raise DataError(f"{folder}: there is nothing to prepare, the source has no records")
    asked = json.loads(json.dumps(preparation.asked))
    path = folder / PLAN
    if not path.is_file():
        others = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.suffix != ".writing")
        if others:
            raise DataError(f"{folder} is not empty and is no prepared data (it has {others[0]}); choose another")
        bounds = list(preparation.bounds(shard_mb or SHARD_MB))
        assert bounds[0] == 0 and bounds[-1] == preparation.records
        write_json(path, {"format": FORMAT, "asked": asked, "shard_mb": shard_mb or SHARD_MB, "bounds": bounds})
    derived(folder)
    found = read_json(path)
    if found.get("format") != FORMAT or found["asked"] != asked:
        raise DataError(
            f"{folder} was begun with something else: {difference(found.get('asked'), asked, 'asked')} (there, here); "
            "choose another folder (out=…), or remove this one"
        )
    if shard_mb is not None and found["shard_mb"] != shard_mb:
        raise DataError(
            f"{folder} was begun with shard_mb={found['shard_mb']:g}, not {shard_mb:g}: leave it out, or choose "
            "another folder (out=…)"
        )
    return shards_of(found["bounds"])


def _finished(folder: Path, shards: list[Shard], maker: Maker) -> bool:
    """Whether all is there. Where a shard of a finished folder is not what it was, the folder is unfinished again."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(folder)
    if manifest["of"] != dict(maker.of):
        raise DataError(
            f"{folder} holds rows that were made of something else: "
            f"{difference(manifest['of'], dict(maker.of), 'of')} (there, here); choose another folder (out=…), or "
            "remove this one"
        )
    whole = {
        entry["file"]: entry for entry in manifest["shards"] if file_hash(folder / entry["file"]) == entry["sha256"]
    }
    if len(whole) == len(shards):
        clean(folder)
        return True
    for shard in shards:
        if shard.file in whole:
            write_json(folder / shard.note, _note(shard, maker, whole[shard.file]))
    (folder / MANIFEST).unlink()
    sync(folder)
    return False


def _make_all(maker: Maker, folder: Path, shards: list[Shard], workers: int, kind: str, told: Told) -> None:
    """Make the shards that are not there yet."""
    missing = []
    for shard in shards:
        for rest in folder.glob(f"{shard.stem}.*.writing"):
            rest.unlink()
        if _is_made(folder, shard, maker):
            note = read_json(folder / shard.note)
            told(shard.last - shard.first, note["units"])
        else:
            missing.append(shard)
    workers = max(1, min(workers, len(missing)))
    stopped, telling = threading.Event(), threading.Lock()

    def counted(records: int, units: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        with telling:
            told(records, units)

    pool: Executor
    if kind == "processes":
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads can deadlock
        each = max(1, cores() // workers)
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin_worker, initargs=(each,))
        jobs: dict[Future[dict[str, Any]], Shard] = {
            pool.submit(_make, maker, folder, shard, None): shard for shard in missing
        }
    else:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="unisono-prepare")
        jobs = {pool.submit(_make, maker, folder, shard, counted): shard for shard in missing}
    try:
        for job in as_completed(jobs):
            note = job.result()
            if kind == "processes":
                told(jobs[job].last - jobs[job].first, note["units"])
    except BaseException:
        stopped.set()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _make(maker: Maker, folder: Path, shard: Shard, told: Told | None) -> dict[str, Any]:
    """Make one shard and the note beside it; each appears by one rename."""
    records = left_out = 0
    try:
        with whole(folder / shard.file) as temporary:
            with Writer(temporary, maker.column, maker.dtype) as writer:
                for made in maker.make(shard.first, shard.last):
                    writer.add(made.values, made.lengths)
                    records, left_out = records + made.records, left_out + made.left_out
                    if told is not None:
                        told(made.records, len(made.values))
                entry = {**writer.close(), "left_out": left_out}
            assert records == shard.last - shard.first, f"{records} records of {shard}"
        note = _note(shard, maker, entry)
        write_json(folder / shard.note, note, lasting=False)  # a shard whose note is lost is made again
        return note
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{folder}: no room for shard {shard.number} of {shard.total} ({os.strerror(error.errno)}). What is "
                "there stays; make room and give the same command again, which goes on from there"
            ) from error
        raise


def _note(shard: Shard, maker: Maker, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **entry_of(entry),
        "format": FORMAT,
        "range": [shard.first, shard.last],
        "column": maker.column,
        "dtype": maker.dtype,
        "of": dict(maker.of),
    }


def _is_made(folder: Path, shard: Shard, maker: Maker) -> bool:
    path = folder / shard.note
    if not path.is_file():
        return False
    note = read_json(path)
    if note["range"] != [shard.first, shard.last] or note["of"] != dict(maker.of):
        raise DataError(
            f"{path} was made of something else: {difference(note['of'], dict(maker.of), 'of')} (there, here); choose "
            "another folder (out=…), or remove this one"
        )
    return file_hash(folder / shard.file) == str(note["sha256"])


class _StoppedError(Exception):
    """Another shard could not be made."""


def _begin_worker(threads: int) -> None:
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
def _held(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock file of the folder; the kernel lets go of it when this process ends, however it does."""
    try:
        with FileLock(folder / f".{name}.lock", timeout=_WAIT):
            yield
    except Timeout as error:
        raise DataError(
            f"another process has been preparing {folder} ({name}) for over {_WAIT:g} s; is it alive?"
        ) from error


@contextmanager
def _reasons(folder: Path) -> Iterator[None]:
    """Say where it was that something could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{folder} cannot be written ({error.strerror or error}); choose another folder (out=…, or data.cache)"
        ) from error


def _silent(records: int, units: int) -> None:
    pass
