"""Finds all recordings that cannot be decoded, before a run does; parallel and resumable.

The result is a JSON Lines file for `open_recordings(leave_out=…)`, with a line and a reason per bad row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from unisono import audio
from unisono.data.recordings.source import Recordings
from unisono.runtime.errors import BadSamplesError, DataError
from unisono.runtime.files import write_whole

_CHUNK_ROWS = 64  # rows that a worker decodes before it reports progress


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
    progress(len(done), len(bad))
    missing = [first for first in range(0, len(source), _CHUNK_ROWS) if first not in done]
    pool_type: Any = ThreadPoolExecutor if audio.Pipeline(features=None).native else ProcessPoolExecutor
    out.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file, pool_type(workers) as pool:
        if not file.tell():
            file.write(json.dumps({"fingerprint": source.fingerprint, "rows": len(source)}) + "\n")
        for first, found in _map_bounded(pool, source, missing, 2 * workers):
            rows = min(_CHUNK_ROWS, len(source) - first)
            file.write(json.dumps({"first": first, "rows": rows, "bad": found}) + "\n")
            file.flush()
            bad.update(found)
            progress(rows, len(found))
    ordered = {row: bad[row] for row in sorted(bad)}
    head = {"scanned": len(source), "bad": len(bad), "fingerprint": source.fingerprint}
    lines = [json.dumps(head), *(json.dumps({"row": row, "reason": reason}) for row, reason in ordered.items())]
    write_whole(out, "\n".join(lines) + "\n")
    journal.unlink()
    return ScanResult(len(source), ordered, out)


def _map_bounded(pool: Any, source: Recordings, missing: list[int], ahead: int) -> Iterator[tuple[int, dict[int, str]]]:
    """Results in order, with a bounded number of pending requests."""
    firsts, asked = iter(missing), list[tuple[int, Future[dict[int, str]]]]()
    for first in islice(firsts, ahead):
        asked.append((first, pool.submit(_scan_rows, source, first)))
    while asked:
        first, future = asked.pop(0)
        yield first, future.result()
        for following in islice(firsts, 1):
            asked.append((following, pool.submit(_scan_rows, source, following)))


def _scan_rows(source: Recordings, first: int) -> dict[int, str]:
    """The bad rows of a chunk: number in the source -> why."""
    whole = audio.Pipeline(duration=None, features=None)
    bad: dict[int, str] = {}
    for row in range(first, min(first + _CHUNK_ROWS, len(source))):
        number = int(source.rows[row])
        try:
            record = source[row]
            whole([record["audio"]], names=[record["name"]])  # one at a time, to limit memory
        except BadSamplesError as error:
            bad[number] = error.reasons[0]
        except DataError as error:
            bad[number] = str(error)
    return bad


def _load_progress(out: Path, journal: Path, source: Recordings) -> tuple[dict[int, int], dict[int, str]]:
    """The finished chunks, by their first row, and the bad rows in them."""
    done: dict[int, int] = {}
    bad: dict[int, str] = {}
    if journal.exists():
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        head = json.loads(lines[0]) if lines and lines[0].endswith("\n") else {"fingerprint": source.fingerprint}
        if head.get("fingerprint") != source.fingerprint:
            raise DataError(f"{journal} belongs to a scan of other data; remove it, or choose another out=")
        for line in lines[1:]:
            if line.endswith("\n"):  # the last line may be truncated
                entry = json.loads(line)
                done[entry["first"]] = entry["rows"]
                bad.update({int(row): reason for row, reason in entry["bad"].items()})
    elif out.exists():
        head, *entries = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if head.get("fingerprint") == source.fingerprint:
            done = dict.fromkeys(range(0, len(source), _CHUNK_ROWS), _CHUNK_ROWS)
            bad = {entry["row"]: entry["reason"] for entry in entries}
    return done, bad
