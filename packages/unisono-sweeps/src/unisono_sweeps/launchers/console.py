"""What launchers share that wait for runs: the last sentence of a console, and an end in order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from unisono.runtime.console import clean
from unisono.runtime.errors import Preempted
from unisono.runtime.untrusted import safe_paths

_TAIL = 1 << 16  # bytes of a console that are searched for the last sentence


def last_sentence(console: Path, code: int) -> str:
    """The last error that a run printed; if there is none, its last line, or the signal that ended it."""
    with suppress(OSError), safe_paths.open_inside(console.parent, console.name) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().decode("utf-8", errors="replace").strip().splitlines()
        said = [number for number, line in enumerate(lines) if line.startswith("unisono: ")]
        if code > 0 and said:
            text = lines[said[-1]].removeprefix("unisono: ").removeprefix("error: ")
            return clean(" ".join([text, *lines[said[-1] + 1 :]]))
        if code > 0 and lines:
            return clean(lines[-1])
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}, without a message"


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """SIGTERM, as a scheduler sends it, and SIGHUP of a terminal that is gone end the sweep in the order of Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise Preempted("the sweep was asked to end; the same command resumes it")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
