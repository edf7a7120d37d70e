"""Changes of a puzzle that leave it the same problem: pure functions of a NumPy generator, applied to one example.

Sudoku: other digits, rows within bands, bands, columns within stacks, stacks, transposition where boxes are square.
Mazes: the symmetries of the square. ARC: the same for every grid of a task, other colours (0 stays), and a place in the
30×30 field. Nothing is stored: an example is augmented when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono_puzzles.data.formats import ARC_COLOURS, ARC_SIDE, BLANK, COLOUR, END, PAD, Format, Tokens

Grid = NDArray[np.uint8]  # colours, (height, width)


def augment_sudoku(format: Format, question: Tokens, answer: Tokens, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """One of the Sudoku's symmetries, drawn uniformly."""
    side, (tall, wide) = format.height, format.box
    tokens = np.arange(format.vocabulary, dtype=np.uint8)
    tokens[BLANK + 1 :] = BLANK + 1 + rng.permutation(side)
    rows, columns = _lines(side, tall, rng), _lines(side, wide, rng)
    transposed = tall == wide and bool(rng.integers(2))

    def transform(board: Tokens) -> Tokens:
        grid = tokens[board].reshape(side, side)[rows][:, columns]
        return np.ascontiguousarray(grid.T if transposed else grid).reshape(-1)

    return transform(question), transform(answer)


def _lines(side: int, group: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rows in a drawn order that keeps those of a band (or columns those of a stack) together."""
    bands = rng.permutation(side // group)
    return np.concatenate([band * group + rng.permutation(group) for band in bands])


def augment_grid(format: Format, question: Tokens, answer: Tokens, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
    """One of the eight symmetries of a square; of other rectangles, one of the four that keep its shape."""
    square = format.height == format.width
    number = int(rng.integers(8)) if square else int(rng.choice([0, 2, 4, 5]))  # half turn and mirrors

    def transform(board: Tokens) -> Tokens:
        return np.ascontiguousarray(dihedral(board.reshape(format.height, format.width), number)).reshape(-1)

    return transform(question), transform(answer)


def dihedral(grid: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
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
