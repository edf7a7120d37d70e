"""Changes of a puzzle that leave it the same problem: pure functions of random numbers.

Sudoku: other digits, rows within bands, bands, columns within stacks, stacks, transposition where boxes are square.
Mazes: the symmetries of the square. ARC: the same for every grid of a task, other colours (0 stays), and a place in the
30×30 field. Nothing is stored: an example is augmented when it is read. Sudokus and mazes are augmented a whole
micro-batch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono_puzzles.data.formats import ARC_COLOURS, ARC_SIDE, BLANK, COLOUR, END, PAD, Format, Tokens

Grid = NDArray[np.uint8]  # colours, (height, width)


def count_draws(format: Format) -> int:
    """How many random numbers `augment_boards` needs for a puzzle."""
    if format.kind != "sudoku":
        return 1
    (tall, wide), side = format.box, format.height
    return 3 * side + side // tall + side // wide + 1


def augment_boards(format: Format, boards: Tokens, draws: NDArray[np.float64]) -> Tokens:
    """One of the symmetries of each puzzle, drawn uniformly.

    Args:
        format: of all of them; not ARC, whose tasks are changed by `ArcVariant`.
        boards: of each puzzle, e.g. question and answer, (puzzles, boards, cells).
        draws: random numbers from 0 to 1, (puzzles, `count_draws(format)`).
    """
    puzzles, many, cells = boards.shape
    if format.kind == "sudoku":
        taken, tokens = _sudoku_symmetries(format, draws)
        boards = tokens.reshape(-1).take(boards + (np.arange(puzzles) * format.vocabulary)[:, None, None])
    else:
        taken = _grid_symmetries(format, draws[:, 0])
    # `take` of flat numbers is three times as fast as `take_along_axis`.
    places = taken[:, None, :] + (np.arange(puzzles * many) * cells).reshape(puzzles, many, 1)
    changed: Tokens = boards.reshape(-1).take(places)
    return changed


def augment_puzzle(format: Format, question: Tokens, answer: Tokens, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """One of the puzzle's symmetries: `augment_boards` of a single one."""
    question, answer = augment_boards(
        format, np.stack([question, answer])[None], rng.random(count_draws(format))[None]
    )[0]
    return question, answer


def _sudoku_symmetries(format: Format, draws: NDArray[np.float64]) -> tuple[NDArray[np.int64], Tokens]:
    """Which cell of a Sudoku each cell is taken from, (puzzles, cells), and the new tokens, (puzzles, vocabulary).

    Random numbers in ascending order are a random permutation; two are equal once in 2^53.
    """
    puzzles, side, (tall, wide) = len(draws), format.height, format.box
    digits, for_rows, for_columns, last = np.split(
        draws, np.cumsum([side, side + side // tall, side + side // wide]), 1
    )
    tokens = np.empty((puzzles, format.vocabulary), dtype=np.uint8)
    tokens[:, : BLANK + 1] = np.arange(BLANK + 1)
    tokens[:, BLANK + 1 :] = BLANK + 1 + digits.argsort(axis=1)
    rows, columns = _lines(side, tall, for_rows) * side, _lines(side, wide, for_columns)
    cells = rows[:, :, None] + columns[:, None, :]
    if tall == wide:
        cells = np.where(last[:, :, None] < 0.5, cells, cells.swapaxes(1, 2))
    return cells.reshape(puzzles, -1), tokens


def _lines(side: int, group: int, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rows in a drawn order that keeps those of a band (or columns those of a stack) together, (puzzles, side)."""
    bands = draws[:, : side // group].argsort(axis=1)
    inside = draws[:, side // group :].reshape(len(draws), side // group, group).argsort(axis=2)
    return (bands[:, :, None] * group + inside).reshape(len(draws), side)


def _grid_symmetries(format: Format, draws: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which cell each cell is taken from, (puzzles, cells).

    A square has eight symmetries; another rectangle has four that keep its shape: a half turn and mirrors.
    """
    numbers = range(8) if format.height == format.width else (0, 2, 4, 5)
    cells = np.arange(format.length).reshape(format.height, format.width)
    taken = np.stack([dihedral(cells, number).reshape(-1) for number in numbers])
    return taken[(draws * len(taken)).astype(np.int64)]


def dihedral(grid: NDArray[Any], number: int) -> NDArray[Any]:
    """A symmetry of the square: 0 to 3 quarter turns, 4 and 5 the mirrors, 6 and 7 the transpositions."""
    if number < 4:
        return np.rot90(grid, number)
    return (np.fliplr(grid), np.flipud(grid), grid.T, np.rot90(grid, 2).T)[number - 4]


@dataclass(frozen=True)
class ArcVariant:
    """A change of all grids of an ARC task.

    Attributes:
        symmetry: number of the dihedral transformation.
        colours: the new colour of each, (10,).
    """

    symmetry: int
    colours: NDArray[np.uint8]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> ArcVariant:
        """A drawn symmetry and permutation of the colours 1 to 9; 0 is the background and stays."""
        symmetry = int(rng.integers(8))
        return cls(symmetry, np.concatenate([[0], 1 + rng.permutation(9)]).astype(np.uint8))

    @classmethod
    def identity(cls) -> ArcVariant:
        """The task as it is."""
        return cls(0, np.arange(ARC_COLOURS, dtype=np.uint8))

    def __call__(self, grid: Grid) -> Grid:
        """A grid of the changed task."""
        return np.ascontiguousarray(dihedral(self.colours[grid], self.symmetry))


def encode_grid(grid: Grid, top: int = 0, left: int = 0) -> Tokens:
    """A grid of colours 0 to 9 in the 30×30 field, (900,): padding around it, end tokens at its lower right border."""
    height, width = grid.shape
    field = np.full((ARC_SIDE, ARC_SIDE), PAD, dtype=np.uint8)
    bottom, right = top + height, left + width
    field[top:bottom, left:right] = grid + COLOUR
    field[bottom : bottom + 1, left:right] = END
    field[top:bottom, right : right + 1] = END
    return field.reshape(-1)


def decode_grid(tokens: Tokens) -> Grid:
    """The largest rectangle of colours that begins where the first colour stands; empty where there is none.

    Of what a model wrote, which need not be a rectangle, it is the one of largest area that has its upper left corner
    there and holds nothing but colours, as in the published evaluation.
    """
    field = tokens.reshape(ARC_SIDE, ARC_SIDE)
    colour = (field >= COLOUR) & (field < COLOUR + 10)
    if not colour.any():
        return np.zeros((0, 0), dtype=np.uint8)
    top, left = int(colour.any(axis=1).argmax()), int(colour.any(axis=0).argmax())
    inside = colour[top:, left:]
    lengths = np.minimum.accumulate(np.logical_and.accumulate(inside, axis=1).sum(axis=1))
    areas = lengths * np.arange(1, len(lengths) + 1)
    height = int(areas.argmax()) + 1
    return np.ascontiguousarray(field[top : top + height, left : left + int(lengths[height - 1])] - COLOUR)


def place_grids(question: Grid, answer: Grid, rng: np.random.Generator | None) -> tuple[Tokens, Tokens]:
    """Both grids of an example in the field, at the same drawn place; at its upper left corner without a generator."""
    top = left = 0
    if rng is not None:
        tall = max(question.shape[0], answer.shape[0])
        wide = max(question.shape[1], answer.shape[1])
        top, left = int(rng.integers(ARC_SIDE - tall + 1)), int(rng.integers(ARC_SIDE - wide + 1))
    return encode_grid(question, top, left), encode_grid(answer, top, left)
