"""Injects faults on request, to test everything that must survive them. Nothing happens without `--fault`.

Faults strike where the trainer reports a heartbeat, in any task. Faults that need a task's cooperation (a different
collective on one rank, a non-finite number, a replica that drifts) are in `unisono_faults.task`.

    unisono train RECIPE --fault rank=1,step=3,phase=forward,act=kill

* rank: which process (default 0)
* step: from 1; recording, evaluating and saving after a step belong to it; `0` means before the first step;
  `any` (default) means every step
* phase: a phase of `unisono.runtime.heartbeat` (setup, data, compute, wait, record, save, evaluate), a part of a step
  (forward, backward, reduction, optimizer), or a call that touches the disk (write, fsync, rename, remove)
* act: kill, stop (SIGSTOP), term, sleep, gil (sleep while holding the interpreter), spin (the same, busy), raise,
  exit0, abort
* nth: at which occurrence in that step, from 1 (default 1)
* after: delay in seconds, by a thread (default 0); for kill, stop and term
* attempt: which attempt under `launch.max_restarts` (default 0, the first)

Several faults are separated by `;`. The processes of the run find them in an environment variable together with the
process that requested them: once that process has ended, or on another machine, a leftover variable has no effect.
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
from unisono.supervise.fault_hook import ATTEMPT, VARIABLE

PARTS = ("forward", "backward", "reduction", "optimizer")
CALLS = ("write", "fsync", "rename", "remove")


@dataclass
class InjectedFault:
    """What to do, where and when."""

    act: str
    phase: str
    rank: int = 0
    step: int | None = None
    nth: int = 1
    after: float = 0.0
    attempt: int = 0

    def on_moment(self, phase: str, step: int) -> None:
        """Count a moment, and strike at the `nth` that matches."""
        if phase != self.phase or (self.step is not None and step != self.step) or self.nth <= 0:
            return
        self.nth -= 1
        if self.nth == 0:
            if self.after:
                threading.Timer(self.after, ACTS[self.act]).start()
            else:
                ACTS[self.act]()


def arm(text: str | None) -> None:
    """Make this process and its children inject faults; None disarms, whatever the environment says.

    Raises:
        ConfigError: If the text is not a valid fault.
    """
    os.environ.pop(VARIABLE, None)
    if text is not None:
        parse_faults(text)
        os.environ[VARIABLE] = json.dumps({"requested_by": identity.own_identity(), "faults": text})


def _read_request() -> str | None:
    with suppress(ValueError, KeyError, TypeError):
        request = json.loads(os.environ.get(VARIABLE, ""))
        if identity.is_alive(request["requested_by"]):
            return str(request["faults"])
    return None


def install(rank: int) -> None:
    """Inject the faults that the command requests for this rank.

    Raises:
        ConfigError: If the text is not a valid fault.
    """
    text = _read_request()
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
    """Parse a `--fault` argument.

    >>> parse_faults("rank=1,step=3,phase=compute,act=kill")
    [InjectedFault(act='kill', phase='compute', rank=1, step=3, nth=1, after=0.0, attempt=0)]
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
                f"--fault {text!r} is not a valid fault ({error}); see unisono_faults.injection"
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
    while True:  # a signal interrupts the sleep
        ctypes.PyDLL(None).sleep(3600)


def _spin() -> None:
    sum(itertools.repeat(0))


def _raise() -> None:
    raise RuntimeError("fault injected by --fault")


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
