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
import platform
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from filelock import FileLock, Timeout

from unisono.data.shards import (
    FORMAT,
    MANIFEST,
    Lengths,
    Shards,
    Units,
    Writer,
    damaged,
    file_hash,
    manifest_of,
    read_json,
    read_manifest,
    sync_folder,
    write_json,
)
from unisono.errors import ConfigError, DataError

PLAN = "plan.json"
SHARD_MB = 64.0  # of the source, per shard
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

    column: str
    dtype: str
    of: Mapping[str, Any]
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
        """Write what travels with the shards (a tokenizer), unless it is there; called once, by one process at a time."""


@dataclass(frozen=True)
class Share:
    """The `number`-th of `count` shares of the shards, counted from 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def of(cls, text: str) -> Share:
        """From `i/n`.

        >>> Share.of("2/3")
        Share(number=2, count=3)
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or not 1 <= int(match[1]) <= int(match[2]):
            raise ConfigError(
                f"shard={text}: write shard=i/n with i from 1 to n, e.g. shard=1/8 (--array=1-8 in Slurm)"
            )
        return cls(int(match[1]), int(match[2]))

    def shards(self, total: int) -> range:
        """Which of `total` shards are its own.

        >>> [list(Share(i, 3).shards(7)) for i in (1, 2, 3)]
        [[0, 1], [2, 3], [4, 5, 6]]
        """
        return range((self.number - 1) * total // self.count, self.number * total // self.count)


@dataclass(frozen=True)
class _Shard:
    """One shard of a plan: its number, how many there are, and the records it is made of."""

    number: int
    total: int
    first: int
    last: int

    @property
    def stem(self) -> str:
        return f"shard-{self.number:05d}-of-{self.total:05d}"

    @property
    def file(self) -> str:
        return f"{self.stem}.arrow"

    @property
    def note(self) -> str:
        return f"{self.stem}.json"


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


def bounds_by_units(lengths: Lengths, shards: int) -> list[int]:
    """Bounds of shards with about equally many units, each with at least one of the rows.

    Args:
        lengths: units per row, (rows,).
        shards: at most as many as rows.
    """
    ends, places = np.cumsum(lengths), np.arange(1, shards)
    wanted = np.searchsorted(ends, places * int(ends[-1]) / shards) + 1
    wanted = np.maximum.accumulate(wanted - places) + places  # ascending, by at least one row …
    wanted = np.clip(wanted, places, len(lengths) - shards + places)  # … up to both ends
    return [0, *wanted.tolist(), len(lengths)]


def prepare(
    preparation: Preparation,
    folder: Path,
    *,
    share: Share = Share(),  # noqa: B008 - frozen
    workers: int = 1,
    kind: Literal["threads", "processes"] = "threads",
    shard_mb: float | None = None,
    told: Told | None = None,
) -> Shards | None:
    """Make what is missing of a folder.

    Args:
        preparation: what to make.
        folder: for the shards; another process at the same share is waited for.
        share: of the shards, where others make the rest.
        workers: shards that are made at the same time.
        kind: processes where Python itself is what takes the time.
        shard_mb: MB of the source per shard; None for 64, or what the folder was begun with.
        told: called as rows are made; from any thread.

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
            _make_all(maker, folder, own, workers, kind, told or _silent)
            if share.count > 1:
                return None
            with _held(folder, "plan"):
                return merge(folder)


def merge(folder: Path) -> Shards:
    """Put the shares of a folder together: check that all shards are there, and of one and the same, and finish it.

    Raises:
        DataError: naming what is missing, left over, damaged or of another source or tokenizer.
    """
    if (folder / MANIFEST).is_file():
        finished = Shards(folder)
        finished.verify()
        return finished
    if not (folder / PLAN).is_file():
        raise DataError(
            f"{folder} has no {PLAN}: nothing was prepared there; `unisono data prepare … out={folder}` does"
        )
    shards = _shards_of(read_json(folder / PLAN)["bounds"])
    missing = [shard.number for shard in shards if not (folder / shard.note).is_file()]
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} of {len(shards)} shards are missing ({_ranges(missing)}); make them by "
            "`unisono data prepare`, with the same words and with shard=i/n for each share that has not ended well"
        )
    known = {shard.note for shard in shards} | {shard.file for shard in shards}
    others = sorted(path.name for path in folder.glob("shard-*-of-*.*") if path.suffix in (".arrow", ".json"))
    if left_over := [name for name in others if name not in known]:
        raise DataError(
            f"{folder} also holds shards of another preparation, e.g. {left_over[0]}, which would overlap with the "
            f"{len(shards)} of its plan; remove what does not belong to it"
        )
    notes = [read_json(folder / shard.note) for shard in shards]
    for shard, note in zip(shards, notes, strict=True):
        if note["range"] != [shard.first, shard.last]:
            raise DataError(
                f"{folder / shard.note} is of the records {note['range']}, but by the plan this shard has "
                f"[{shard.first}, {shard.last}]: rows would be missing or occur twice; remove it and make it again"
            )
        for what in ("column", "dtype", "of"):
            if note[what] != notes[0][what]:
                raise DataError(
                    f"{folder}: {shard.file} and {shards[0].file} were not made of the same: "
                    f"{_difference(note[what], notes[0][what], what)}; make all shares from the same files with the "
                    "same tokenizer"
                )
    with ThreadPoolExecutor(_cores()) as pool:
        hashes = pool.map(lambda shard: file_hash(folder / shard.file), shards)
        for shard, note, found in zip(shards, notes, hashes, strict=True):
            if found != note["sha256"]:
                (folder / shard.note).unlink()  # so that it is made again
                raise damaged(folder / shard.file, "its hash is not the one that was noted when it was written")
    entries = [{"file": shard.file, **_entry(note)} for shard, note in zip(shards, notes, strict=True)]
    manifest = manifest_of(notes[0]["column"], notes[0]["dtype"], notes[0]["of"], entries)
    if not manifest["rows"]:
        raise DataError(f"{folder}: no row was made of any record; is there text in the documents?")
    write_json(folder / MANIFEST, manifest)
    _clean(folder)
    return Shards(folder)


def reshard(folder: Path, shards: int, out: Path, told: Told | None = None) -> Shards:
    """The same rows in the same order in another number of shards of about equally many units, in another folder.

    Raises:
        DataError: for more shards than rows, or data that are not finished or damaged.
    """
    source = Shards(folder)
    if not 1 <= shards <= len(source):
        raise DataError(f"shards={shards}: {folder} has {len(source)} rows, so 1 to {len(source)} shards can be made")
    if out.resolve() == folder.resolve():
        raise DataError(f"out={out} is the folder that is read; choose another one")
    source.verify()
    made = prepare(Resharding(folder, shards), out, told=told)
    assert made is not None and made.fingerprint == source.fingerprint
    return made


class Resharding:
    """Rows that were made before, as records.

    Args:
        folder: finished.
        shards: into which they go.
    """

    def __init__(self, folder: Path, shards: int) -> None:
        self._folder, self._shards = folder, shards
        self._source = Shards(folder)
        manifest = self._source.manifest
        self.column, self.dtype, self.of = manifest["column"], manifest["dtype"], manifest["of"]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._folder, self._shards)

    @property
    def records(self) -> int:
        """Rows."""
        return len(self._source)

    @property
    def asked(self) -> Mapping[str, Any]:
        """The rows, and the number of shards."""
        return {"content": self._source.fingerprint, "shards": self._shards}

    def bounds(self, shard_mb: float) -> Sequence[int]:
        """Such that shards have about equally many units."""
        return bounds_by_units(self._source.lengths, self._shards)

    def begin(self, folder: Path) -> Maker:
        """Copy what travels with the shards."""
        shards = {entry["file"] for entry in self._source.manifest["shards"]}
        for path in self._folder.iterdir():
            own = path.name in shards | {MANIFEST, PLAN} or path.suffix == ".writing" or path.name.startswith(".")
            if path.is_file() and not own:
                shutil.copyfile(path, folder / path.name)
        return self

    def make(self, first: int, last: int) -> Iterator[Made]:
        """The rows as they are."""
        begin = 0
        for values, lengths in self._source.batches():
            low, high = max(first - begin, 0), min(last - begin, len(lengths))
            if low < high:
                ends = np.concatenate([[0], np.cumsum(lengths)])
                left_out = self._source.manifest["left_out"] if begin + low == 0 else 0
                yield Made(values[ends[low] : ends[high]], lengths[low:high], high - low, left_out)
            begin += len(lengths)


# one folder -------------------------------------------------------------------------------------------------------


def _planned(preparation: Preparation, folder: Path, shard_mb: float | None) -> list[_Shard]:
    """The shards of a folder; their bounds are written before anything else."""
    if not preparation.records:
        raise DataError(f"{folder}: there is nothing to prepare, the source has no records")
    asked = json.loads(json.dumps(preparation.asked))
    path = folder / PLAN
    if not path.is_file():
        if others := sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")):
            raise DataError(
                f"{folder} is not empty and was not prepared by Unisono (it has {others[0]}); choose another"
            )
        bounds = list(preparation.bounds(shard_mb or SHARD_MB))
        assert bounds[0] == 0 and bounds[-1] == preparation.records
        write_json(path, {"format": FORMAT, "asked": asked, "shard_mb": shard_mb or SHARD_MB, "bounds": bounds})
    found = read_json(path)
    if found.get("format") != FORMAT or found["asked"] != asked:
        raise DataError(
            f"{folder} was begun with something else: {_difference(found.get('asked'), asked, 'asked')} (there, here); "
            "choose another folder (out=…), or remove this one"
        )
    if shard_mb is not None and found["shard_mb"] != shard_mb:
        raise DataError(
            f"{folder} was begun with shard_mb={found['shard_mb']:g}, not {shard_mb:g}: leave it out, or choose another "
            "folder (out=…)"
        )
    return _shards_of(found["bounds"])


def _shards_of(bounds: Sequence[int]) -> list[_Shard]:
    return [_Shard(i, len(bounds) - 1, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)]


def _finished(folder: Path, shards: list[_Shard], maker: Maker) -> bool:
    """Whether all is there. Where a shard of a finished folder is not what it was, the folder is unfinished again."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = read_manifest(folder)
    if manifest["of"] != dict(maker.of):
        raise DataError(
            f"{folder} holds rows that were made of something else: {_difference(manifest['of'], dict(maker.of), 'of')} "
            "(there, here); choose another folder (out=…), or remove this one"
        )
    whole = {
        entry["file"]: entry for entry in manifest["shards"] if file_hash(folder / entry["file"]) == entry["sha256"]
    }
    if len(whole) == len(shards):
        _clean(folder)
        return True
    for shard in shards:
        if shard.file in whole:
            write_json(folder / shard.note, _note(shard, maker, whole[shard.file]))
    (folder / MANIFEST).unlink()
    sync_folder(folder)
    return False


def _make_all(maker: Maker, folder: Path, shards: list[_Shard], workers: int, kind: str, told: Told) -> None:
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
    stopped = threading.Event()

    def counted(records: int, units: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        told(records, units)

    pool: Executor
    if kind == "processes":
        spawn = multiprocessing.get_context("spawn")  # forking a process with threads can deadlock
        pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_end_with_parent)
        jobs: dict[Future[dict[str, Any]], _Shard] = {
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


def _make(maker: Maker, folder: Path, shard: _Shard, told: Told | None) -> dict[str, Any]:
    """Make one shard and the note beside it; each appears by one rename."""
    temporary = folder / f"{shard.stem}.{platform.node()}-{os.getpid()}.writing"
    records = left_out = 0
    try:
        with Writer(temporary, maker.column, maker.dtype) as writer:
            for made in maker.make(shard.first, shard.last):
                writer.add(made.values, made.lengths)
                records, left_out = records + made.records, left_out + made.left_out
                if told is not None:
                    told(made.records, len(made.values))
            entry = {**writer.close(), "left_out": left_out}
        assert records == shard.last - shard.first, f"{records} records of {shard}"
        temporary.replace(folder / shard.file)
        sync_folder(folder)
        note = _note(shard, maker, entry)
        write_json(folder / shard.note, note)
        return note
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"{folder}: no room for shard {shard.number} of {shard.total} ({os.strerror(error.errno)}). What is "
                "there stays; make room and give the same command again, which goes on from there"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _note(shard: _Shard, maker: Maker, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_entry(entry),
        "format": FORMAT,
        "range": [shard.first, shard.last],
        "column": maker.column,
        "dtype": maker.dtype,
        "of": dict(maker.of),
    }


def _entry(note: Mapping[str, Any]) -> dict[str, Any]:
    """What the manifest says of a shard."""
    names = ("rows", "units", "left_out", "bytes", "sha256", "content", "shortest", "longest", "mean")
    return {name: note[name] for name in names}


def _is_made(folder: Path, shard: _Shard, maker: Maker) -> bool:
    path = folder / shard.note
    if not path.is_file():
        return False
    note = read_json(path)
    if note["range"] != [shard.first, shard.last] or note["of"] != dict(maker.of):
        raise DataError(
            f"{path} was made of something else: {_difference(note['of'], dict(maker.of), 'of')} (there, here); choose "
            "another folder (out=…), or remove this one"
        )
    return file_hash(folder / shard.file) == note["sha256"]


def _clean(folder: Path) -> None:
    """Remove what a finished folder does not need."""
    for path in [*folder.glob("shard-*-of-*.json"), *folder.glob("*.writing")]:
        path.unlink(missing_ok=True)


class _StoppedError(Exception):
    """Another shard could not be made."""


def _end_with_parent() -> None:
    """End a worker process whose parent was killed: a pool's processes would wait for work for ever."""
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


def _difference(there: Any, here: Any, name: str) -> str:
    """The first keys in which two JSON values differ."""
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        differing = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
        return "; ".join(_difference(there.get(key), here.get(key), key) for key in differing[:3])
    return f"{name} is {there!r} and {here!r}"


def _ranges(numbers: list[int]) -> str:
    """Numbers for people.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0 to 2, 5, 7 to 8'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    told = [" to ".join(map(str, part)) for part in parts]
    return ", ".join(told[:5]) + (", …" if len(told) > 5 else "")


def _silent(records: int, units: int) -> None:
    pass


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
