"""Processes of a run on this host, started as children and ended together: without torch, and without forking.

The first that fails ends the others: by SIGTERM, and by SIGKILL some seconds later. So does a Ctrl-C.
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
from typing import Any

_POLL = 0.05  # seconds between two looks at the children


class ChildrenFailedError(Exception):
    """Some of the processes did not end with exit code 0.

    Attributes:
        codes: exit codes by local rank, negative for a signal.
    """

    def __init__(self, codes: Mapping[int, int]) -> None:
        told = ", ".join(f"process {rank} with exit code {code}" for rank, code in codes.items())
        super().__init__(f"ended: {told}")
        self.codes = dict(codes)


def run(
    arguments: Sequence[str],
    variables: Sequence[Mapping[str, str]],
    grace: float,
    signals: Sequence[signal.Signals] = (signal.SIGINT,),
) -> None:
    """Run one process per set of variables, and wait for all of them.

    Args:
        arguments: of Python, e.g. `-m module folder`.
        variables: of each process, besides this one's environment.
        grace: seconds from SIGTERM to SIGKILL.
        signals: to this process, that end all of them.

    Raises:
        ChildrenFailedError: with the exit codes of those that had failed when the others were ended.
        KeyboardInterrupt: after a signal, once all have ended.
    """
    children: list[subprocess.Popen[bytes]] = []
    with _interrupting(signals):
        try:
            for own in variables:
                children.append(subprocess.Popen([sys.executable, *arguments], env={**os.environ, **own}))
            while True:
                codes = {rank: child.poll() for rank, child in enumerate(children)}
                if failed := {rank: code for rank, code in codes.items() if code}:
                    raise ChildrenFailedError({**failed, **_ended(children, grace)})
                if all(code == 0 for code in codes.values()):
                    return
                time.sleep(_POLL)
        except BaseException:
            _ended(children, grace)
            raise


def _ended(children: Sequence[subprocess.Popen[bytes]], grace: float) -> dict[int, int]:
    """End all children; exit codes of those that were there still and did not end well."""
    left = {rank: child for rank, child in enumerate(children) if child.poll() is None}
    for child in left.values():
        child.terminate()
    deadline = time.monotonic() + grace
    for child in left.values():
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
    for child in left.values():
        if child.poll() is None:
            child.kill()
            child.wait()
    return {rank: child.returncode for rank, child in left.items() if child.returncode}


@contextmanager
def _interrupting(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Have signals come as a KeyboardInterrupt; in another thread than the main one they are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
