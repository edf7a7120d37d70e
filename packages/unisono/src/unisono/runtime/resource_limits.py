"""Limits of a process, for those that read what somebody else has written; and what it has used."""

from __future__ import annotations

import resource
import sys


def lower_limit(what: int, most: int) -> None:
    """Lower both limits of a resource (`resource.RLIMIT_…`) permanently, never above what is allowed already."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def peak_resident() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
