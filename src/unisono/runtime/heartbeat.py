"""What a process tells of itself while it trains: a small file in shared memory, read by the monitor of its node.

A process whose interpreter is held cannot answer questions, so it is asked none: at each turn it writes down what it is
about to do, and whoever wants to know reads that, with the time since when it has been so. An update costs about a
microsecond. A record is written by one copy and carries a checksum, so a reader never takes half of it for the whole.
Times are those of `time.monotonic_ns`, the same clock for all processes of a host.

Nothing here does anything unless `start` was called, and then only for the thread that called it: what other threads
wait for is not what the training waits for.
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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns
from typing import Any

VARIABLE = "UNISONO_PULSE"  # the environment variable that names the directory; without it nothing is told
PHASES = ("start", "setup", "data", "compute", "wait", "record", "save", "evaluate", "left")
NEW_SHAPE = "a new shape"  # detail of a phase in which something is compiled that was not seen before
STACKS = getattr(signal, "SIGRTMIN", 0) + 9  # asks for all stacks; neither torch, Slurm nor glibc use it

_MAGIC = b"unisono pulse 1\n"
_HEAD = struct.Struct("<16sI")
_NOW = struct.Struct(f"<QQIqqqqbb{len(PHASES)}qH")
_DETAIL = 200  # bytes
_KEPT = 64  # durations
_STEPS = struct.Struct(f"<I{_KEPT}d")
_BEGIN = _HEAD.size
_SECOND = _BEGIN + 4 + _NOW.size + _DETAIL  # where the durations are
_SIZE = _SECOND + 4 + _STEPS.size
_OFF: AbstractContextManager[Any] = nullcontext()

# What a test wants to happen where a phase begins: called with its name, its detail and the step that is made.
hook: Callable[[str, str, int], None] | None = None


@dataclass(frozen=True)
class Record:
    """What a process told last.

    Attributes:
        rank: its number among all.
        pid: its process number.
        number: of updates of this record so far; one that does not grow tells of no progress.
        made: steps made, counted from the beginning of the run; -1 before that is known.
        phase: one of `PHASES`.
        outer: the phase around it, since a wait is part of something; of a process that has left, the one it was at.
        detail: what for, by name; of a process that has left, its exit code and that.
        since: when this was written, in ns.
        began: when the process began to tell, in ns.
        ended: when the last step ended, in ns; 0 before.
        totals: per phase the ns spent in it so far, without what was spent in phases inside it.
        durations: of the last steps, with the wait for their data, in seconds, the oldest first.
    """

    rank: int
    pid: int
    number: int
    made: int
    phase: str
    outer: str
    detail: str
    since: int
    began: int
    ended: int
    totals: dict[str, int]
    durations: tuple[float, ...]

    @property
    def step(self) -> int:
        """The step that it is at, from 1: the last one, while that is recorded, evaluated or saved, else the next."""
        return _at(self.made, self.phase, self.outer)

    @property
    def code(self) -> int | None:
        """The exit code with which it left; None if it has not."""
        return int(self.detail.partition(" ")[0]) if self.phase == "left" else None

    @property
    def awaited(self) -> str:
        """What it waits for, or has waited for until it left; empty if for nothing."""
        if self.phase == "left" and self.outer == "wait":
            return self.detail.partition(" ")[2]
        return self.detail if self.phase == "wait" else ""


class Pulse:
    """The writer of one process."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank, self.thread = directory, rank, threading.get_ident()
        self.made = -1
        self._file = os.open(file_of(directory, rank), os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, _SIZE)
        self._map = mmap.mmap(self._file, _SIZE)
        self._pid, self._number = os.getpid(), 0
        self._began = self._last = monotonic_ns()
        self._ended = 0
        self._totals = [0] * len(PHASES)
        self._durations: list[float] = []
        self._phase, self._outer, self._detail = 0, 0, b""
        self._stacks = _answering(directory, rank)
        self._write()
        self._write_durations()
        self._map[:_BEGIN] = _HEAD.pack(_MAGIC, _SIZE)

    def turn(self, phase: int, outer: int, detail: bytes) -> None:
        """From now on it is this."""
        now = monotonic_ns()
        self._totals[self._phase] += now - self._last
        self._last = now
        self._phase, self._outer, self._detail = phase, outer, detail
        self._write()

    def now(self) -> tuple[int, int, bytes]:
        """What was told last, for `turn`."""
        return self._phase, self._outer, self._detail

    def step(self, made: int, seconds: float | None) -> None:
        """So many steps are made."""
        self.made, self._ended = made, monotonic_ns()
        if seconds is not None:
            self._durations = [*self._durations[1 - _KEPT :], seconds]
            self._write_durations()
        self.turn(*self.now())

    def close(self) -> None:
        """Let go of the files; the directory belongs to whoever made it."""
        if threading.current_thread() is not threading.main_thread():
            return  # it ends the process, whose main thread may still be asked for its stack
        if self._stacks is not None:
            faulthandler.unregister(STACKS)
            signal.signal(STACKS, signal.SIG_IGN)  # what was asked for a moment ago must not end this process
            os.close(self._stacks)
        self._map.close()
        os.close(self._file)

    def _write_durations(self) -> None:
        packed = _STEPS.pack(len(self._durations), *self._durations, *[0.0] * (_KEPT - len(self._durations)))
        self._map[_SECOND:] = zlib.crc32(packed).to_bytes(4, "little") + packed

    def _write(self) -> None:
        self._number += 1
        detail = self._detail
        packed = _NOW.pack(
            self._number, self._pid, self.rank, self.made, self._last, self._began, self._ended, self._phase,
            self._outer, *self._totals, len(detail),
        ) + detail.ljust(_DETAIL, b"\0")  # fmt: skip
        self._map[_BEGIN:_SECOND] = zlib.crc32(packed).to_bytes(4, "little") + packed


