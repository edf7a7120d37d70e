"""Preemption: SIGTERM and SIGUSR1, by which schedulers and spot machines announce that a job has to end.

Before the first step there is nothing to lose, and the process ends at once. From then on a signal is only noted, and
the next boundary (`unisono.supervise.step_sync`) decides for all ranks. A thread hears the signals too, by the
interpreter's wakeup descriptor: the main thread may be inside of a call that returns late or never, and the deadline
holds all the same.

Signals belong to the process and not to any object in it, so this module has one ear for all.
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

SIGNALS = (signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
ENDED_BY_SIGNAL = 128  # plus the signal: the exit code of a process that was ended because another one had failed
_EXIT_GRACE = (
    5.0  # seconds for a process to end by itself once it should: before the first step, or after its last save
)
TOO_EARLY = "preempted before the first step of this start, so nothing is lost"

EndProcess = Callable[[Preempted], object]  # tells why and ends the process; called by a thread


class _TooEarly(BaseException):
    """Goes through whatever the process does before its first step, as a KeyboardInterrupt would."""


@contextmanager
def handle_signals(ends: EndProcess | None = None) -> Iterator[None]:
    """While this lasts, SIGTERM and SIGUSR1 are heard. Inside of another one, or of a thread, it only tells why.

    Args:
        ends: how the process ends if it should and its main thread does not come to it; None: it does not.

    Raises:
        Preempted: if it was asked to end before its first step.
    """
    global _listener
    ear = None
    if _listener is None and threading.current_thread() is threading.main_thread():
        ear = _listener = _SignalListener(ends)
    try:
        if ear is not None:
            ear.open()
        yield
    except _TooEarly:
        raise Preempted(TOO_EARLY) from None
    finally:
        if ear is not None:
            ear.close()
            _listener = None


def defer_signals(deadline: float, siblings: Sequence[Mapping[str, Any]]) -> None:
    """From now on boundaries answer: nothing is raised any more.

    Args:
        deadline: seconds from the first signal to the end of the process.
        siblings: processes of the job. A signal after one of them has ended comes from a launcher that ends the rest.
    """
    if _listener is not None:
        _listener.deadline, _listener.siblings = deadline, siblings
        _listener.is_deferred = True


def seconds_since_signal() -> float | None:
    """Seconds since this process was asked to end; None if it was not."""
    return None if _listener is None or _listener.signalled_at is None else time.monotonic() - _listener.signalled_at


def announce_end(why: Preempted) -> None:
    """All ranks end now, for this reason, whether this one has heard a signal or not."""
    if _listener is not None:
        _listener.signalled_at = _listener.signalled_at or time.monotonic()
        _listener.why = why


@contextmanager
def finish_before_exit() -> Iterator[None]:
    """What is done here, a save, is finished even if the deadline passes: whoever set it may be late."""
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
    """While this lasts, the first signal goes to other processes as a SIGUSR1, and they answer.

    Args:
        to: the numbers of these processes; none before they are there.
        ends: ends them if they have not ended some seconds after the deadline; called by a thread.
        deadline: seconds that they have.

    Yields:
        Whether there was a signal.
    """
    over = threading.Event()

    def hear() -> bool:
        processes = to()
        for process in processes:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGUSR1)
        threading.Thread(target=lambda: over.wait(deadline + 2 * _EXIT_GRACE) or ends(), daemon=True).start()
        return bool(processes)

    ear = _listener
    if ear is None:
        yield lambda: False
        return
    ear.forward, ear.is_deferred = hear, True
    try:
        yield lambda: ear.signalled_at is not None
    finally:
        over.set()


class _SignalListener:
    """What one process has heard.

    Attributes:
        signalled_at: when it was asked first, by `time.monotonic`.
        is_deferred: whether boundaries answer, or other processes.
        deadline: seconds from then on.
        siblings: see `defer_signals`.
        why: what it ends with, once that is decided.
        running_saves: how many things must not be broken off.
        last_save_at: when the last of them was done.
        forward: does so with the first signal, and says whether there was anybody to hear it.
    """

    def __init__(self, ends: EndProcess | None) -> None:
        self.signalled_at: float | None = None
        self.is_deferred = False
        self.deadline = 0.0
        self.siblings: Sequence[Mapping[str, Any]] = ()
        self.why: Preempted | None = None
        self.running_saves, self.last_save_at = 0, 0.0
        self.forward: Callable[[], bool] | None = None
        self._end_process, self._has_forwarded = ends, False
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._descriptor = -1
        # Whoever has handlers of their own keeps them, and what is ignored stays so.
        self._before = {number: signal.SIG_DFL for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL}

    def open(self) -> None:
        """Hear from now on; the first signal may come before this returns."""
        self._descriptor = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        for number in self._before:
            signal.signal(number, self._on_signal)

    def close(self) -> None:
        """Hear no more."""
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write.close()  # ends the thread

    def after_fork(self) -> None:
        """Be deaf in a child: it has the descriptors of its parent."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            signal.signal(number, signal.SIG_DFL)

    def _on_signal(self, number: int, frame: object) -> None:
        self._note(number)
        if self.forward is not None:
            forwarded, self._has_forwarded = self._has_forwarded, True
            if not forwarded and not self.forward():
                raise _TooEarly
        elif not self.is_deferred:
            raise _TooEarly

    def _note(self, number: int) -> None:
        if self.signalled_at is None:
            if any(identity.is_alive(one) is False for one in self.siblings):
                os._exit(ENDED_BY_SIGNAL + number)
            self.signalled_at = time.monotonic()

    def _listen(self) -> None:
        """Note signals, and end the process where it should have ended."""
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
        return time.monotonic() > max(
            limit, self.last_save_at + _EXIT_GRACE if self.last_save_at > self.signalled_at else 0.0
        )

    def _late_message(self) -> str:
        if not self.is_deferred:
            return TOO_EARLY
        return (
            f"preempted: the deadline of {self.deadline:g} s (launch.preempt_deadline) passed before all ranks reached "
            "the end of a step, so the state is that of the newest checkpoint"
        )


_listener: _SignalListener | None = None


def _after_fork() -> None:
    global _listener
    if _listener is not None:
        _listener.after_fork()
        _listener = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
