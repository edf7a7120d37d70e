"""Finds all recordings that cannot be decoded, before a run does; parallel and resumable.

The result is a JSON Lines file for `open_recordings(leave_out=…)`, with a line and a reason per bad row.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

import unisono_audio as audio
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import BadSamplesError, DataError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count
from unisono_audio import codecs
from unisono_audio.recordings import data_of
from unisono_audio.sources.journal import RowNumber, chunks, read_journal
from unisono_audio.sources.source import Recordings

_QUIET = 1e-4  # mean square of a mix (-40 dB of full scale) below which its channels are looked at
_CANCELLED = 1e-2  # energy of a mix, as a share of its channels', below which they cancel each other
_Found = tuple[dict[int, str], list[int]]  # bad rows, and those whose channels cancel each other


@dataclass(frozen=True)
class ScanResult:
    """The result of a scan.

    Attributes:
        rows: number of rows scanned, including earlier starts.
        bad: row -> why it cannot be used.
        cancelled: rows whose channels cancel each other in the mix, which is next to silence.
        path: of the file with the bad rows.
    """

    rows: int
    bad: dict[int, str]
    cancelled: list[int]
    path: Path


def scan(
    source: Recordings,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda rows, bad: None,
) -> ScanResult:
    """Decode every recording completely, and record those that cannot be decoded.

    Progress is saved next to the result, so an interrupted scan can resume. A finished scan is only repeated if the
    data have changed.

    Args:
        source: the recordings.
        out: the file to write, `*.jsonl`.
        workers: number of threads, or of processes without the native core; None for the number of cores.
        progress: called with the numbers of rows and bad rows since the last call.

    Raises:
        DataError: if `out` belongs to other data.
    """
    workers = workers or usable_cores()
    journal = out.with_name(out.name + ".progress")
    done, bad, cancelled = _load_progress(out, journal, source)
    missing = [part for part in chunks(len(source)) if part.start not in done]
    progress(len(source) - sum(map(len, missing)), len(bad))
    pool_type: Any = ThreadPoolExecutor if audio.Pipeline(features=None).native else ProcessPoolExecutor
    out.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file, pool_type(workers) as pool:
        if not file.tell():
            file.write(json.dumps({"fingerprint": source.fingerprint, "rows": len(source)}) + "\n")
        for part, found in _map_bounded(pool, source, missing, 2 * workers):
            unusable, silent = found
            file.write(
                json.dumps({"first": part.start, "rows": len(part), "bad": unusable, "cancelled": silent}) + "\n"
            )
            file.flush()
            bad.update(unusable)
            cancelled += silent
            progress(len(part), len(unusable))
    ordered = {row: bad[row] for row in sorted(bad)}
    head = {
        "scanned": len(source), "bad": len(bad), "cancelled": sorted(cancelled), "fingerprint": source.fingerprint,
    }  # fmt: skip
    lines = [json.dumps(head), *(json.dumps({"row": row, "reason": reason}) for row, reason in ordered.items())]
    write_whole(out, "\n".join(lines) + "\n")
    journal.unlink()
    return ScanResult(len(source), ordered, sorted(cancelled), out)


def _map_bounded(pool: Any, source: Recordings, parts: list[range], ahead: int) -> Iterator[tuple[range, _Found]]:
    """Results in order, with a bounded number of pending requests."""
    pending = deque[tuple[range, Future[_Found]]]()
    for part in parts:
        pending.append((part, pool.submit(_scan_rows, source, part)))
        if len(pending) >= ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for part, future in pending:
        yield part, future.result()


def _scan_rows(source: Recordings, part: range) -> _Found:
    """The bad rows of a chunk: number in the source -> why; and those whose channels cancel each other."""
    whole = audio.Pipeline(duration=None, features=None)
    bad: dict[int, str] = {}
    cancelled: list[int] = []
    for row in part:
        number = int(source.rows[row])
        try:
            record = source[row]
            values = whole([record["audio"]], names=[record["name"]]).values  # one at a time, to limit memory
            if float(np.square(values, dtype=np.float64).mean()) < _QUIET and _cancels(record["audio"]):
                cancelled.append(number)
        except BadSamplesError as error:
            bad[number] = error.reasons[0]
        except DataError as error:
            bad[number] = str(error)
    return bad, cancelled


def _cancels(recording: Any) -> bool:
    """Whether the channels of a recording have opposite phases; a second decoding, so only of quiet ones."""
    with suppress(DataError, codecs.BadRecording, codecs.NeedsFFmpeg):
        return audio.probe(recording).channels > 1 and codecs.mono_share(data_of(recording)) < _CANCELLED
    return False


class _Head(TypedDict):
    fingerprint: str
    cancelled: NotRequired[list[Count]]


class _Bad(TypedDict):
    row: Count
    reason: str


class _Chunk(TypedDict):
    first: Count
    bad: dict[RowNumber, str]
    cancelled: NotRequired[list[Count]]


def _read_chunks(journal: Path) -> list[dict[str, Any]]:
    """The entries of a journal: what it is of, and the chunks."""
    head, *entries = read_journal(journal, _Head, _Chunk) or [{}]
    return [head, *entries] if head else []


def _load_progress(out: Path, journal: Path, source: Recordings) -> tuple[set[int], dict[int, str], list[int]]:
    """The finished chunks, by their first row, the bad rows in them, and those whose channels cancel each other."""
    head, *entries = _read_chunks(journal) or [{"fingerprint": source.fingerprint}]
    if head.get("fingerprint") != source.fingerprint:
        raise DataError(f"{journal} belongs to a scan of other data; remove it, or choose another out=")
    if journal.exists() or not out.exists():
        bad = {int(row): reason for entry in entries for row, reason in entry["bad"].items()}
        return (
            {entry["first"] for entry in entries}, bad, [row for entry in entries for row in entry.get("cancelled", ())]
        )  # fmt: skip
    try:
        head, *entries = [
            safe_paths.parse_json(line, _Head if number == 0 else _Bad)
            for number, line in enumerate(safe_paths.read_regular(out).splitlines())
        ]
    except (OSError, ValueError) as error:
        raise DataError(f"{out} is not a list of a scan: {error}; remove it, or choose another out=") from error
    if head["fingerprint"] != source.fingerprint:
        return set(), {}, []
    done = {part.start for part in chunks(len(source))}
    return done, {entry["row"]: entry["reason"] for entry in entries}, head.get("cancelled", [])
