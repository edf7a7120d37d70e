"""Child processes that this one starts and waits for: forks of a server, or new processes, behind one interface.

Each leads a session of its own, so that what a terminal sends to this process does not reach it, and ends with this
process, however that ends (on Linux).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from unisono.launch.processes.fork_server import ForkServer

_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_PATIENCE = 5.0  # seconds for a process that was killed to be gone
_TICK = 0.1  # seconds between two looks at processes that are no forks


class ChildProcesses(Protocol):
    """Processes that were started together.

    Attributes:
        pids: their numbers, in order.
        codes: exit codes of those that have ended, by place, as `subprocess` has them.
    """

    pids: list[int]
    codes: dict[int, int]

    def wait_for_exit(self, seconds: float) -> None:
        """See which have ended, waiting at most so long for one."""
        ...


class ForkedProcesses:
    """Forks of a server."""

    def __init__(
        self, server: ForkServer, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
    ) -> None:
        self._server = server
        self.pids = server.fork(module, arguments, environments)
        self.codes: dict[int, int] = {}

    def wait_for_exit(self, seconds: float) -> None:
        """See which have ended."""
        try:
            ended = self._server.collect_exit_codes(seconds)
        except OSError:  # the kernel has ended them with it
            ended = dict.fromkeys(self.pids, -int(signal.SIGKILL))
        for place, pid in enumerate(self.pids):
            if pid in ended:
                self.codes.setdefault(place, ended[pid])


class SpawnedProcesses:
    """New processes."""

    def __init__(self, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._processes = [
            subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True)
            for environment in environments
        ]
        self.pids = [process.pid for process in self._processes]
        self.codes: dict[int, int] = {}

    def wait_for_exit(self, seconds: float) -> None:
        """See which have ended."""
        deadline = time.monotonic() + seconds
        while True:
            for place, process in enumerate(self._processes):
                if (code := process.poll()) is not None:
                    self.codes[place] = code
            left = deadline - time.monotonic()
            if left <= 0 or len(self.codes) == len(self._processes):
                return
            time.sleep(min(_TICK, left))


def start_children(
    server: ForkServer | None, module: str, arguments: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> ChildProcesses:
    """Start a process for each environment, which runs a module with these arguments.

    Args:
        server: forks them, if it can; None: they are new processes.
        module: has a `main` that takes the arguments, and runs it where the module is started.
        arguments: of the module.
        environments: of the processes.
    """
    if server is not None and server.ready:
        return ForkedProcesses(server, module, arguments, environments)
    return SpawnedProcesses(module, arguments, environments)


def wait_for_children(children: ChildProcesses, signals: Sequence[int]) -> dict[int, int]:
    """Wait until all have ended, or one has failed; the others are then ended, too.

    Args:
        children: that were started.
        signals: to this process, which end all of them.

    Returns:
        Exit codes by place, of all.

    Raises:
        KeyboardInterrupt: after all have ended, if one of the signals has come.
    """
    with _collect_signals(signals) as received:
        try:
            while len(children.codes) < len(children.pids) and not any(children.codes.values()) and not received:
                children.wait_for_exit(_TICK)
        finally:
            if len(children.codes) < len(children.pids):
                end_children(children, received[0] if received else signal.SIGTERM)
    if received:
        raise KeyboardInterrupt
    return children.codes


def end_children(children: ChildProcesses, number: int = signal.SIGTERM) -> None:
    """End those that are left: by a signal, and by force some seconds later."""
    for by, seconds in ((number, _GRACE), (signal.SIGKILL, _PATIENCE)):
        for place, pid in enumerate(children.pids):
            if place not in children.codes:
                with suppress(ProcessLookupError):
                    os.kill(pid, by)
        deadline = time.monotonic() + seconds
        while len(children.codes) < len(children.pids) and (left := deadline - time.monotonic()) > 0:
            children.wait_for_exit(min(_TICK, left))


@contextmanager
def _collect_signals(signals: Sequence[int]) -> Iterator[list[int]]:
    """While this lasts, these signals are noted and do nothing else; then handlers are as they were."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in signals}
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for number, handler in before.items():
            if handler is not None:  # else it was not set from Python
                signal.signal(number, handler)
