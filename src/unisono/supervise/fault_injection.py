"""Faults on demand, for tests of everything that has to survive them; nothing happens unless the command asks for it.

They happen where the trainer writes a heartbeat, in any task. Faults that only a task can have (another collective on
one rank, a number that is not finite, a replica that drifts) are those of `unisono.faults.task`, which harms itself.

    unisono train RECIPE --harm rank=1,step=3,phase=forward,act=kill

* rank: which process (0)
* step: from 1; what is recorded, evaluated and saved after a step belongs to it; `0` is before the first
  one; `any` (any)
* phase: one of `unisono.runtime.heartbeat` (setup, data, compute, wait, record, save, evaluate), a part of a step
  (forward, backward, reduction, optimizer), or a call that touches the disk (write, fsync, rename, remove)
* act: kill, stop (SIGSTOP), term, sleep, gil (sleep and hold the interpreter), spin (the same, busy), raise, exit0,
  abort
* nth: at which such moment of that step, from 1 (1)
* after: so many seconds later, by a thread (0); for kill, stop and term
* attempt: of `launch.max_restarts` (0, the first)

Several faults are separated by `;`. The processes of the run find them in their environment, with the process that
asked for them: once that has ended, or where it is another machine's, a variable that was left over arms nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from unisono.runtime import heartbeat
from unisono.runtime.errors import ConfigError
from unisono.supervise import identity

VARIABLE = "UNISONO_FAULT"
ATTEMPT = "UNISONO_ATTEMPT"  # which start of the processes this is, from 0
PARTS = ("forward", "backward", "reduction", "optimizer")
CALLS = ("write", "fsync", "rename", "remove")


@dataclass
class InjectedFault:
    """What shall happen, where and when."""

    act: str
    phase: str
    rank: int = 0
    step: int | None = None
    nth: int = 1
    after: float = 0.0
    attempt: int = 0

    def on_moment(self, phase: str, step: int) -> None:
        """A moment of this kind has come."""
        if phase != self.phase or (self.step is not None and step != self.step) or self.nth <= 0:
            return
        self.nth -= 1
        if self.nth == 0:
            if self.after:
                threading.Timer(self.after, ACTS[self.act]).start()
            else:
                ACTS[self.act]()


def arm(text: str | None) -> None:
    """Have this process and those that it starts make faults; None for none, whatever the environment says.

    Raises:
        ConfigError: for a text that names no fault.
    """
    os.environ.pop(VARIABLE, None)
    if text is not None:
        parse_faults(text)
        os.environ[VARIABLE] = json.dumps({"asked_by": identity.own_identity(), "faults": text})


def _asked() -> str | None:
    """The faults that a living process of this machine has asked for."""
    with suppress(ValueError, KeyError, TypeError):
        request = json.loads(os.environ.get(VARIABLE, ""))
        if identity.is_alive(request["asked_by"]):
            return str(request["faults"])
    return None


def install(rank: int) -> None:
    """Make this process have the faults that the command asks for.

    Raises:
        ConfigError: for a text that names no fault.
    """
    text = _asked()
    if not text:
        return
    attempt = int(os.environ.get(ATTEMPT, "0"))
    faults = [fault for fault in parse_faults(text) if (fault.rank, fault.attempt) == (rank, attempt)]
    if not faults:
        return
    if not heartbeat.is_active():
        heartbeat.start(tempfile.mkdtemp(prefix="unisono-fault-"), rank)
    here = threading.local()

    def see(phase: str, step: int) -> None:
        if getattr(here, "inside", False):
            return
        here.inside = True
        try:
            for fault in faults:
                fault.on_moment(phase, step)
        finally:
            here.inside = False

    heartbeat.phase_hook = lambda phase, _, step: see(phase, step)
    wanted = {fault.phase for fault in faults}
    if wanted & set(PARTS):
        _watch_parts(see)
    if wanted & set(CALLS):
        _watch_calls(see)


def parse_faults(text: str) -> list[InjectedFault]:
    """The faults that a text asks for.

    >>> parsed("rank=1,step=3,phase=compute,act=kill")
    [Fault(act='kill', phase='compute', rank=1, step=3, nth=1, after=0.0, attempt=0)]
    """
    faults = []
    for part in filter(None, text.split(";")):
        try:
            words = {key.strip(): value.strip() for key, _, value in (word.partition("=") for word in part.split(","))}
            fault = InjectedFault(act=words.pop("act"), phase=words.pop("phase"))
            step = words.pop("step", "any")
            fault.step = None if step == "any" else int(step)
            fault.after = float(words.pop("after", "0"))
            for key in [key for key in ("rank", "nth", "attempt") if key in words]:
                setattr(fault, key, int(words.pop(key)))
            known = (*heartbeat.PHASES, *PARTS, *CALLS)
            if words or fault.act not in ACTS or fault.phase not in known:
                raise ValueError(f"unknown: {', '.join(words) or f'{fault.act} or {fault.phase}'}")
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"--harm {text!r} is not a valid fault ({error}); see unisono.supervise.fault_injection"
            ) from error
        faults.append(fault)
    return faults


def _watch_parts(see: Callable[[str, int], None]) -> None:
    from unisono.engines.observers import Observers

    part = Observers.part

    def watched(self: Observers, name: str) -> AbstractContextManager[Any]:
        see(name, heartbeat.current_step())
        return part(self, name)

    Observers.part = watched  # type: ignore[method-assign]


def _watch_calls(see: Callable[[str, int], None]) -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            see("rename", heartbeat.current_step())
        elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
            see("remove", heartbeat.current_step())
        elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            see("write", heartbeat.current_step())

    sys.addaudithook(audit)
    fsync = os.fsync

    def watched(file: int) -> None:
        see("fsync", heartbeat.current_step())
        fsync(file)

    os.fsync = watched  # type: ignore[assignment]


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _sleep() -> None:
    while True:
        time.sleep(3600)


def _sleep_with_gil() -> None:
    while True:  # a signal ends one sleep
        ctypes.PyDLL(None).sleep(3600)


def _spin() -> None:
    sum(itertools.repeat(0))


def _raise() -> None:
    raise RuntimeError("a fault was asked for by --harm")


ACTS: dict[str, Callable[[], None]] = {
    "kill": _send(signal.SIGKILL),
    "stop": _send(signal.SIGSTOP),
    "term": _send(signal.SIGTERM),
    "sleep": _sleep,
    "gil": _sleep_with_gil,
    "spin": _spin,
    "raise": _raise,
    "exit0": lambda: os._exit(0),
    "abort": os.abort,
}
