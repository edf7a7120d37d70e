"""What the rings of processes say once these stand still or are gone: whether they made different collectives.

Read from outside: a process that waits in a collective cannot say so, and one that gloo has ended in C++, as it does
when sizes differ, has left nothing but its ring.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from unisono.runtime import collective_log
from unisono.runtime.files import whole

_LAST = 64  # calls of a ring that other nodes are shown
_EVERY = 0.05  # seconds between two looks for the rings of other nodes


def explain(folder: Path) -> str | None:
    """One sentence that names two ranks of which each made a call that the other did not, with their lines, or None.

    Two ranks differ if the same call of a group was another one on each, or if each of them stands in a call of a
    group which the other has not made. One that is only further ahead has waited for the other, or the other died.

    Args:
        folder: of the rings, `$UNISONO_PULSE` of the processes.
    """
    return _told(collective_log.explained(collective_log.read_all(folder)))


def explain_across(folder: Path, shared: Path, ranks: int = 0, patience: float = 3.0) -> str | None:
    """The same of all nodes: each leaves its rings where the others see them, and waits a little for theirs.

    Args:
        folder: of this node's rings.
        shared: a folder that all nodes see, where none of an earlier start are.
        ranks: of the job, for whose rings to wait.
        patience: seconds to wait for them at most; a node may not have failed at all.
    """
    own = collective_log.read_all(folder)
    for rank in own:
        name = f"rank-{rank:05d}.calls"
        with suppress(OSError), whole(shared / name) as temporary:
            temporary.write_bytes(collective_log.shortened((folder / name).read_bytes(), _LAST))
    deadline = time.monotonic() + patience
    while len(rings := collective_log.read_all(shared) | own) < ranks and time.monotonic() < deadline:
        time.sleep(_EVERY)
    return _told(collective_log.explained(rings))


def _told(found: collective_log.Difference | None) -> str | None:
    return None if found is None else f"ranks made different collectives. {found}"


def last(folder: Path) -> dict[int, str]:
    """The last collective that each rank began, with its line."""
    return {rank: str(ring[-1].what) for rank, ring in collective_log.read_all(folder).items() if ring}
