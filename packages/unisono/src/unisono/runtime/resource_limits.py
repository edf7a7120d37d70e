"""Limits of a process, for those that read what somebody else has written."""

from __future__ import annotations

import resource


def lower_limit(what: int, most: int) -> None:
    """Lower both limits of a resource (`resource.RLIMIT_…`) permanently, never above what is allowed already."""
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
