"""Find the recordings that cannot be decoded before a run does: all of them, in parallel, resumable.

The result is a JSON Lines file that `open_recordings(leave_out=…)` takes: a line for each bad row, with the reason.
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

_CHUNK_ROWS = 64  # rows that a worker decodes before it says so


@dataclass(frozen=True)
class ScanResult:
    """What a scan found.

    Attributes:
        rows: that were looked at, now and before.
        bad: row -> why it cannot be used.
        path: the file that has them.
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
    """Decode every recording whole, and write down those that cannot be.

    Progress is kept beside the result, so an interrupted scan resumes; a finished one is not repeated unless the data
    have changed.

    Args:
        source: the recordings.
        out: the file to write, `*.jsonl`.
        workers: threads where the native core is, else processes; None for the cores.
        progress: is called with rows and bad rows since the last call.

    Raises:
        DataError: if `out` is of other data.
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
    """Results in order, with a bounded number asked for ahead."""
    firsts, asked = iter(missing), list[tuple[int, Future[dict[int, str]]]]()
    for first in islice(firsts, ahead):
        asked.append((first, pool.submit(_scan_rows, source, first)))
    while asked:
        first, future = asked.pop(0)
        yield first, future.result()
        for following in islice(firsts, 1):
            asked.append((following, pool.submit(_scan_rows, source, following)))


def _scan_rows(source: Recordings, first: int) -> dict[int, str]:
    """Bad rows of a stretch: number of the row in its source -> why."""
    whole = audio.Pipeline(duration=None, features=None)
    bad: dict[int, str] = {}
    for row in range(first, min(first + _CHUNK_ROWS, len(source))):
        number = int(source.rows[row])
        try:
            record = source[row]
            whole([record["audio"]], names=[record["name"]])  # one at a time: memory is that of the longest
        except BadSamplesError as error:
            bad[number] = error.reasons[0]
        except DataError as error:
            bad[number] = str(error)
    return bad


def _load_progress(out: Path, journal: Path, source: Recordings) -> tuple[dict[int, int], dict[int, str]]:
    """Stretches that are done, by their first row, and the bad rows among them."""
    done: dict[int, int] = {}
    bad: dict[int, str] = {}
    if journal.exists():
        lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
        head = json.loads(lines[0]) if lines and lines[0].endswith("\n") else {"fingerprint": source.fingerprint}
        if head.get("fingerprint") != source.fingerprint:
            raise DataError(f"{journal} belongs to a scan of other data; remove it, or choose another out=")
        for line in lines[1:]:
            if line.endswith("\n"):  # a last line may be cut off
                entry = json.loads(line)
                done[entry["first"]] = entry["rows"]
                bad.update({int(row): reason for row, reason in entry["bad"].items()})
    elif out.exists():
        head, *entries = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        if head.get("fingerprint") == source.fingerprint:
            done = dict.fromkeys(range(0, len(source), _CHUNK_ROWS), _CHUNK_ROWS)
            bad = {entry["row"]: entry["reason"] for entry in entries}
    return done, bad
