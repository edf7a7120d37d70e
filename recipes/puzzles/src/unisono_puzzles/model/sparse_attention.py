"""Sparse attention: each cell attends to its row, its column, its box and the prefix only.

Rows, columns and boxes each cut the grid into groups of equal size, so the scores are three batched products of small
matrices: no mask over all pairs, and no copies of neighbours. A cell that two of the groups share counts once. The
prefix attends to everything, and everything attends to it. Written for both engines, on the Python array API.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from array_api_compat import array_namespace
from numpy.typing import NDArray

from unisono_puzzles.data.formats import Format

Softmax = Callable[[Any], Any]  # over the last axis


def attend(query: Any, key: Any, value: Any, format_: Format, prefix: int, seen: Any, softmax: Softmax) -> Any:
    """Attention over a prefix and the cells of a grid; all three (rows, heads, prefix + cells, features).

    `seen` is `counted_once` as an array of the engine, and `softmax` the engine's.
    """
    xp = array_namespace(query)
    query = query * query.shape[-1] ** -0.5
    first, cells = query[:, :, :prefix], query[:, :, prefix:]
    first = softmax(first @ _transpose(key)) @ value
    keys, values = key[:, :, prefix:], value[:, :, prefix:]
    scores = [cells @ _transpose(key[:, :, :prefix])]
    for cut in _CUTS:
        group = _split_groups(cells, format_, cut) @ _transpose(_split_groups(keys, format_, cut))
        scores.append(_merge_groups(group, format_, cut))
    sizes = [one.shape[-1] for one in scores]
    shares = softmax(xp.where(seen, xp.concat(scores, axis=-1), -float("inf")))
    mixed = shares[..., :prefix] @ value[:, :, :prefix]
    at = prefix
    for cut, size in zip(_CUTS, sizes[1:], strict=True):
        part = _split_groups(shares[..., at : at + size], format_, cut) @ _split_groups(values, format_, cut)
        mixed = mixed + _merge_groups(part, format_, cut)
        at += size
    return xp.concat([first, mixed], axis=2)


@lru_cache(maxsize=8)
def counted_once(format_: Format, prefix: int) -> NDArray[np.bool_]:
    """Which scores count, (cells, prefix + row + column + box): a cell's own row, then what that leaves out."""
    cells = np.arange(format_.length)
    row, column = np.divmod(cells, format_.width)
    columns = [_members(format_, cut) for cut in _CUTS]
    by_row = np.ones((len(cells), columns[0].shape[1]), dtype=bool)
    by_column = row[columns[1]] != row[:, None]
    by_box = (row[columns[2]] != row[:, None]) & (column[columns[2]] != column[:, None])
    return np.concatenate([np.ones((len(cells), prefix), dtype=bool), by_row, by_column, by_box], axis=1)


_CUTS = ("row", "column", "box")


def _members(format_: Format, cut: str) -> NDArray[np.int64]:
    """The cells of each cell's group, (cells, group)."""
    grid = np.arange(format_.length, dtype=np.float64)[None, None, :, None]
    groups = _split_groups(grid, format_, cut)  # (1, 1, groups, size, 1)
    spread = np.broadcast_to(groups[..., 0][:, :, :, None], (*groups.shape[:4], groups.shape[3]))
    return np.asarray(_merge_groups(np.ascontiguousarray(spread), format_, cut)[0, 0], dtype=np.int64)


def _transpose(value: Any) -> Any:
    return array_namespace(value).matrix_transpose(value)


def _split_groups(value: Any, format_: Format, cut: str) -> Any:
    """(rows, heads, cells, features) -> (rows, heads, groups, cells of one, features)."""
    xp = array_namespace(value)
    rows, heads, _, features = value.shape
    height, width = format_.height, format_.width
    if cut == "row":
        return xp.reshape(value, (rows, heads, height, width, features))
    if cut == "column":
        return xp.permute_dims(xp.reshape(value, (rows, heads, height, width, features)), (0, 1, 3, 2, 4))
    tall, wide = format_.box
    split = xp.reshape(value, (rows, heads, height // tall, tall, width // wide, wide, features))
    boxes = height // tall * (width // wide)
    return xp.reshape(xp.permute_dims(split, (0, 1, 2, 4, 3, 5, 6)), (rows, heads, boxes, tall * wide, features))


def _merge_groups(value: Any, format_: Format, cut: str) -> Any:
    """The inverse of `_split_groups`."""
    xp = array_namespace(value)
    rows, heads, _, _, features = value.shape
    height, width = format_.height, format_.width
    if cut == "column":
        value = xp.permute_dims(value, (0, 1, 3, 2, 4))
    if cut == "box":
        tall, wide = format_.box
        split = xp.reshape(value, (rows, heads, height // tall, width // wide, tall, wide, features))
        value = xp.permute_dims(split, (0, 1, 2, 4, 3, 5, 6))
    return xp.reshape(value, (rows, heads, height * width, features))
