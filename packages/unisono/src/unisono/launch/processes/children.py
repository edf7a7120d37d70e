"""Child processes that this one starts and waits for: forks of a server, or new processes, behind one interface.

Each leads its own session, so that signals from the terminal do not reach it, and ends when this process does, for
whatever reason (on Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from unisono.launch.processes.fork_server import ForkServer

GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_PATIENCE = 5.0  # seconds for a killed process to disappear
_TICK = 0.1  # seconds between polls


class ChildProcesses:
    """Processes that were started together.

    Args:
        pids: Their process ids, in order.
        collect: Waits at most some seconds for processes to end; returns exit codes by process id, as in `subprocess`.

    Attributes:
        pids: Their process ids, in order.
        codes: Exit codes of those that have ended, by position.
    """

    def __init__(self, pids: list[int], collect: Callable[[float], Mapping[int, int]]) -> None:
        self.pids, self._collect = pids, collect
        self.codes: dict[int, int] = {}

    def wait_for_exit(self, seconds: float) -> None:
        """Update `codes`, waiting at most `seconds` for a process to end."""
        ended = self._collect(seconds)
        for place, pid in enumerate(self.pids):
            if pid in ended:
                self.codes.setdefault(place, ended[pid])

    @property
    def living(self) -> list[int]:
        """Process ids of those that have not ended, as far as this process knows."""
        return [pid for place, pid in enumerate(self.pids) if place not in self.codes]

    def send_signal(self, number: int) -> None:
        """Send a signal to all that have not ended."""
        for pid in self.living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def start_children(
    server: ForkServer | None, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> ChildProcesses:
    """Start one process per environment, each running a module with these arguments.

    Args:
        server: Forks the processes if it can; None starts new processes.
        module: Has a `main` that takes the arguments; run as a script it calls `main`.
        arguments: Of the module.
        environments: Of the processes.
    """
    if server is not None and server.ready:
        pids = server.fork(module, arguments, environments)

        def collect_forks(seconds: float) -> Mapping[int, int]:
            try:
                return server.collect_exit_codes(seconds)
            except OSError:  # the server is gone, and the kernel has killed its forks
                return dict.fromkeys(pids, -int(signal.SIGKILL))

        return ChildProcesses(pids, collect_forks)
    command = [sys.executable, "-m", module, *arguments]
    started = [
        subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)
        for environment in environments
    ]

    def collect(seconds: float) -> Mapping[int, int]:
        time.sleep(seconds)
        return {process.pid: code for process in started if (code := process.poll()) is not None}

    return ChildProcesses([process.pid for process in started], collect)


def wait_for_children(children: ChildProcesses, signals: Sequence[int]) -> dict[int, int]:
    """Wait until all have ended or one has failed, or a signal to this process ends them; then end the rest.

    Returns:
        Exit codes of all processes by position.

    Raises:
        KeyboardInterrupt: After all have ended, if one of the signals arrived.
    """
    with _collect_signals(signals) as received:
        try:
            while children.living and not any(children.codes.values()) and not received:
                children.wait_for_exit(_TICK)
        finally:
            if children.living:
                _end_children(children, _passed_on(received[0]) if received else signal.SIGTERM)
    if received:
        raise KeyboardInterrupt
    return children.codes


def _passed_on(number: int) -> int:
    """The signal that ends the children at once: after a SIGQUIT each would write its memory into a file."""
    return number if number in (signal.SIGINT, signal.SIGTERM) else signal.SIGKILL


def _end_children(children: ChildProcesses, number: int) -> None:
    """End the remaining processes: by a signal, and some seconds later by SIGKILL."""
    for by, seconds in ((number, GRACE), (signal.SIGKILL, _PATIENCE)):
        children.send_signal(by)
        deadline = time.monotonic() + seconds
        while children.living and (left := deadline - time.monotonic()) > 0:
            children.wait_for_exit(min(_TICK, left))


@contextmanager
def _collect_signals(signals: Sequence[int]) -> Iterator[list[int]]:
    """Collect these signals without acting on them; restore the handlers at the end. nohup's SIGHUP stays ignored."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in signals}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler not set from Python
                signal.signal(number, handler)
