"""Generated Sudokus with a unique solution: an example without a download.

Puzzle *i* is a pure function of the side, the seed and *i*: a full grid is drawn cell by cell, then clues are removed
in random order as long as the solution stays unique. All puzzles lose their next clue together, so that the solver
works on many at a time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono import generator
from unisono_puzzles.data.formats import BLANK, Format, Puzzles, Tokens, sudoku_format
from unisono_puzzles.data.solver import candidates_of, search, solve, units_of_cells


def sudokus(side: int, count: int, clues: tuple[int, int], seed: int, first: int = 0) -> Puzzles:
    """Generate Sudokus with a unique solution, from number `first` on; their rating is the solver's number of guesses.

    `clues` are minimum and maximum: each puzzle draws a number in between, and keeps more if its solution would not be
    unique.
    """
    format_ = sudoku_format(side)
    numbers = np.arange(first, first + count, dtype=np.int64)
    answers = np.zeros((count, format_.length), dtype=np.uint8)
    order = np.zeros((count, format_.length), dtype=np.int64)
    wanted = np.zeros(count, dtype=np.int64)
    for row, number in enumerate(numbers.tolist()):
        rng = generator(seed, "sudoku", side, number)
        answers[row] = full_grid(format_, rng)
        order[row] = rng.permutation(format_.length)
        wanted[row] = rng.integers(clues[0], clues[1] + 1)
    questions, guesses = _remove_clues(format_, answers, order, wanted)
    return Puzzles.from_arrays(format_, questions, answers, ratings=guesses.astype(np.float32), numbers=numbers)


def full_grid(format: Format, rng: np.random.Generator) -> Tokens:
    """A random solution, (cells,): filled where candidates are fewest, with digits in random order."""
    side = format.height
    rows, columns, boxes = (of.tolist() for of in units_of_cells(format).T)
    used = [0] * (3 * side)  # digits that stand in each row, column and box, as bits
    digits = [1 << digit for digit in rng.permutation(side).tolist()]
    starts = rng.integers(side, size=format.length).tolist()
    grid = [0] * format.length

    def fill(free: list[int]) -> bool:
        if not free:
            return True
        cell = max(free, key=lambda one: (used[rows[one]] | used[columns[one]] | used[boxes[one]]).bit_count())
        rest = [one for one in free if one != cell]
        units_ = rows[cell], columns[cell], boxes[cell]
        taken = used[units_[0]] | used[units_[1]] | used[units_[2]]
        for turn in range(side):
            digit = digits[(starts[cell] + turn) % side]
            if taken & digit:
                continue
            for unit in units_:
                used[unit] |= digit
            if fill(rest):
                grid[cell] = digit.bit_length()
                return True
            for unit in units_:
                used[unit] &= ~digit
        return False

    assert fill(rng.permutation(format.length).tolist()), "every empty Sudoku has a solution"
    return (np.array(grid) + 1).astype(np.uint8)


def _remove_clues(
    format: Format,
    answers: Tokens,
    order: NDArray[np.int64],
    wanted: NDArray[np.int64],
) -> tuple[Tokens, NDArray[np.int32]]:
    """Questions with a unique solution, and the number of guesses that each takes."""
    questions = answers.copy()
    left = np.full(len(answers), format.length)
    for turn in range(format.length):
        active = np.flatnonzero(left > wanted)
        if not len(active):
            break
        rows, cell = np.arange(len(active)), order[active, turn]
        fewer = questions[active]
        fewer[rows, cell] = BLANK
        others = candidates_of(format, fewer)  # a second solution would have another digit in this cell
        others[rows, cell] &= ~candidates_of(format, questions[active])[rows, cell]
        unique = search(format, others, limit=1).counts == 0
        questions[active[unique]] = fewer[unique]
        left[active[unique]] -= 1
    return questions, solve(format, questions).guesses
