"""Which Sudokus may be the same up to symmetry, so that a held-out puzzle has no twin in the training.

For two rows of one band, the digits of the one under those of the other are a permutation, whose cycle lengths neither
other digits nor other columns change. The cycle lengths of all pairs in a band, sorted, and of all bands, sorted, are
the same for every symmetric twin of a solution; so are those of columns and stacks, and where boxes are square a
transposition exchanges the two.
"""

from __future__ import annotations

import hashlib
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from unisono_puzzles.data.formats import Format, Tokens


def twin_names(format: Format, answers: Tokens) -> list[str]:
    """A name for each solution: twins have the same, and others seldom do."""
    tall, wide = format.box
    grids = answers.reshape(-1, format.height, format.height).astype(np.int64) - 2
    rows, columns = _signature(grids, tall), _signature(grids.transpose(0, 2, 1), wide)
    if tall == wide:
        first = _lexicographic(rows, columns)
        rows, columns = np.where(first[:, None], rows, columns), np.where(first[:, None], columns, rows)
    signatures = np.ascontiguousarray(np.concatenate([rows, columns], axis=1))
    return [hashlib.sha256(signature.tobytes()).hexdigest()[:24] for signature in signatures]


def _signature(grids: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """Sorted cycle lengths of all pairs of rows in a band, sorted by band, (grids, pairs of all bands)."""
    count, side, _ = grids.shape
    bands = []
    for band in range(side // group):
        pairs = [
            _cycles(grids[:, band * group + one], grids[:, band * group + other])
            for one, other in combinations(range(group), 2)
        ]
        bands.append(np.sort(np.stack(pairs, axis=1), axis=1))
    stacked = np.stack(bands, axis=1)  # (grids, bands, pairs)
    # What overflows below stays a function of the band, and any order that is one will do.
    order = np.argsort((stacked * 1_000_003 ** np.arange(stacked.shape[2])).sum(axis=2), axis=1)
    return np.take_along_axis(stacked, order[:, :, None], axis=1).reshape(count, -1)


def _cycles(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sorted cycle lengths of the permutations that take the one row to the other, as one number, (grids,)."""
    count, side = one.shape
    image = np.zeros_like(one)
    np.put_along_axis(image, one, other, axis=1)
    lengths = np.zeros_like(image)  # of the cycle that each digit is in
    here = np.tile(np.arange(side), (count, 1))
    start = here.copy()
    for turn in range(1, side + 1):
        here = np.take_along_axis(image, here, axis=1)
        lengths[(here == start) & (lengths == 0)] = turn
    powers = (side + 1) ** np.arange(side, dtype=np.int64)
    result: NDArray[np.int64] = (np.sort(lengths, axis=1) * powers).sum(axis=1)
    return result


def _lexicographic(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each row of the one comes first, or is the same, (n,)."""
    differs = one != other
    place = differs.argmax(axis=1)
    rows = np.arange(len(one))
    return np.asarray(~differs.any(axis=1) | (one[rows, place] < other[rows, place]))
