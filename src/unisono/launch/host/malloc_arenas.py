"""Limits malloc to a single arena where the address space is limited (`ulimit -v`).

glibc gives each allocating thread its own arena, and reserves 64 MB of address space for it, briefly 128 MB. Which
threads get one depends on chance and on the imports of the process, so the peaks of equal steps differ by a few times
that, more than a limit leaves free. With one arena they differ by less than 1 %; the price is that threads wait for
each other in small allocations.
"""

from __future__ import annotations

import ctypes
import os
import sys

_VARIABLE, _M_ARENA_MAX = "MALLOC_ARENA_MAX", -8  # from glibc's malloc.h


def use_single_arena() -> None:
    """Create no further arenas in this process; call this before threads start, i.e. before any import."""
    if _is_address_space_limited() and _VARIABLE not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


def arena_variables() -> dict[str, str]:
    """Return the variables that do the same in processes started with them."""
    return {_VARIABLE: "1"} if _is_address_space_limited() else {}


def _is_address_space_limited() -> bool:
    if sys.platform != "linux":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
