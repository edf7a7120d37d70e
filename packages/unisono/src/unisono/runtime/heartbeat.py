"""A process reports its progress in a small file in shared memory, which the monitor of its node reads.

A process whose interpreter is blocked cannot answer questions, so nobody asks: at each change of phase it writes down
what it is about to do and the time, and the monitor reads that. An update costs about a microsecond. Each record is
written in one copy with a checksum, so a reader never mistakes half of one for the whole.

Times are those of `time.monotonic_ns`, which all processes of a host share.

Nothing happens until `start` is called, and then only for the calling thread: training does not wait for what other
threads wait for.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

from unisono.runtime.untrusted import safe_paths

DIRECTORY_VARIABLE = "UNISONO_HEARTBEAT"  # names the directory; without it nothing is reported
PHASES = ("start", "setup", "data", "compute", "wait", "record", "save", "evaluate", "end", "left")
NEW_SHAPE = "a new shape"  # detail of a phase that compiles for a shape not seen before
STACK_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # requests all stacks; unused by torch, Slurm and glibc

_MAGIC = b"unisono pulse 2\n"
_HEAD = struct.Struct("<16sI")
_NOW = struct.Struct(f"<QQIqqqbb{len(PHASES)}qH")
_DETAIL_BYTES = 200
_MAX_DURATIONS = 64  # durations in a record
_STEPS = struct.Struct(f"<I{_MAX_DURATIONS}d")
_RECORD_OFFSET = _HEAD.size
_DURATIONS_OFFSET = _RECORD_OFFSET + 4 + _NOW.size + _DETAIL_BYTES
_SIZE = _DURATIONS_OFFSET + 4 + _STEPS.size

# For fault injection: called when a phase begins, with its name, its detail and the current step.
phase_hook: Callable[[str, str, int], None] | None = None


@dataclass(frozen=True)
class HeartbeatRecord:
    """The last report of a process.

    Attributes:
        rank: Its rank.
        pid: Its process number.
        number: How often this record has been updated; if it does not grow, there is no progress.
        steps_done: Since the beginning of the run; -1 before that is known.
        phase: One of `PHASES`.
        outer: The enclosing phase, since a wait is part of something; after leaving, the last phase before.
        detail: What the phase is for; after leaving, the exit code followed by the last detail.
        since: When this was written, in ns.
        began: When reporting began, in ns.
        totals: Nanoseconds spent in each phase so far, not counting nested phases.
        durations: Of the last steps, including the wait for their data, in seconds, oldest first.
    """

    rank: int
    pid: int
    number: int
    steps_done: int
    phase: str
    outer: str
    detail: str
    since: int
    began: int
    totals: dict[str, int]
    durations: tuple[float, ...]

    @property
    def step(self) -> int:
        """The current step, from 1: the last one while it is being recorded, evaluated or saved, else the next."""
        return _step_at(self.steps_done, self.phase, self.outer)

    @property
    def code(self) -> int | None:
        """The exit code of a process that has left; None before that."""
        return int(self.detail.partition(" ")[0]) if self.phase == "left" else None

    @property
    def wait_detail(self) -> str:
        """What it waits for, or was waiting for when it left; empty if nothing."""
        if self.phase == "left" and self.outer == "wait":
            return self.detail.partition(" ")[2]
        return self.detail if self.phase == "wait" else ""


class HeartbeatWriter:
    """The writer of one process."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank, self.thread = directory, rank, threading.get_ident()
        self.steps_done = -1
        self._file = os.open(heartbeat_path(directory, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _SIZE)
        self._map = mmap.mmap(self._file, _SIZE)
        self._pid, self._number = os.getpid(), 0
        self._began = self._last = monotonic_ns()
        self._totals = [0] * len(PHASES)
        self._durations: list[float] = []
        self._phase, self._outer, self._detail = 0, 0, ""
        self._stacks = _register_stack_dump(directory, rank)
        self._write()
        self._write_durations()
        self._map[:_RECORD_OFFSET] = _HEAD.pack(_MAGIC, _SIZE)

    def set_phase(self, phase: int, outer: int, detail: str) -> None:
        """Report a new phase."""
        now = monotonic_ns()
        self._totals[self._phase] += now - self._last
        self._last = now
        self._phase, self._outer, self._detail = phase, outer, detail
        self._write()

    def current_phase(self) -> tuple[int, int, str]:
        """The phase reported last, for `set_phase`."""
        return self._phase, self._outer, self._detail

    def step(self, steps_done: int, seconds: float | None) -> None:
        """Report the number of steps done."""
        self.steps_done = steps_done
        if seconds is not None:
            self._durations = [*self._durations[1 - _MAX_DURATIONS :], seconds]
            self._write_durations()
        self.set_phase(*self.current_phase())

    def close(self) -> None:
        """Close the files; the directory belongs to its creator."""
        if threading.current_thread() is not threading.main_thread():
            return  # a thread is ending the process, and the main thread may still be asked for its stack
        if self._stacks is not None:
            faulthandler.unregister(STACK_SIGNAL)
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # a request just sent must not end this process
            os.close(self._stacks)
        self._map.close()
        os.close(self._file)

    def _write_durations(self) -> None:
        packed = _STEPS.pack(len(self._durations), *self._durations, *[0.0] * (_MAX_DURATIONS - len(self._durations)))
        self._map[_DURATIONS_OFFSET:] = zlib.crc32(packed).to_bytes(4, "little") + packed

    def _write(self) -> None:
        self._number += 1
        detail = self._detail.encode(errors="replace")[:_DETAIL_BYTES]
        packed = _NOW.pack(
            self._number, self._pid, self.rank, self.steps_done, self._last, self._began,
            self._phase, self._outer, *self._totals, len(detail),
        ) + detail.ljust(_DETAIL_BYTES, b"\0")  # fmt: skip
        self._map[_RECORD_OFFSET:_DURATIONS_OFFSET] = zlib.crc32(packed).to_bytes(4, "little") + packed


_NUMBER = {name: number for number, name in enumerate(PHASES)}
_WAIT = _NUMBER["wait"]
_writer: HeartbeatWriter | None = None


def start(directory: Path | str, rank: int) -> None:
    """Begin to report into a file in a directory, and dump all stacks on request from now on."""
    global _writer
    stop()
    _writer = HeartbeatWriter(Path(directory), rank)


def stop(code: int | None = None) -> None:
    """Report that this process leaves the run, with its exit code (0 if it lives on), and stop reporting."""
    global _writer
    if _writer is not None:
        last, _, detail = _writer.current_phase()
        _writer.set_phase(_NUMBER["left"], last, f"{code or 0} {detail}")
        _writer.close()
        _writer = None


@contextmanager
def phase(name: str, detail: str = "") -> Iterator[None]:
    """A context during which this process is in a phase; phases nest.

    Args:
        name: One of `PHASES`.
        detail: For people, e.g. what is waited for.
    """
    writer = _own_writer()
    if writer is None:
        yield
        return
    before = writer.current_phase()
    # A wait is part of the enclosing phase; any other phase stands for itself.
    writer.set_phase(_NUMBER[name], before[0] if before[0] != _WAIT else before[1], detail)
    if phase_hook is not None:
        phase_hook(name, detail, current_step())
    # After an error the phase stays where it failed, for the report once this process is gone.
    yield
    if writer is _writer:  # `stop` may have been called inside
        writer.set_phase(*before)


def begin_end() -> None:
    """Report that all steps are done: from here on this process only closes what it has opened, and leaves."""
    if (writer := _own_writer()) is not None:
        number = _NUMBER["end"]
        writer.set_phase(number, number, "")


@contextmanager
def restore_phase() -> Iterator[None]:
    """A context that restores the current phase when it ends, even after `mark_waiting`."""
    writer = _own_writer()
    if writer is None:
        yield
        return
    before = writer.current_phase()
    yield
    if writer is _writer and writer.current_phase() != before:
        writer.set_phase(*before)


def record_step(steps_done: int, seconds: float | None = None) -> None:
    """Report how many steps are done, and how long the last one took, if this process ran it."""
    if (writer := _own_writer()) is not None:
        writer.step(steps_done, seconds)


def mark_waiting(detail: str) -> None:
    """Report that from here to the end of the enclosing context this process waits for others."""
    writer = _own_writer()
    if writer is not None and writer.current_phase()[0] != _WAIT:
        writer.set_phase(_WAIT, writer.current_phase()[0], detail)


def is_active() -> bool:
    """Whether this process reports."""
    return _writer is not None


def current_step() -> int:
    """Return the current step, from 1; 0 before the first, and if nothing is reported."""
    if _writer is None:
        return 0
    now, outer, _ = _writer.current_phase()
    return _step_at(_writer.steps_done, PHASES[now], PHASES[outer])


def _own_writer() -> HeartbeatWriter | None:
    """The writer, if this is the thread that reports."""
    return _writer if _writer is not None and threading.get_ident() == _writer.thread else None


def _step_at(steps_done: int, phase: str, outer: str) -> int:
    """Return the current step: the last one while it is being recorded, evaluated or saved, else the next."""
    after = ("record", "save", "evaluate", "end")
    phase = outer if phase in ("wait", "left") else phase
    is_after = phase in after or outer in after[1:]
    return max(0, steps_done if is_after else steps_done + 1)


def heartbeat_path(directory: Path, rank: int) -> Path:
    """The heartbeat file of a rank."""
    return directory / f"rank-{rank:05d}.pulse"


def stacks_path(directory: Path, rank: int) -> Path:
    """The file that receives the stacks of a rank on request."""
    return directory / f"rank-{rank:05d}.stacks"


def read_record(path: Path) -> HeartbeatRecord | None:
    """The last report of a process; None if there is none yet, or the file is not a heartbeat."""
    for _ in range(100):  # a concurrent write is over soon
        try:
            content = safe_paths.read_bytes(path.parent, path.name)
        except OSError:
            return None
        if len(content) != _SIZE or content[:_RECORD_OFFSET] != _HEAD.pack(_MAGIC, _SIZE):
            return None
        first, second = content[_RECORD_OFFSET:_DURATIONS_OFFSET], content[_DURATIONS_OFFSET:]
        if int.from_bytes(first[:4], "little") == zlib.crc32(first[4:]):
            number, pid, rank, steps_done, since, began, now, outer, *rest = _NOW.unpack_from(first, 4)
            detail = first[4 + _NOW.size :][: rest[-1]].decode(errors="replace")
            if int.from_bytes(second[:4], "little") != zlib.crc32(second[4:]):
                continue
            count, *durations = _STEPS.unpack_from(second, 4)
            totals = dict(zip(PHASES, rest[:-1], strict=True))
            return HeartbeatRecord(
                rank, pid, number, steps_done, PHASES[now], PHASES[outer], detail, since, began, totals,
                tuple(durations[:count]),
            )  # fmt: skip
    return None


def _register_stack_dump(directory: Path, rank: int) -> int | None:
    """Dump every thread's stack into a file on demand; works even while the interpreter is blocked."""
    if sys.platform == "win32" or not hasattr(signal, "SIGRTMIN"):
        return None
    file = os.open(stacks_path(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with suppress(OSError, RuntimeError):
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
        return file
    os.close(file)
    return None
