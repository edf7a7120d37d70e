"""Identifies a process on a machine, so that another process can find out later whether it is still alive.

A process id alone proves nothing: ids are reused, and every host and container has its own. No clock is involved, so a
wrong clock does no harm.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field
from typing_extensions import TypedDict

from unisono.supervise import processes

_PROC = Path("/proc")


class Identity(TypedDict):
    """A process, as `own_identity` describes it."""

    host: str
    machine: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    born: str


def machine_id() -> str:
    """Identify what mutually visible processes share: one boot of one host, and one PID namespace."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:  # not Linux
        return f"{platform.node()}/{uuid.getnode():x}"


def own_identity() -> dict[str, Any]:
    """Describe this process as JSON."""
    pid = os.getpid()
    return {"host": platform.node(), "machine": machine_id(), "pid": pid, "born": _start_time(pid)}


def is_alive(who: Mapping[str, Any]) -> bool | None:
    """Whether a process is alive; None if that cannot be determined from here.

    A zombie is dead; a stopped process is alive.
    """
    if who["machine"] != machine_id():
        return None
    born = _start_time(int(who["pid"]))
    if born:
        return bool(born == who["born"])
    try:
        os.kill(int(who["pid"]), 0)  # it may belong to another user, and be hidden
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # it has ended


def _start_time(pid: int) -> str:
    """Return the start time of a process in its system's unit; empty if it has ended or is not visible."""
    if _PROC.joinpath("self").exists():
        process = processes.find_process(pid)
        return "" if process is None else str(process.start_time)
    with suppress(psutil.Error):
        other = psutil.Process(pid)
        return "" if other.status() == psutil.STATUS_ZOMBIE else f"{other.create_time():.2f}"
    return ""
