"""Whether processes made different collectives, from the call logs that they leave when they hang or are gone.

The logs are read from outside: a process that waits in a collective cannot report it, and one that gloo has aborted in
C++, as it does when sizes differ, has left nothing but its log.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from unisono.runtime import collective_log
from unisono.runtime.files import atomic_file

_CALLS_SHARED = 64  # calls of a ring that other nodes are shown
_POLL_INTERVAL = 0.05  # seconds between two looks for the rings of other nodes


def describe_mismatch(folder: Path) -> str | None:
    """One sentence that names two ranks of which each made a call that the other did not, with their lines, or None.

    Two ranks differ if the same call of a group was another one on each, or if each of them stands in a call of a
    group which the other has not made. One that is only further ahead has waited for the other, or the other died.

    Args:
        folder: of the rings, `$UNISONO_PULSE` of the processes.
    """
    return _format_mismatch(collective_log.explain_hang(collective_log.read_rings(folder)))


def describe_mismatch_across_nodes(folder: Path, shared: Path, ranks: int = 0, patience: float = 3.0) -> str | None:
    """The same of all nodes: each leaves its rings where the others see them, and waits a little for theirs.

    Args:
        folder: of this node's rings.
        shared: a folder that all nodes see, where none of an earlier start are.
        ranks: of the job, for whose rings to wait.
        patience: seconds to wait for them at most; a node may not have failed at all.
    """
    own = collective_log.read_rings(folder)
    for rank in own:
        name = f"rank-{rank:05d}.calls"
        with suppress(OSError), atomic_file(shared / name) as temporary:
            temporary.write_bytes(collective_log.truncate_ring((folder / name).read_bytes(), _CALLS_SHARED))
    deadline = time.monotonic() + patience
    while len(rings := collective_log.read_rings(shared) | own) < ranks and time.monotonic() < deadline:
        time.sleep(_POLL_INTERVAL)
    return _format_mismatch(collective_log.explain_hang(rings))


def _format_mismatch(found: collective_log.CallMismatch | None) -> str | None:
    return None if found is None else f"ranks made different collectives. {found}"


def last_collectives(folder: Path) -> dict[int, str]:
    """The last collective that each rank began, with its line."""
    return {rank: str(ring[-1].what) for rank, ring in collective_log.read_rings(folder).items() if ring}
