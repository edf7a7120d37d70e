"""The tokens of each kind of puzzle, and a container of many puzzles.

Token 0 is always padding: a symbol of its own as an input, not counted as a label. The numbers are
those of the published data sets (sapientinc/HRM, SamsungSAILMontreal/TinyRecursiveModels), so that their files can be
read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict

from unisono import ConfigError

Tokens = NDArray[np.uint8]

PAD = 0
BLANK = 1  # Sudoku: an empty cell
END = 1  # ARC: the border of a grid
COLOUR = 2  # ARC: the token of colour 0
ARC_SIDE = 30
ARC_COLOURS = 10
MAZE_SYMBOLS = "# SGo"  # tokens 1 to 5: wall, floor, start, goal, path
COLUMNS = ("questions", "answers", "groups", "ratings", "numbers")  # arrays of `Puzzles`
SUDOKU_BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}  # rows and columns of a box, by the side of the grid


class FormatJson(TypedDict):
    """A `Format` as JSON."""

    kind: str
    height: int
    width: int
    vocabulary: int
    box: Annotated[list[int], Field(min_length=2, max_length=2)]


@dataclass(frozen=True)
class Format:
    """The tokens of one kind of puzzle.

    Attributes:
        kind: `sudoku`, `maze`, `arc`, or `other` for arrays of unknown meaning.
        height: rows of the grid.
        width: columns of the grid.
        vocabulary: number of tokens, including padding.
        box: rows and columns of a box of the grid: those of a Sudoku, else as close to square as possible.
    """

    kind: str
    height: int
    width: int
    vocabulary: int
    box: tuple[int, int]

    @property
    def size(self) -> str:
        """Rows and columns, as text."""
        return f"{self.height}×{self.width}"

    @property
    def length(self) -> int:
        """Tokens of a puzzle."""
        return self.height * self.width


def format_to_json(format: Format) -> FormatJson:
    """A format as JSON."""
    return {
        "kind": format.kind,
        "height": format.height,
        "width": format.width,
        "vocabulary": format.vocabulary,
        "box": list(format.box),
    }


def format_from_json(described: FormatJson) -> Format:
    """The inverse of `format_to_json`."""
    rows, columns = described["box"]
    return Format(described["kind"], described["height"], described["width"], described["vocabulary"], (rows, columns))


def sudoku_format(side: int) -> Format:
    """Sudoku of 4×4, 6×6 or 9×9 cells.

    Raises:
        ConfigError: for another size.
    """
    if side not in SUDOKU_BOXES:
        raise ConfigError(f"a Sudoku has 4, 6 or 9 cells on a side, got {side}")
    return Format("sudoku", side, side, side + 2, SUDOKU_BOXES[side])


def maze_format(height: int, width: int) -> Format:
    """Mazes of one size."""
    return Format("maze", height, width, len(MAZE_SYMBOLS) + 1, _box(height, width))


def other_format(length: int, vocabulary: int) -> Format:
    """A row of tokens of unknown meaning."""
    return Format("other", 1, length, vocabulary, _box(1, length))


def _box(height: int, width: int) -> tuple[int, int]:
    tall = max(d for d in range(1, height + 1) if height % d == 0 and d * d <= height)
    wide = min(d for d in range(1, width + 1) if width % d == 0 and d * d >= width)
    return tall, wide


ARC_FORMAT = Format("arc", ARC_SIDE, ARC_SIDE, 12, _box(ARC_SIDE, ARC_SIDE))


class Puzzle(NamedTuple):
    """One example.

    Attributes:
        question: tokens, (length,).
        answer: tokens, (length,); 0 is not counted.
        group: number of its task; 0 if every example is a task of its own.
        rating: difficulty; NaN if unknown.
        number: of the example in its file, from 0.
    """

    question: Tokens
    answer: Tokens
    group: int
    rating: float
    number: int


@dataclass(frozen=True)
class Puzzles:
    """Many examples of one format; a source of `Puzzle`.

    Attributes:
        format: of all of them.
        questions: tokens, (examples, length).
        answers: tokens, (examples, length).
        groups: number of each one's task, (examples,).
        ratings: (examples,), NaN for none.
        numbers: place of each in its file, from 0, (examples,).
    """

    format: Format
    questions: Tokens
    answers: Tokens
    groups: NDArray[np.int32]
    ratings: NDArray[np.float32]
    numbers: NDArray[np.int64]

    @classmethod
    def from_arrays(cls, format: Format, questions: Tokens, answers: Tokens, **columns: NDArray[Any]) -> Puzzles:
        """Examples; missing columns get their defaults."""
        defaults: dict[str, Any] = {
            "groups": np.zeros(len(questions), dtype=np.int32),
            "ratings": np.full(len(questions), np.nan, dtype=np.float32),
            "numbers": np.arange(len(questions), dtype=np.int64),
        }
        return cls(format, questions, answers, **{**defaults, **columns})

    def __len__(self) -> int:
        return len(self.questions)

    def __getitem__(self, row: int) -> Puzzle:
        if not 0 <= row < len(self):
            raise IndexError(f"puzzle {row} of {len(self)}")
        own = int(self.groups[row]), float(self.ratings[row]), int(self.numbers[row])
        return Puzzle(self.questions[row], self.answers[row], *own)

    def subset(self, rows: NDArray[np.int64] | NDArray[np.bool_] | Sequence[int] | slice) -> Puzzles:
        """Some of the examples."""
        return replace(self, **{name: getattr(self, name)[rows] for name in COLUMNS})

    @property
    def fingerprint(self) -> str:
        """SHA-256 of questions, answers and tasks."""
        digest = hashlib.sha256()
        zeros = np.zeros(len(self), dtype=np.int32)  # a column that there once was; older runs have it in their digests
        for array in (self.questions, self.answers, self.groups, zeros):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()
