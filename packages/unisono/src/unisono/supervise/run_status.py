"""What a run's folder says about it at a glance: whether it trains, how far it is, how large; for lists and watching.

Only the end of `events.jsonl` is read, so a list of long runs is quick. The folder may be anybody's: nothing in it is
followed, and what is damaged is left out.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config import CONFIG_FILE
from unisono.observe import events
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.supervise import run_facts, run_lock

_TAIL = 256 << 10  # bytes of events that are read


@dataclass(frozen=True)
class RunStatus:
    """A run, as its folder shows it.

    Attributes:
        folder: Of the run.
        state: As in `run_facts.RunFacts`.
        code: Exit code of a run that failed or was stopped; None if none is recorded.
        step: Updates made.
        total: Updates of the whole run; None if unknown.
        loss: Of the last step; None if there is none, or it was not finite.
        age: Seconds since something was last recorded.
        place: Host and process that train it; empty if none does.
    """

    folder: Path
    state: run_facts.State
    code: int | None
    step: int
    total: int | None
    loss: float | None
    age: float
    place: str

    @property
    def is_running(self) -> bool:
        """Whether a process trains it, as far as can be seen from here."""
        return self.state == "running"

    @property
    def outcome(self) -> str:
        """The state, with the exit code of a failure."""
        return f"{self.state} (exit code {self.code})" if self.state == "failed" else self.state

    @property
    def progress(self) -> str:
        """The step, of how many."""
        return f"{self.step}/{self.total}" if self.total else str(self.step)


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / CONFIG_FILE).is_file()


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, or that folder itself if it is a run."""
    if is_run(folder):
        return [folder]
    try:
        return sorted(path for path in folder.iterdir() if is_run(path))
    except OSError:
        return []


def read_status(folder: Path) -> RunStatus:
    """Return the status of a run."""
    holder = run_lock.find_holder(folder)  # before the events, which are complete if there is none
    seen, written = read_tail(folder)
    steps = events.step_events(seen)
    step = int(steps[-1]["step"]) if steps else 0
    loss = steps[-1]["loss"] if steps else None
    total = run_facts.planned_steps(folder)
    place = f"{one_line(holder['host'], 60)} (pid {one_line(holder['pid'], 20)})" if holder else ""
    state: run_facts.State = "running"
    code: int | None = None
    if holder is None:
        state, code, _ = run_facts.find_state(folder, step, total)
    return RunStatus(folder, state, code, step, total, loss, max(0.0, time.time() - written), place)


def read_tail(folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Return the newest events of a run, and when something was last recorded."""
    try:
        with safe_paths.open_inside(folder, "events.jsonl") as file:
            facts = os.fstat(file.fileno())
            file.seek(max(0, facts.st_size - _TAIL))
            text = file.read(_TAIL).decode("utf-8", errors="replace")
    except OSError:
        with suppress(OSError):
            return [], (folder / CONFIG_FILE).stat().st_mtime
        return [], time.time()
    return events.parse_events(text), facts.st_mtime


def measure_size(folder: Path) -> int:
    """Return the bytes that a folder's files take; links are not followed."""
    return sum(facts.st_blocks * 512 for facts in _walk(folder) if stat.S_ISREG(facts.st_mode))


def _walk(folder: Path) -> Iterator[os.stat_result]:
    waiting = [str(folder)]
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    yield entry.stat(follow_symlinks=False)
