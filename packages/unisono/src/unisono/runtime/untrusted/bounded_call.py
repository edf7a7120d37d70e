"""Ends somebody else's program, as a template in a sandbox is, once it takes too much time or memory.

It runs in a thread of its own, which the caller's looks at from time to time and ends by an exception. That cannot
interrupt a single operation of Python in C, so callers refuse beforehand what makes such an operation large.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from unisono.runtime.errors import DataError
from unisono.runtime.untrusted.resource_limits import peak_resident

Result = TypeVar("Result")
_LOOK = 0.05  # seconds between looks


class _TooMuch(BaseException):
    """Ends the thread; no `except Exception` of what runs there stops it."""


def call_bounded(work: Callable[[], Result], what: str, seconds: float = 5.0, size: int = 1 << 30) -> Result:
    """Call a function whose time and memory somebody else decides.

    Args:
        work: What is called, in another thread; what it raises is raised here.
        what: Its name, at the beginning of the error.
        seconds: Of processor time that it may take.
        size: Bytes by which the largest memory of this process so far may grow meanwhile, about.

    Raises:
        DataError: If it takes more.
    """
    done: list[Any] = []
    clocks: list[Callable[[], float]] = []

    def run() -> None:
        clocks.append(_own_clock())
        try:
            done.append((True, work()))
        except BaseException as error:
            done.append((False, error))

    before, reason = peak_resident(), ""
    thread = threading.Thread(target=run, name="unisono-bounded", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if done or not clocks or reason:
            continue
        with suppress(OSError):  # of a thread that has just ended
            if clocks[0]() > seconds:
                reason = f"{seconds:g} s of processor time"
            elif peak_resident() - before > size:
                reason = f"{size / (1 << 30):g} GiB of memory"
        if reason and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TooMuch))
    if not done:  # ended while it was noting its end, by our exception or for want of memory
        raise DataError(f"{what} takes more than {reason or 'the memory that there is'}; it is not for use")
    succeeded, result = done[0]
    if succeeded:
        return result  # type: ignore[no-any-return]
    if isinstance(result, _TooMuch):
        raise DataError(f"{what} takes more than {reason}; it is not for use") from result
    raise result


def _own_clock() -> Callable[[], float]:
    """The processor time of the thread that calls, to be asked by another; else the time that passes."""
    if hasattr(time, "pthread_getcpuclockid"):
        clock = time.pthread_getcpuclockid(threading.get_ident())
        return lambda: time.clock_gettime(clock)
    begin = time.monotonic()
    return lambda: time.monotonic() - begin
