"""What the rings of a node's processes say once these stand still or are gone: whether they made different collectives.

Read from outside: a process that waits in a collective cannot say so, and one that gloo has ended in C++, as it does
when sizes differ, has left nothing but its ring.
"""

from __future__ import annotations

from pathlib import Path

from unisono import calls


def explain(folder: Path) -> str | None:
    """One sentence that names two ranks of which each made a call that the other did not, with their lines, or None.

    Two ranks differ if the same call of a group was another one on each, or if each of them stands in a call of a
    group which the other has not made. One that is only further ahead has waited for the other, or the other died.

    Args:
        folder: of the rings, `$UNISONO_PULSE` of the processes.
    """
    found = calls.explained(calls.read_all(folder))
    return None if found is None else f"ranks made different collectives. {found}"


def last(folder: Path) -> dict[int, str]:
    """The last collective that each rank began, with its line."""
    return {rank: str(ring[-1].what) for rank, ring in calls.read_all(folder).items() if ring}
