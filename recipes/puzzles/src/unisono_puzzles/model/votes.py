"""Votes over augmentations of an ARC question: answers are mapped back to the original question and counted.

Written once for torch, JAX and NumPy, on the Python array API, with fixed shapes. Answers are compared by two hashes of
their grids. The most frequent answer is the first guess; ties go to the one with the higher halting probability.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from unisono_puzzles.data.formats import ARC_SIDE, COLOUR

_CELLS = ARC_SIDE * ARC_SIDE
SALTS = np.random.default_rng(20250704).integers(1, 2**31 - 1, size=(2, _CELLS + 1), dtype=np.int64).astype(np.int32)


def flatten(value: Any) -> Any:
    """(questions, augmentations, …) -> (questions · augmentations, …)."""
    return array_namespace(value).reshape(value, (-1, *value.shape[2:]))


def restore(tokens: Any, symmetry: Any, colours: Any, index: Any) -> Any:
    """Map answers to augmented questions back to grids of the original question, (n, 901) int32.

    Args:
        tokens: answers at the upper left of the field, (n, 900).
        symmetry: dihedral transformation of each question, (n,).
        colours: the colour that replaced each original colour, (n, 10).
        index: 0 to 29, on the device, (30,) int32.

    Returns:
        Colours of the field plus 1, and 0 outside the grid; the last entry is the width, so that grids of
        different shapes differ.
    """
    xp = array_namespace(tokens)
    field = xp.reshape(xp.astype(tokens, xp.int32), (-1, ARC_SIDE, ARC_SIDE))
    inside = (field >= COLOUR) & (field < COLOUR + 10)
    lengths = xp.sum(xp.astype(xp.cumulative_prod(xp.astype(inside, xp.int32), axis=2), xp.int32), axis=2)
    lengths = _running_minimum(xp.astype(lengths, xp.int32), index)
    areas = lengths * (index + 1)
    last = xp.astype(xp.argmax(areas, axis=1), xp.int32)  # the last row of the largest rectangle
    height = xp.where(xp.max(areas, axis=1) > 0, last + 1, xp.zeros_like(last))
    width = xp.sum(xp.where(index == last[:, None], lengths, xp.zeros_like(lengths)), axis=1)
    width = xp.astype(width, xp.int32)
    turned = (symmetry == 1) | (symmetry == 3) | (symmetry >= 6)
    tall, wide = xp.where(turned, width, height), xp.where(turned, height, width)  # of the original grid
    row, column = _sources(symmetry, index, tall, wide)
    places = xp.clip(row * ARC_SIDE + column, 0, _CELLS - 1)
    flat = xp.reshape(field, (-1, _CELLS))
    moved = xp.take_along_axis(flat, _as_index(xp.reshape(places, (-1, _CELLS)), flat), axis=1)
    back = xp.astype(xp.argsort(colours, axis=1), xp.int32)
    colour = xp.take_along_axis(back, _as_index(xp.clip(moved - COLOUR, 0, 9), flat), axis=1)
    own = (index[:, None] < tall[:, None, None]) & (index[None, :] < wide[:, None, None])
    grid = xp.where(xp.reshape(own, (-1, _CELLS)), colour + 1, xp.zeros_like(colour))
    return xp.concat([grid, wide[:, None]], axis=1)


def rank(grids: Any, trust: Any, salts: Any) -> tuple[Any, Any]:
    """The votes for each answer of a question, and a score that orders the answers.

    Args:
        grids: from `restore`, (questions, augmentations, 901).
        trust: probability of the halting head, (questions, augmentations).
        salts: `SALTS` on the device, (2, 901) int32.

    Returns:
        Both (questions, augmentations): how many augmentations gave the same answer; and that plus their mean trust
        at the first occurrence of an answer, -1 at repetitions.
    """
    xp = array_namespace(grids)
    hashes = xp.sum(grids[:, :, None, :] * salts, axis=-1, dtype=xp.int32)  # wraps
    same = xp.all(hashes[:, :, None] == hashes[:, None], axis=-1)
    weight = xp.astype(same, trust.dtype)
    votes = xp.sum(weight, axis=-1)
    mean = xp.sum(weight * trust[:, None], axis=-1) / votes
    before = xp.cumulative_sum(xp.astype(same, xp.int32), axis=-1)
    number = xp.sum(xp.where(_diagonal(same), before, xp.zeros_like(before)), axis=-1)
    return votes, xp.where(number == 1, votes + mean, -xp.ones_like(votes))


def passes(grids: Any, score: Any, truth: Any, most: int) -> Any:
    """Whether the true grid (questions, 901) is among the best `most` answers, (questions,); `score` is from `rank`."""
    xp = array_namespace(grids)
    right = xp.all(grids == truth[:, None], axis=-1)
    better = xp.sum(xp.astype(score[:, None, :] > score[:, :, None], xp.int32), axis=-1)
    return xp.any(right & (score > 0) & (better < most), axis=-1)


def _sources(symmetry: Any, index: Any, tall: Any, wide: Any) -> tuple[Any, Any]:
    """The row and column in an augmented grid of each original cell, both (n, 30, 30); see `augment.dihedral`."""
    xp = array_namespace(index)
    row, column = index[None, :, None], index[None, None, :]
    bottom, right = tall[:, None, None] - 1, wide[:, None, None] - 1
    zero = xp.zeros_like(row + column + bottom)
    cases = (
        (row + zero, column + zero),
        (right - column + zero, row + zero),
        (bottom - row + zero, right - column + zero),
        (column + zero, bottom - row + zero),
        (row + zero, right - column + zero),
        (bottom - row + zero, column + zero),
        (column + zero, row + zero),
        (right - column + zero, bottom - row + zero),
    )
    rows, columns = cases[0]
    for number in range(1, 8):
        here = (symmetry == number)[:, None, None]
        rows, columns = xp.where(here, cases[number][0], rows), xp.where(here, cases[number][1], columns)
    return rows, columns


def _running_minimum(values: Any, index: Any) -> Any:
    """The smallest of each entry and those before it, (n, 30)."""
    xp = array_namespace(values)
    later = index[None, :] > index[:, None]  # entry j comes after i
    largest = xp.zeros_like(values[:, None]) + ARC_SIDE
    return xp.min(xp.where(later, largest, values[:, None]), axis=-1)


def _diagonal(square: Any) -> Any:
    xp = array_namespace(square)
    count = xp.cumulative_sum(xp.ones_like(square[:1, 0], dtype=xp.int32), axis=-1)[0]
    return count[:, None] == count[None, :]


def _as_index(values: Any, like: Any) -> Any:
    """Integers of the type that gathering asks for: int64 in torch."""
    xp = array_namespace(values)
    return xp.astype(values, xp.argmax(like[:1, :1], axis=1).dtype)