class _Unchanged:
    """A context at whose end what is told is what it was at its begin."""

    __slots__ = ("_before", "_pulse")

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def __enter__(self) -> None:
        self._before = self._pulse.now()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._pulse is _pulse and self._pulse.now() != self._before:
            self._pulse.turn(*self._before)


class _Phase:
    """The context of a phase."""

    __slots__ = ("_before", "_detail", "_name", "_pulse")

    def __init__(self, pulse: Pulse, name: str, detail: str) -> None:
        self._pulse, self._name, self._detail = pulse, name, detail

    def __enter__(self) -> None:
        pulse = self._pulse
        self._before = before = pulse.now()
        # A wait is a part of what is around it; anything else stands for itself.
        outer = before[0] if before[0] != _WAIT else before[1]
        pulse.turn(_NUMBER[self._name], outer, self._detail.encode(errors="replace")[:_DETAIL])
        if hook is not None:
            hook(self._name, self._detail, making())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # After an error it stays at what failed, for whoever asks when this process is gone; `stop` may have been
        # called inside.
        if kind is None and self._pulse is _pulse:
            self._pulse.turn(*self._before)


_NUMBER = {name: number for number, name in enumerate(PHASES)}
_WAIT = _NUMBER["wait"]
_pulse: Pulse | None = None


def start(directory: Path | str, rank: int) -> None:
    """Begin to tell, into a file of a directory, and answer the question for all stacks from now on."""
    global _pulse
    stop()
    _pulse = Pulse(Path(directory), rank)


def stop(code: int | None = None) -> None:
    """Tell that this process leaves the run, with the exit code it will have, or 0 if it lives on; and no more."""
    global _pulse
    if _pulse is not None:
        last, _, detail = _pulse.now()
        _pulse.turn(_NUMBER["left"], last, b"%d %s" % (code or 0, detail[: _DETAIL - 8]))
        _pulse.close()
        _pulse = None


def phase(name: str, detail: str = "") -> AbstractContextManager[Any]:
    """The context in which this process is in a phase; it nests.

    Args:
        name: one of `PHASES`.
        detail: more of it, for people: what is waited for.
    """
    pulse = _pulse
    if pulse is None or threading.get_ident() != pulse.thread:
        return _OFF
    return _Phase(pulse, name, detail)


def unchanged() -> AbstractContextManager[Any]:
    """The context after which this process is again at what it is at now, though it `waits` meanwhile."""
    pulse = _pulse
    return _OFF if pulse is None or threading.get_ident() != pulse.thread else _Unchanged(pulse)


def step(made: int, seconds: float | None = None) -> None:
    """Tell how many steps are made, and how long the last one took, if this process has made it."""
    if _pulse is not None and threading.get_ident() == _pulse.thread:
        _pulse.step(made, seconds)


def waits(detail: str) -> None:
    """Tell that from here to the end of the context around it this is a wait for others."""
    pulse = _pulse
    if pulse is not None and threading.get_ident() == pulse.thread and pulse.now()[0] != _WAIT:
        pulse.turn(_WAIT, pulse.now()[0], detail.encode(errors="replace")[:_DETAIL])


def active() -> bool:
    """Whether this process tells anything."""
    return _pulse is not None


def making() -> int:
    """The step that this process is at, from 1; 0 before the first, and where nothing is told."""
    return 0 if _pulse is None else _at(_pulse.made, PHASES[_pulse.now()[0]], PHASES[_pulse.now()[1]])


def _at(made: int, phase: str, outer: str) -> int:
    """The step that a process is at: the last one, while it is recorded, evaluated and saved, else the next."""
    after = ("record", "save", "evaluate")
    return max(0, made if (outer if phase == "wait" else phase) in after or outer in after[1:] else made + 1)


def file_of(directory: Path, rank: int) -> Path:
    """Where a rank tells."""
    return directory / f"rank-{rank:05d}.pulse"


def stacks_of(directory: Path, rank: int) -> Path:
    """Where a rank's stacks come when it is asked for them."""
    return directory / f"rank-{rank:05d}.stacks"


def read(path: Path) -> Record | None:
    """What a process told last; None if it has told nothing yet, or the file is not one of these."""
    for _ in range(100):  # a process that writes meanwhile is soon done
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != _SIZE or content[:_BEGIN] != _HEAD.pack(_MAGIC, _SIZE):
            return None
        first, second = content[_BEGIN:_SECOND], content[_SECOND:]
        if int.from_bytes(first[:4], "little") == zlib.crc32(first[4:]):
            number, pid, rank, made, since, began, ended, now, outer, *rest = _NOW.unpack_from(first, 4)
            detail = first[4 + _NOW.size :][: rest[-1]].decode(errors="replace")
            if int.from_bytes(second[:4], "little") != zlib.crc32(second[4:]):
                continue
            count, *durations = _STEPS.unpack_from(second, 4)
            totals = dict(zip(PHASES, rest[:-1], strict=True))
            return Record(
                rank, pid, number, made, PHASES[now], PHASES[outer], detail, since, began, ended, totals,
                tuple(durations[:count]),
            )  # fmt: skip
    return None


def _answering(directory: Path, rank: int) -> int | None:
    """Have every thread's stack written into a file on demand; works while the interpreter is held."""
    if sys.platform == "win32" or not hasattr(signal, "SIGRTMIN"):
        return None
    file = os.open(stacks_of(directory, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with suppress(OSError, RuntimeError):
        faulthandler.register(STACKS, file=file, all_threads=True, chain=False)
        return file
    os.close(file)
    return None
