"""Batches of several ranks side by side, as the one batch that one process would have of the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.proof.scripts.replay.content_store import NotKeptError, is_named_tuple

_MASK = "attention_mask"
_NO_TARGET = -100


def join_batches(parts: Sequence[Any], counts: Sequence[int | None]) -> Any:
    """One batch of the rows of all parts, in their order.

    Tensors are put one after another along their first axis, where that has a length for each row; what is equal in
    all parts stays. Sequences that are padded to each rank's own length are padded to the longest, if an
    `attention_mask` says where padding is.

    Args:
        parts: of equal structure, with their tensors.
        counts: rows of each; None: as many as the first tensor is long.

    Raises:
        NotKeptError: for what has no row axis, naming it.

    Example:
        >>> join_batches([{"x": torch.zeros(2, 3)}, {"x": torch.ones(1, 3)}], [2, 1])["x"].shape
        torch.Size([3, 3])
    """
    if len(parts) == 1:
        return parts[0]
    known = [count if count is not None else _find_count(part) for part, count in zip(parts, counts, strict=True)]
    return _join(parts, known, "the batch", None)


def _find_count(part: Any) -> int:
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        return next((count for one in part if (count := _find_count(one))), 0)
    return len(part) if isinstance(part, Tensor | np.ndarray) and part.ndim else 0


def _join(parts: Sequence[Any], counts: Sequence[int], name: str, mask: Sequence[Tensor] | None) -> Any:
    first = parts[0]
    if isinstance(first, Mapping):
        if any({*part} != {*first} for part in parts):
            raise NotKeptError(f"{name} has other keys on some ranks")
        masks = [part.get(_MASK) for part in parts]
        own = masks if all(isinstance(one, Tensor) and one.dim() == 2 for one in masks) else mask
        return {key: _join([part[key] for part in parts], counts, f"'{key}'", own) for key in first}
    if isinstance(first, Tensor):
        return _join_tensors(parts, counts, name, mask)
    if isinstance(first, np.ndarray) and first.dtype != object:
        return _join_tensors([torch.from_numpy(part) for part in parts], counts, name, mask).numpy()
    if isinstance(first, list | tuple):
        return _join_sequences(parts, counts, name, mask)
    if any(type(part) is not type(first) or part != first for part in parts):
        raise NotKeptError(f"{name} is {first!r} on rank 0 and not on all others, and has no rows")
    return first


def _join_sequences(parts: Sequence[Any], counts: Sequence[int], name: str, mask: Sequence[Tensor] | None) -> Any:
    """Of the parts of a batch if they join, else of its rows."""
    first = parts[0]
    each_row = [len(part) for part in parts] == [*counts] and not is_named_tuple(first)
    if each_row and all(isinstance(one, str | bytes | int | float | None) for part in parts for one in part):
        return type(first)(one for part in parts for one in part)
    try:
        if any(len(part) != len(first) for part in parts):
            raise NotKeptError(f"{name} has other lengths on some ranks")
        each = [_join([part[n] for part in parts], counts, f"{name}[{n}]", mask) for n in range(len(first))]
    except NotKeptError:
        if not each_row:
            raise
        return type(first)(one for part in parts for one in part)
    return type(first)(*each) if is_named_tuple(first) else type(first)(each)


def _join_tensors(parts: Sequence[Tensor], counts: Sequence[int], name: str, mask: Sequence[Tensor] | None) -> Tensor:
    with torch._C.DisableTorchFunction():
        by_row = [part.dim() and count and len(part) % count == 0 for part, count in zip(parts, counts, strict=True)]
        if all(by_row) and len({len(part) // count for part, count in zip(parts, counts, strict=True)}) == 1:
            if len({part.shape[1:] for part in parts}) > 1:
                parts = _pad(parts, name, mask)
            return torch.cat([*parts])
        if all(part.shape == parts[0].shape and torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0]
    shapes = " and ".join(str(tuple(part.shape)) for part in parts)
    raise NotKeptError(
        f"{name} has the shapes {shapes} for {' and '.join(map(str, counts))} rows, so none for each row"
    )


def _pad(parts: Sequence[Tensor], name: str, mask: Sequence[Tensor] | None) -> list[Tensor]:
    """Sequences of each rank's own length, at that of the longest."""
    fits = mask is not None and all(p.shape[:2] == m.shape for p, m in zip(parts, mask, strict=True))
    if mask is None or not fits or len({part.shape[2:] for part in parts}) > 1:
        raise NotKeptError(f"rows of {name} are of other lengths on some ranks, and no {_MASK} says what is padding")
    longest = max(part.shape[1] for part in parts)
    at_left = any(bool((one[:, 0] == 0).any()) for one in mask) and all(bool((one[:, -1] != 0).all()) for one in mask)
    padding = [part[one == 0] for part, one in zip(parts, mask, strict=True)]
    known = next((one.flatten()[0].item() for one in padding if one.numel()), None)
    value = known if known is not None else _NO_TARGET if "label" in name else 0
    result = []
    for part in parts:
        whole = part.new_full((len(part), longest, *part.shape[2:]), value)
        place = slice(longest - part.shape[1], None) if at_left else slice(part.shape[1])
        whole[:, place] = part
        result.append(whole)
    return result
