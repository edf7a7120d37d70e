"""Preemption: the signals by which schedulers and spot instances announce that a job has to end.

They are SIGTERM and SIGUSR1, and SIGHUP, which says that the terminal is gone, as when a connection of ssh breaks.

Before the first step there is nothing to lose, and the process ends at once. After that a signal is only noted, and the
synchronisation at the end of the step (`unisono.supervise.step_sync`) decides for all ranks. A thread also receives the
signals, through the interpreter's wakeup descriptor, so the deadline holds even if the main thread is in a call that
returns late or never.

Signals belong to the process and not to an object in it, so this module keeps one listener per process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from unisono.runtime.errors import Preempted
from unisono.supervise import identity

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
ENDED_BY_SIGNAL = 128  # plus the signal number: exit code of a process ended because another one failed
_EXIT_GRACE = 5.0  # seconds for a process to end by itself: before the first step, or after its last save
TOO_EARLY = "preempted before the first step of this start, so nothing is lost"

EndProcess = Callable[[Preempted], object]  # reports the reason and ends the process; called by a thread


class TooEarly(BaseException):
    """Unwinds whatever the process does before its first step, as a KeyboardInterrupt would."""


@contextmanager
def handle_signals(ends: EndProcess | None = None) -> Iterator[None]:
    """Listen for `SIGNALS`. If nested, or in a thread, only turn an early signal into `Preempted`.

    Args:
        ends: Ends the process if the main thread does not do so in time; None never forces the end.

    Raises:
        Preempted: If the process was asked to end before its first step.
    """
    global _listener
    listener = None
    if _listener is None and threading.current_thread() is threading.main_thread():
        listener = _listener = _SignalListener(ends)
    try:
        if listener is not None:
            listener.open()
        yield
    except TooEarly:
        raise Preempted(TOO_EARLY) from None
    finally:
        if listener is not None:
            listener.close()
            _listener = None


def defer_signals(deadline: float, siblings: Sequence[Mapping[str, Any]]) -> None:
    """Leave signals to the step synchronisation from now on; nothing is raised any more.

    Args:
        deadline: Seconds from the first signal to the end of the process.
        siblings: Processes of the job. A signal after one of them has ended comes from a launcher that ends the rest.
    """
    if _listener is not None:
        _listener.deadline, _listener.siblings = deadline, siblings
        _listener.is_deferred = True


def seconds_since_signal() -> float | None:
    """Return the seconds since this process was asked to end; None if it was not."""
    return None if _listener is None or _listener.signalled_at is None else time.monotonic() - _listener.signalled_at


def announce_end(why: Preempted) -> None:
    """Record why all ranks end now, whether or not this one received a signal."""
    if _listener is not None:
        _listener.signalled_at = _listener.signalled_at or time.monotonic()
        _listener.why = why


@contextmanager
def finish_before_exit() -> Iterator[None]:
    """Let the save in this context finish even after the deadline: the scheduler may kill later than announced."""
    if _listener is not None:
        _listener.running_saves += 1
    try:
        yield
    finally:
        if _listener is not None:
            _listener.running_saves -= 1
            _listener.last_save_at = time.monotonic()


@contextmanager
def forward_signals(
    to: Callable[[], Sequence[int]], ends: Callable[[], object], deadline: float
) -> Iterator[Callable[[], bool]]:
    """Pass the first signal to other processes as SIGUSR1 and let them react.

    Args:
        to: Returns the ids of these processes; none before they have started.
        ends: Ends them if they are still there some seconds after the deadline; called by a thread.
        deadline: Seconds that they have.

    Yields:
        A function that tells whether there was a signal.
    """
    over = threading.Event()

    def forward() -> bool:
        processes = to()
        for process in processes:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGUSR1)
        threading.Thread(target=lambda: over.wait(deadline + 2 * _EXIT_GRACE) or ends(), daemon=True).start()
        return bool(processes)

    listener = _listener
    if listener is None:
        yield lambda: False
        return
    listener.forward, listener.is_deferred = forward, True
    try:
        yield lambda: listener.signalled_at is not None
    finally:
        over.set()


class _SignalListener:
    """The signals that this process has received."""

    def __init__(self, ends: EndProcess | None) -> None:
        self.signalled_at: float | None = None  # when the first one arrived, by `time.monotonic`
        self.is_deferred = False  # whether the step synchronisation, or other processes, react to signals
        self.deadline = 0.0  # seconds from the first signal
        self.siblings: Sequence[Mapping[str, Any]] = ()  # see `defer_signals`
        self.why: Preempted | None = None  # the reason the process ends with, once decided
        self.running_saves, self.last_save_at = 0, 0.0  # operations that must not be interrupted
        self.forward: Callable[[], bool] | None = None  # passes on a signal; returns whether any process received it
        self._end_process, self._has_forwarded = ends, False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._descriptor = -1
        # Handlers of the user stay in place, and ignored signals stay ignored, as SIGHUP under nohup.
        self._before = {number: signal.SIG_DFL for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL}

    def open(self) -> None:
        """Start to listen; the first signal may arrive before this returns."""
        self._descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        for number in self._before:
            signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Stop listening."""
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write.close()  # ends the thread

    def after_fork(self) -> None:
        """Stop listening in a forked child, which has its parent's descriptors."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: object) -> None:
        self._note(number)
        if self.forward is not None:
            forwarded, self._has_forwarded = self._has_forwarded, True
            if not forwarded and not self.forward():
                raise TooEarly
        elif not self.is_deferred:
            raise TooEarly

    def _note(self, number: int) -> None:
        if self.signalled_at is None:
            if any(identity.is_alive(one) is False for one in self.siblings):
                os._exit(ENDED_BY_SIGNAL + number)
            self.signalled_at = time.monotonic()

    def _listen(self) -> None:
        """Note signals, and end the process if it is late."""
        while True:
            if select.select([self._read], [], [], None if self.signalled_at is None else 0.2)[0]:
                heard = self._read.recv(64)
                if not heard:
                    self._read.close()
                    return
                for number in set(heard) & set(SIGNALS) & set(self._before):
                    self._note(number)
            if self._is_late() and self._end_process is not None:
                self._end_process(self.why or Preempted(self._late_message()))

    def _is_late(self) -> bool:
        if self.signalled_at is None or self.forward is not None or self.running_saves:
            return False
        limit = self.signalled_at + (self.deadline if self.is_deferred else _EXIT_GRACE)
        after_save = self.last_save_at + _EXIT_GRACE if self.last_save_at > self.signalled_at else 0.0
        return time.monotonic() > max(limit, after_save)

    def _late_message(self) -> str:
        passed = (
            f"preempted: the deadline of {self.deadline:g} s (launch.preempt_deadline) passed before all ranks reached "
            "the end of a step, so the state is that of the newest checkpoint"
        )
        return passed if self.is_deferred else TOO_EARLY


_listener: _SignalListener | None = None


def _after_fork() -> None:
    global _listener
    if _listener is not None:
        _listener.after_fork()
        _listener = None


os.register_at_fork(after_in_child=_after_fork)
