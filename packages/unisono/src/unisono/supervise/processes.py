"""Processes as the kernel shows them in /proc: whether they are alive, their state, and how to kill them.

A process is identified by its id and its start time, since ids are reused.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PATIENCE = 5.0  # seconds for killed processes to disappear
STATES = {
    "T": "stopped by a signal such as SIGSTOP",
    "t": "stopped by a debugger",
    "D": "in kernel I/O, which nothing can interrupt",
}


@dataclass(frozen=True)
class Process:
    """One line of /proc/PID/stat.

    Attributes:
        pid: Process id.
        state: Kernel state letter: R, S, D, T, t, Z, …
        parent: Process id of its parent.
        group: Its process group.
        start_time: In ticks since the host booted.
    """

    pid: int
    state: str
    parent: int
    group: int
    start_time: int


def find_process(pid: int) -> Process | None:
    """Return a living process; None if it is gone or a zombie."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    rest = text.rpartition(")")[2].split()  # the process name may contain anything
    if rest[0] in "ZXx":
        return None
    return Process(pid, rest[0], int(rest[1]), int(rest[2]), int(rest[19]))


def refresh(process: Process) -> Process | None:
    """Return the current state of a process, if it still exists."""
    now = find_process(process.pid)
    return now if now is not None and now.start_time == process.start_time else None


def list_processes() -> list[Process]:
    """Return all living processes."""
    found = (find_process(int(path.name)) for path in _PROC.iterdir() if path.name.isdigit())
    return [process for process in found if process is not None]


def find_descendants(roots: Iterable[Process]) -> list[Process]:
    """Return the living ones of some processes seen earlier, with their descendants and the groups they led.

    A process whose parent is gone is still in its ancestor's group, unless it left on purpose. The calling process is
    never included.
    """
    living = {process.pid: process for process in list_processes() if process.pid != os.getpid()}
    here, groups = set(), set()
    for root in roots:
        now = living.get(root.pid)
        if now is None or now.start_time == root.start_time:  # otherwise the id has been reused
            groups.add(root.pid)
            here |= {root.pid} & living.keys()
    while True:
        more = {p.pid for p in living.values() if p.parent in here or p.group in groups | here} - here
        if not more:
            return [living[pid] for pid in here]
        here |= more


def kill_all(roots: Iterable[Process]) -> list[Process]:
    """Kill processes and their descendants; return those that still exist after some seconds."""
    seen = {process.pid: process for process in roots}
    deadline = time.monotonic() + _PATIENCE
    while left := find_descendants(seen.values()):  # repeated, since a process may have started another meanwhile
        for process in left:
            seen[process.pid] = process  # its parent may be gone before it is, and it in a group of its own
            with suppress(ProcessLookupError, PermissionError):
                if refresh(process):
                    os.kill(process.pid, signal.SIGKILL)
                    os.kill(process.pid, signal.SIGCONT)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


def handles_signal(pid: int, number: int) -> bool:
    """Whether a process handles a signal that would otherwise kill it."""
    with suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def describe_kernel_state(pid: int) -> str:
    """Return what the kernel reports about a process, as far as permissions allow."""
    parts = []
    for name in ("wchan", "syscall", "stack"):
        with suppress(OSError):
            if text := (_PROC / str(pid) / name).read_text(errors="replace").strip():
                parts.append(f"{name}: {text}")
    return "\n".join(parts)


def die_with_process(parent: int | None, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (on Linux); at once if the parent is gone.

    The parent is the thread that started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, on this host or in this control group."""
    counts = [0]
    with suppress(OSError, ValueError):
        for line in (_PROC / "vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                counts.append(int(line.split()[1]))
    with suppress(OSError, ValueError, IndexError):
        group = (_PROC / "self" / "cgroup").read_text().rpartition("::")[2].splitlines()[0]
        for line in Path("/sys/fs/cgroup", group.lstrip("/"), "memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                counts.append(int(line.split()[1]))
    return max(counts)
