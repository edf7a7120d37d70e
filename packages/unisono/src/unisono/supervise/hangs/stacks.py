"""The stacks of processes that may be blocked: requested by a signal, dumped by a C handler, and parsed here."""

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
from unisono.runtime.code.source_files import is_user_file, shorten_library_path
from unisono.runtime.untrusted import safe_paths
from unisono.supervise import processes

_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_WAITS = (f"torch{os.sep}distributed{os.sep}", f"engines{os.sep}torch{os.sep}parallel{os.sep}process_group.py")
_BACKWARD = f"torch{os.sep}autograd{os.sep}graph.py"


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{shorten_library_path(self.file)}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Stack:
    """What one process was doing.

    Attributes:
        text: The stacks of all threads as Python wrote them; empty if there was no answer.
        frames: Of the main thread, innermost first.
    """

    text: str = ""
    frames: tuple[Frame, ...] = ()

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of user code, which includes recipes but no library and no other part of Unisono."""
        return next((frame for frame in self.frames if is_user_file(frame.file)), None)

    @property
    def relevant_frame(self) -> Frame | None:
        """The frame to report: the user's, else the innermost."""
        return self.user_frame or next(iter(self.frames), None)

    @property
    def is_waiting(self) -> bool:
        """Whether the innermost call waits for other processes."""
        inner = next((frame.file for frame in self.frames if not _is_python_file(frame.file)), "")
        return any(part in inner for part in _WAITS)

    @property
    def is_in_backward(self) -> bool:
        """Whether the innermost call is a backward pass, which may be computing or waiting."""
        return bool(self.frames) and self.frames[0].file.endswith(_BACKWARD)


def collect_stacks(
    directory: Path, pids: Mapping[int, int], patience: float = 2.0, *, stopped: bool = False
) -> dict[int, Stack]:
    """Return the stacks of the ranks that answer in time.

    Args:
        directory: Of their heartbeats.
        pids: Process id of each rank.
        patience: Seconds for all of them together.
        stopped: Whether they are stopped and should be continued. The signal is already pending then, so it is handled
            first, and the stack shows where they were stopped.
    """
    before = {}
    for rank, pid in pids.items():
        if processes.handles_signal(pid, heartbeat.STACK_SIGNAL):
            with suppress(OSError):
                before[rank] = heartbeat.stacks_path(directory, rank).stat().st_size
                os.kill(pid, heartbeat.STACK_SIGNAL)
                if stopped:
                    os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + patience
    found: dict[int, str] = {}
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {rank: _read_after(heartbeat.stacks_path(directory, rank), size) for rank, size in before.items()}
        if now == found and all(now.values()):  # complete: nothing new since the last poll
            break
        found = now
    return {rank: parse_stack(text) for rank, text in found.items() if text}


def parse_stack(text: str) -> Stack:
    """Parse the output of `faulthandler`; the main thread comes last."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match[1], int(match[2]), match[3]))
    return Stack(text, tuple(frames))


def _read_after(path: Path, size: int) -> str:
    with suppress(OSError), safe_paths.open_inside(path.parent, path.name) as file:
        file.seek(size)
        return file.read().decode(errors="replace")
    return ""


def _is_python_file(file: str) -> bool:
    return file.startswith(("<", sysconfig.get_path("stdlib") + os.sep)) and "site-packages" not in file
