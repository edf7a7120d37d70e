"""The output of `unisono data prepare puzzles`: memory-mapped augmented examples, each a question and its answer.

All variants of a puzzle are adjacent, so that an epoch shows each puzzle once, in a random variant, as if augmented on
the fly; both give the same examples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono import DataError, prepare, read_asset
from unisono.recipe_tools import archives, atomic_file, safe_paths, wrap_native_errors, write_whole
from unisono_puzzles.data.arrays import Numbers, StoredPuzzle
from unisono_puzzles.data.formats import Format, FormatJson, Tokens, format_from_json, format_to_json

_ABOUT = "puzzles.json"
_NUMBERS = "numbers.npz"  # first row of each puzzle, identifiers of rows, ratings of puzzles


class _About(TypedDict):
    format: FormatJson
    embeddings: int
    tasks: NotRequired[list[str]]


@dataclass(frozen=True)
class PuzzlePreparation:
    """How one part of a library is prepared; both a `unisono.prepare.Preparation` and its builder.

    Attributes:
        library: the `Library` of the puzzles.
        puzzles: its part, a source of `Puzzle` or `StoredPuzzle`.
        variants: number of variants of each puzzle that is not augmented yet.
        inputs: everything that the result depends on, as JSON.
    """

    library: Any
    puzzles: Any
    variants: int
    inputs: Mapping[str, Any]

    column = "tokens"
    dtype = "<u1"

    @property
    def records(self) -> int:
        """The number of puzzles."""
        return len(self.puzzles)

    @property
    def known_inputs(self) -> Mapping[str, Any]:
        """The same."""
        return self.inputs

    def bounds(self, shard_mb: float) -> Sequence[int]:
        """Bounds of shards with the same number of puzzles."""
        size = 2.0 * self.library.format.length * self.variants * self.records
        return prepare.even_bounds(self.records, size, shard_mb)

    def begin(self, folder: Path) -> PuzzlePreparation:
        """Write the format, and the first row, identifiers and rating of each puzzle."""
        if not (folder / _ABOUT).is_file():
            counts, identifiers = [], []
            ratings = np.full(self.records, np.nan, dtype=np.float32)
            for row in range(self.records):
                puzzle = self.puzzles[row]
                if isinstance(puzzle, StoredPuzzle):
                    own = puzzle.identifiers.tolist()
                else:
                    own = [self.library.identifier(puzzle, number) for number in range(self.variants)]
                ratings[row] = puzzle.rating
                counts.append(len(own))
                identifiers += own
            with atomic_file(folder / _NUMBERS) as temporary, temporary.open("wb") as file:
                first = np.concatenate([[0], np.cumsum(counts)])
                np.savez(file, first=first, identifiers=np.array(identifiers, dtype=np.int32), ratings=ratings)
            about = {"format": format_to_json(self.library.format), "embeddings": self.library.embeddings}
            about["tasks"] = list(self.library.tasks)
            write_whole(folder / _ABOUT, json.dumps(about))
        return self

    def make(self, first: int, last: int) -> Iterator[prepare.Made]:
        """Yield the variants of puzzles, one row each."""
        for number in range(first, last):
            puzzle = self.puzzles[number]
            if isinstance(puzzle, StoredPuzzle):
                pairs = [puzzle.variant(variant)[:2] for variant in range(len(puzzle.examples))]
            else:
                made = (self.library.stored_variant(puzzle, variant) for variant in range(self.variants))
                pairs = [(example.question, example.answer) for example in made]
            values = np.concatenate([np.concatenate(pair) for pair in pairs])
            yield prepare.Made(values, np.full(len(pairs), 2 * self.library.format.length, dtype=np.int64), 1)


class PreparedPuzzles:
    """A prepared folder; a source of `StoredPuzzle`.

    Args:
        folder: the folder with the shards.

    Raises:
        DataError: if it is not finished.
    """

    def __init__(self, folder: Path) -> None:
        self.shards = prepare.Shards(folder)
        about = read_asset(folder, _ABOUT, _About)
        self.format: Format = format_from_json(about["format"])
        self.embeddings = about["embeddings"]
        self.tasks: tuple[str, ...] = tuple(about.get("tasks", ()))
        with (
            wrap_native_errors(f"{folder / _NUMBERS} cannot be read", advice="prepare the folder again"),
            safe_paths.open_inside(folder, _NUMBERS) as file,
        ):
            numbers = archives.load_arrays(file)
            self._first: Numbers = numbers["first"]
            self._identifiers: NDArray[np.int32] = numbers["identifiers"]
            self.ratings: NDArray[np.float32] = numbers["ratings"]
        if self._first[-1] != len(self.shards):
            raise DataError(f"{folder}: {_NUMBERS} is of other rows; prepare the folder again")

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, row: int) -> StoredPuzzle:
        if not 0 <= row < len(self):
            raise IndexError(f"puzzle {row} of {len(self)}")
        rows = np.arange(self._first[row], self._first[row + 1])
        return StoredPuzzle(self, rows, self._identifiers[rows].astype(np.int64), float(self.ratings[row]))

    def read(self, example: int) -> tuple[Tokens, Tokens]:
        """Question and answer of a row."""
        tokens = self.shards[example]
        return tokens[: self.format.length], tokens[self.format.length :]

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of all rows."""
        return self.shards.fingerprint

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Refuse shards that have changed since they were opened."""
        self.shards.check_files(share, shares)
