"""Limits of a process, for those that read what somebody else has written; and what it has used."""

from __future__ import annotations

import resource
import shutil
import sys
from contextlib import suppress
from pathlib import Path

_LITTLE_SHARED = 1 << 20  # bytes


def lower_limit(what: int, most: int, more: int = 0) -> None:
    """Lower both limits of a resource (`resource.RLIMIT_…`) permanently, never above what is allowed already.

    Args:
        what: Resource.
        most: Of it.
        more: By which the hard limit is above it, for a signal that can be told from others (SIGXCPU).
    """
    _, hard = resource.getrlimit(what)
    soft, above = (one if hard == resource.RLIM_INFINITY else min(one, hard) for one in (most, most + more))
    resource.setrlimit(what, (soft, above))


def peak_resident() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def explain_sigbus(shared: Path = Path("/dev/shm")) -> str:
    """Why a process may have been killed by SIGBUS, as the end of a sentence."""
    with suppress(OSError):
        if (free := shutil.disk_usage(shared).free) < _LITTLE_SHARED:
            return f"most likely because {shared} is full ({free >> 10} kB are free): remove what others left there"
    return f"for reading past the end of a file that was truncated meanwhile, or because {shared} was full"
