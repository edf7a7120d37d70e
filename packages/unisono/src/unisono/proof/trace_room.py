"""The folder in which a proof keeps its traces, which may be many gigabytes: it is gone when the proof ends."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOGS = "logs-"  # how folders begin that are kept


@contextmanager
def trace_room() -> Iterator[Path]:
    """A folder for traces, removed at the end, after a SIGTERM too; only the logs of cases that failed stay."""
    folder = Path(tempfile.mkdtemp(prefix="unisono-proof-"))
    with _exit_on_termination():
        try:
            yield folder
        finally:
            _remove_traces(folder)


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """Let a SIGTERM raise, so that processes are ended and folders removed on the way out."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def leave(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one would interrupt the removal
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_traces(folder: Path) -> None:
    """Remove all but the logs of cases that failed."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
        elif not path.name.startswith(LOGS):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()
