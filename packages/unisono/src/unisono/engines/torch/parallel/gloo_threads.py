"""One thread for each of this process's gloo groups, as two corrupt memory.

torch gives a group two threads. Each writes the name of the collective that it has ended into the same string of the
group, without a lock (`ProcessGroupGloo::runLoop` of torch 2.13, for its flight recorder). A name of more than 15
characters is on the heap, and functional gathers, of which `DTensor.full_tensor` is one, have such a name. If a thread
still writes the name of one gather while the other ends the next, memory is freed twice or written to afterwards. The
process dies at any later time: "malloc(): unaligned tcache chunk detected", or a segmentation fault.

All ranks enqueue the collectives of a group in the same order, so one thread after the other waits for nobody.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import wraps
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroupGloo, Store, default_pg_timeout


def use_one_thread() -> None:
    """Give the gloo groups that are made from now on one thread, whoever makes them."""
    kind: Any = ProcessGroupGloo
    original = kind.__init__
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def create(group: Any, store: Store, rank: int, size: int, *given: Any, **named: Any) -> None:
        value = next(iter((*given, *named.values())), default_pg_timeout)
        options = _default_options(value) if isinstance(value, timedelta) else value
        options._threads = 1
        original(group, store, rank, size, options)

    kind.__init__ = create


def _default_options(timeout: timedelta) -> Any:
    """What torch itself makes of a timeout: one device for each interface that the environment names."""
    kind: Any = ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
    return options
