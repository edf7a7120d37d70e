"""How many passes and updates each process of a script has made, in a file: what is left of a run that hangs.

Recording an update waits for all processes, so a script whose ranks skip different updates hangs in a proof alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class PassCounts:
    """Of one process.

    Attributes:
        passes: backward passes so far.
        updates: updates that it has begun.
        updating: whether it is in one of them.
    """

    passes: int = 0
    updates: int = 0
    updating: bool = False

    def write(self, folder: Path, rank: int) -> None:
        """Write them in place of those before."""
        (folder / f"rank-{rank}.counts.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def describe_skipped(folder: Path, world_size: int) -> str:
    """In words, the update that a rank waits in and another went past without making it; empty if there is none."""
    files = {rank: folder / f"rank-{rank}.counts.json" for rank in range(world_size)}
    counts = {rank: PassCounts(**json.loads(f.read_text(encoding="utf-8"))) for rank, f in files.items() if f.is_file()}
    for rank, mine in counts.items() if len(counts) == world_size else ():
        for other, theirs in counts.items():
            if mine.updating and not theirs.updating and theirs.updates < mine.updates and theirs.passes > mine.passes:
                return (
                    f"rank {rank} makes update {mine.updates} after {mine.passes} backward passes, and rank {other} "
                    f"has made {theirs.passes} and only {theirs.updates} updates: it skips some that others make"
                )
    return ""
