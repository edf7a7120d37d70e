"""Detects processes that issued different collectives, from the call logs they leave behind when they hang or die.

The logs are read from outside: a process blocked in a collective cannot report it, and one that gloo aborts in C++, as
it does when sizes differ, leaves nothing but its log.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from unisono.runtime.communication import collective_log
from unisono.runtime.files import atomic_file
from unisono.runtime.untrusted import safe_paths

_CALLS_SHARED = 64  # calls of each ring shared with other nodes
PATIENCE, PATIENCE_AFTER_ABORT = 5.0, 12.0  # seconds for the rings of other nodes, on a busy host too
_POLL_INTERVAL = 0.05  # seconds between polls for the rings of other nodes


def describe_mismatch(folder: Path) -> str | None:
    """Name two ranks that issued different calls, with their lines, in one sentence; None if no two differ.

    Two ranks differ if they issued different calls at the same position in a group, or if each is blocked in a group
    that the other has not joined. A rank that is merely ahead is no mismatch: it waited for the other, or the other
    died.
    """
    return _describe(collective_log.read_rings(folder))


def describe_mismatch_across_nodes(
    folder: Path, shared: Path, ranks: int = 0, patience: float = PATIENCE
) -> str | None:
    """Do the same over all nodes: each copies its rings to a shared folder and waits briefly for those of the others.

    Another node may not have failed at all, so this waits for at most `patience` seconds for the rings of all ranks.
    """
    own = collective_log.read_rings(folder)
    for rank in own:
        name = f"rank-{rank:05d}.calls"
        with suppress(OSError), atomic_file(shared / name) as temporary:
            temporary.write_bytes(collective_log.truncate_ring(safe_paths.read_bytes(folder, name), _CALLS_SHARED))
    deadline = time.monotonic() + patience
    while len(rings := collective_log.read_rings(shared) | own) < ranks and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
    return _describe(rings)


def _describe(rings: Mapping[int, Sequence[collective_log.Call]]) -> str | None:
    found = collective_log.explain_hang(rings)
    return None if found is None else f"ranks made different collectives. {found}"
