"""Batches of puzzles: a micro-batch holds one kind, whose arrays are called `<kind>/<name>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unisono_puzzles.data.arrays import StoredPuzzle
from unisono_puzzles.data.formats import ARC_COLOURS, Puzzle, Puzzles

KIND = "kind"  # rows of a batch that has arrays of other kinds too: the number of the one that it holds
Fields = dict[str, Any]


@dataclass(frozen=True)
class PuzzlesOfKind:
    """The puzzles of a kind, each as the name of the kind and the puzzle; a source.

    Attributes:
        kind: its name in the run.
        puzzles: a source of puzzles.
    """

    kind: str
    puzzles: Any

    def __len__(self) -> int:
        return len(self.puzzles)

    def __getitem__(self, row: int) -> tuple[str, Puzzle | StoredPuzzle]:
        return self.kind, self.puzzles[row]

    def __getitems__(self, rows: Sequence[int]) -> PuzzlesOfKind | list[tuple[str, Puzzle | StoredPuzzle]]:
        """Several of them; those that lie in arrays as such."""
        if not isinstance(self.puzzles, Puzzles):
            return [self[row] for row in rows]
        return PuzzlesOfKind(self.kind, self.puzzles.subset(rows))

    @property
    def fingerprint(self) -> str | None:
        """That of the puzzles; None if they have none."""
        return getattr(self.puzzles, "fingerprint", None)

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Raise if files have changed since they were opened."""
        if hasattr(self.puzzles, "check_files"):
            self.puzzles.check_files(share, shares)


def find_kind(batch: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """The kind of puzzles that a batch holds, of those that the run has."""
    if KIND in batch:
        return kinds[int(batch[KIND][0])]
    (kind,) = {name.partition("/")[0] for name in batch}
    return kind


def fields_of(arrays: Mapping[str, Any], kind: str) -> Fields:
    """Arrays of a kind in a batch or a carry, without the name of the kind."""
    begin = f"{kind}/"
    return {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}


def with_kind(kind: str, fields: Mapping[str, Any]) -> Fields:
    """The inverse of `fields_of`."""
    return {f"{kind}/{name}": array for name, array in fields.items()}


def zero_fields(length: int, rows: int, votes: int, training: bool) -> Fields:
    """Zeros in place of a kind that a batch does not hold.

    Args:
        length: Cells of a puzzle.
        rows: Of the batch.
        votes: Augmentations of each question over which a vote is taken; 1 for none.
        training: Whether the batch is one of training.
    """
    shown = (rows, votes) if votes > 1 else (rows,)
    shapes = {"question": (*shown, length), "answer": (rows, length), "identifier": shown, "level": (rows,)}
    shapes |= {"explore": (rows,), "patience": (rows,)} if training else {}
    shapes |= {"symmetry": shown, "colours": (*shown, ARC_COLOURS)} if votes > 1 else {}
    dtypes = {"question": np.uint8, "answer": np.uint8, "explore": np.float32}
    return {name: np.zeros(shape, dtypes.get(name, np.int32)) for name, shape in shapes.items()}
