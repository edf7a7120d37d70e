"""One arena of malloc for all threads, where the address space has a limit (`ulimit -v`).

glibc gives a thread that allocates an arena of its own, and reserves 64 MB of address space for it, 128 MB for a
moment. Which threads get one is a matter of chance and of what a process has imported, so equal steps differ by a few
times that: more than is left free of a limit. With one arena they differ by less than 1 %; the price is that threads
wait for each other in small allocations.
"""

from __future__ import annotations

import ctypes
import os
import sys

_VARIABLE, _M_ARENA_MAX = "MALLOC_ARENA_MAX", -8  # of glibc's malloc.h


def use_single_arena() -> None:
    """Give no thread of this process an arena from now on; before threads begin, i.e. before anything is imported."""
    if _is_address_space_limited() and _VARIABLE not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


def arena_variables() -> dict[str, str]:
    """The same for processes that are started with these variables."""
    return {_VARIABLE: "1"} if _is_address_space_limited() else {}


def _is_address_space_limited() -> bool:
    if sys.platform != "linux":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
