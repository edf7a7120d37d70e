"""Settings of the memory allocators of the host and of accelerators."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Mapping

DEVICE_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # the first is the newest
_ARENAS, _M_ARENA_MAX = "MALLOC_ARENA_MAX", -8  # from glibc's malloc.h


def device_variables(device: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables to set before the first use of an accelerator, so that torch's segments of memory grow.

    Where batches differ in length, blocks of fixed segments fit later sizes badly, and memory is reserved that nothing
    can use. Combined with `max_split_size_mb`, reserved memory grows without bound (pytorch #123548), so whoever has
    set any option of the allocator keeps what they have set.

    Args:
        device: `layout.device`; on the CPU nothing reads them.
        environment: Of this process.

    >>> device_variables("auto", {}), device_variables("cpu", {})
    ({'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}, {})
    >>> device_variables("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"})
    {}
    """
    if device == "cpu" or any(name in environment for name in DEVICE_NAMES):
        return {}
    return {DEVICE_NAMES[0]: "expandable_segments:True"}


def use_single_arena() -> None:
    """Limit malloc to one arena where the address space is limited (`ulimit -v`); call this before any import.

    glibc gives each allocating thread its own arena, and reserves 64 MB of address space for it, briefly 128 MB. Which
    threads get one depends on chance, so the peaks of equal steps differ by more than a limit leaves free. With one
    arena they differ by less than 1 %; the price is that threads wait for each other in small allocations.
    """
    if arena_variables() and _ARENAS not in os.environ:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
        if mallopt is not None:
            mallopt(_M_ARENA_MAX, 1)


def arena_variables() -> dict[str, str]:
    """Return the variables that do the same in processes started with them."""
    limited = sys.platform == "linux" and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return {_ARENAS: "1"} if limited else {}
