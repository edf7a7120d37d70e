"""Finds all recordings that cannot be decoded, before a run does; parallel and resumable.

The result is a JSON Lines file for `open_recordings(leave_out=…)`, with a line and a reason per bad row.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

import unisono_audio as audio
from unisono.runtime import safe_paths
from unisono.runtime.errors import BadSamplesError, DataError
from unisono.runtime.files import write_whole
from unisono.runtime.shapes import Count
from unisono_audio.sources.journal import RowNumber, chunks, read_journal
from unisono_audio.sources.source import Recordings


@dataclass(frozen=True)
class ScanResult:
    """The result of a scan.

    Attributes:
        rows: number of rows scanned, including earlier starts.
        bad: row -> why it cannot be used.
        path: of the file with the bad rows.
    """

    rows: int
    bad: dict[int, str]
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
    workers = workers or os.cpu_count() or 1
    journal = out.with_name(out.name + ".progress")
    done, bad = _load_progress(out, journal, source)
    missing = [part for part in chunks(len(source)) if part.start not in done]
    progress(len(source) - sum(map(len, missing)), len(bad))
    pool_type: Any = ThreadPoolExecutor if audio.Pipeline(features=None).native else ProcessPoolExecutor
    out.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file, pool_type(workers) as pool:
        if not file.tell():
            file.write(json.dumps({"fingerprint": source.fingerprint, "rows": len(source)}) + "\n")
        for part, found in _map_bounded(pool, source, missing, 2 * workers):
            file.write(json.dumps({"first": part.start, "rows": len(part), "bad": found}) + "\n")
            file.flush()
            bad.update(found)
            progress(len(part), len(found))
    ordered = {row: bad[row] for row in sorted(bad)}
    head = {"scanned": len(source), "bad": len(bad), "fingerprint": source.fingerprint}
    lines = [json.dumps(head), *(json.dumps({"row": row, "reason": reason}) for row, reason in ordered.items())]
    write_whole(out, "\n".join(lines) + "\n")
    journal.unlink()
    return ScanResult(len(source), ordered, out)


def _map_bounded(
    pool: Any, source: Recordings, parts: list[range], ahead: int
) -> Iterator[tuple[range, dict[int, str]]]:
    """Results in order, with a bounded number of pending requests."""
    pending = deque[tuple[range, Future[dict[int, str]]]]()
    for part in parts:
        pending.append((part, pool.submit(_scan_rows, source, part)))
        if len(pending) >= ahead:
            first, future = pending.popleft()
            yield first, future.result()
    for part, future in pending:
        yield part, future.result()


def _scan_rows(source: Recordings, part: range) -> dict[int, str]:
    """The bad rows of a chunk: number in the source -> why."""
    whole = audio.Pipeline(duration=None, features=None)
    bad: dict[int, str] = {}
    for row in part:
        number = int(source.rows[row])
        try:
            record = source[row]
            whole([record["audio"]], names=[record["name"]])  # one at a time, to limit memory
        except BadSamplesError as error:
            bad[number] = error.reasons[0]
        except DataError as error:
            bad[number] = str(error)
    return bad


class _Head(TypedDict):
    fingerprint: str


class _Bad(TypedDict):
    row: Count
    reason: str


class _Chunk(TypedDict):
    first: Count
    bad: dict[RowNumber, str]


def _read_chunks(journal: Path) -> list[dict[str, Any]]:
    """The entries of a journal: what it is of, and the chunks."""
    head, *entries = read_journal(journal, _Head, _Chunk) or [{}]
    return [head, *entries] if head else []


def _load_progress(out: Path, journal: Path, source: Recordings) -> tuple[set[int], dict[int, str]]:
    """The finished chunks, by their first row, and the bad rows in them."""
    head, *entries = _read_chunks(journal) or [{"fingerprint": source.fingerprint}]
    if head.get("fingerprint") != source.fingerprint:
        raise DataError(f"{journal} belongs to a scan of other data; remove it, or choose another out=")
    if journal.exists() or not out.exists():
        bad = {int(row): reason for entry in entries for row, reason in entry["bad"].items()}
        return {entry["first"] for entry in entries}, bad
    try:
        head, *entries = [
            safe_paths.parse_json(line, _Head if number == 0 else _Bad)
            for number, line in enumerate(safe_paths.read_regular(out).splitlines())
        ]
    except (OSError, ValueError) as error:
        raise DataError(f"{out} is not a list of a scan: {error}; remove it, or choose another out=") from error
    if head["fingerprint"] != source.fingerprint:
        return set(), {}
    return {part.start for part in chunks(len(source))}, {entry["row"]: entry["reason"] for entry in entries}
