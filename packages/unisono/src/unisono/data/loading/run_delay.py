"""How long a thread was ready to run while others had all cores, as Linux counts it."""

from __future__ import annotations

import os
import threading
from io import FileIO


class _Delay(threading.local):
    """The count of one thread. Its file stays open, since it is read twice for each micro-batch."""

    def __init__(self) -> None:
        self._thread = 0
        self._file: FileIO | None = None

    def seconds(self) -> float:
        thread = threading.get_native_id()
        if thread != self._thread:  # the first time, or in a fork of the process that opened it
            self._thread, self._file = thread, _open()
        if self._file is None:
            return 0.0
        try:
            _, waited, _ = os.pread(self._file.fileno(), 100, 0).split()  # ns on a core and waiting; turns
            return int(waited) / 1e9
        except (OSError, ValueError):
            return 0.0


_DELAY = _Delay()


def run_delay() -> float:
    """Seconds in which this thread was ready but no core was free, since it began; 0 if the kernel does not say."""
    return _DELAY.seconds()


def _open() -> FileIO | None:
    try:
        return FileIO("/proc/thread-self/schedstat")
    except OSError:
        return None
