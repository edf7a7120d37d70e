"""The stacks of processes that may not be able to answer: asked for by a signal, written by C, read here."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.runtime import heartbeat
from unisono.supervise import processes

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OURS = str(Path(heartbeat.__file__).parents[1]) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_WAITS = (f"torch{os.sep}distributed{os.sep}", f"engines{os.sep}torch{os.sep}collective.py")
_BACKWARD = f"torch{os.sep}autograd{os.sep}graph.py"


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """What one process was at.

    Attributes:
        text: as Python wrote it, all threads; empty if it did not answer.
        frames: of the main thread, the innermost first.
    """

    text: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def own(self) -> Frame | None:
        """The innermost frame of the user's code: of no library and not of Unisono, whose recipes count as a user's."""
        return next((frame for frame in self.frames if _of_user(frame.file)), None)

    @property
    def shown(self) -> Frame | None:
        """The frame to name: the user's, else the innermost."""
        return self.own or next(iter(self.frames), None)

    @property
    def waits(self) -> bool:
        """Whether the innermost call is one that waits for other processes."""
        inner = next((frame.file for frame in self.frames if not _of_python(frame.file)), "")
        return any(part in inner for part in _WAITS)

    @property
    def backward(self) -> bool:
        """Whether the innermost call is a backward pass, which computes or waits; from here nobody knows."""
        return bool(self.frames) and self.frames[0].file.endswith(_BACKWARD)


def ask(directory: Path, pids: Mapping[int, int], patience: float = 2.0, *, stopped: bool = False) -> dict[int, Stack]:
    """The stacks of ranks, of those that answer in time.

    Args:
        directory: of their pulses.
        pids: per rank its process number.
        patience: seconds for all of them together.
        stopped: whether they are stopped, and may go on. The signal is there by then, so it comes before anything else
            that they do, and the stack is that of where they were stopped.
    """
    before = {}
    for rank, pid in pids.items():
        if processes.catches(pid, heartbeat.STACKS):
            with suppress(OSError):
                before[rank] = heartbeat.stacks_of(directory, rank).stat().st_size
                os.kill(pid, heartbeat.STACKS)
                if stopped:
                    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + patience
    found: dict[int, str] = {}
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {rank: _after(heartbeat.stacks_of(directory, rank), size) for rank, size in before.items()}
        if now == found and all(now.values()):  # nothing more came since the last look
            break
        found = now
    return {rank: parsed(text) for rank, text in found.items() if text}


def parsed(text: str) -> Stack:
    """A stack out of what `faulthandler` writes; the main thread is the last one."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]), match[3]))
    return Stack(text, tuple(frames))


def _short(file: str) -> str:
    """A file of a library as it is imported: where the library lies says nothing, and hides what does."""
    installed = file.rpartition(f"{os.sep}site-packages{os.sep}")[2]
    found = next((folder for folder in _LIBRARIES if installed.startswith(folder)), "")
    return installed.removeprefix(found)


def _after(path: Path, size: int) -> str:
    with suppress(OSError), path.open("rb") as file:
        file.seek(size)
        return file.read().decode(errors="replace")
    return ""


def _of_user(file: str) -> bool:
    if file.startswith(_OURS):
        return file.startswith(f"{_OURS}recipes{os.sep}")
    return not file.startswith(("<", *_LIBRARIES)) and f"{os.sep}site-packages{os.sep}" not in file


def _of_python(file: str) -> bool:
    return file.startswith(("<", sysconfig.get_path("stdlib") + os.sep)) and "site-packages" not in file
