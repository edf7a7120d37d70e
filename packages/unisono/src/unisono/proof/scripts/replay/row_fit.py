"""Whether what a rank has of some rows is what one process has of them, or that scaled and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_EXACT = 1e-9  # relative; values of a run in fp64 that are the same are closer
_STANDARD = 1e-5  # what is added to a deviation that is divided by may come to
_LEAST = 4  # rows more than the two numbers that are fitted
_NO_MULTIPLE = "no multiple of what one process has for the same rows"


@dataclass(frozen=True)
class RowFit:
    """How given rows differ from the native ones in their place.

    Attributes:
        words: that say so.
        standardised: whether a statistic of these rows alone makes the difference.
    """

    words: str
    standardised: bool = False


def find_rows(native: Tensor, given: Tensor) -> list[int] | None:
    """The places of all given rows among the native ones; None where one is not there, or is there twice."""
    if native.dim() < 1 or native.shape[1:] != given.shape[1:]:
        return None
    whole, places = native.reshape(len(native), -1), []
    for row in given.reshape(len(given), -1):
        found = (whole == row).all(dim=1).nonzero().flatten().tolist()
        if len(found) != 1:
            return None
        places += found
    return places


def describe_fit(native: Tensor, given: Tensor) -> RowFit | None:
    """How given rows differ from the native ones in their place; None where they are the same.

    Example:
        >>> describe_fit(torch.arange(6.0), 2 * torch.arange(6.0) + 1).words
        '2 times what one process has for the same rows and 1 more'
    """
    if native.shape != given.shape or not given.is_floating_point():
        return None if torch.equal(native, given) else RowFit(_NO_MULTIPLE)
    a, b = native.double().reshape(len(native), -1), given.double().reshape(len(given), -1)
    size = float(b.abs().max()) if b.numel() else 0.0
    if float((a - b).abs().max() if b.numel() else 0.0) <= _EXACT * size:
        return None
    fits = [_fit(a[:, column], b[:, column]) for column in range(a.shape[1])]
    if len(a) < 2 + _LEAST or any(one is None for one in fits):
        return RowFit(_NO_MULTIPLE)
    factor, more = next(one for one in fits if one is not None)
    each = ", and others in other columns" if len({*fits}) > 1 else ""
    why = f", by a statistic of these rows: {found}" if (found := _find_standard(b)) else ""
    words = f"{factor:.6g} times what one process has for the same rows and {more:.6g} more{each}{why}"
    return RowFit(words, bool(found))


def _find_standard(rows: Tensor) -> str:
    """In words, the statistic of these rows that is that of standardised values in every column; empty if none is."""
    size, centred = rows.std(dim=0, correction=0), rows.mean(dim=0)
    if bool((centred.abs() <= _STANDARD * size).all()):
        return "their mean is 0"
    deviations = (rows.std(dim=0, correction=correction) for correction in (0, 1))
    return "their deviation is 1" if any(bool(((one - 1).abs() <= _STANDARD).all()) for one in deviations) else ""


def fit_parts(native: Any, parts: Sequence[Any]) -> tuple[tuple[float, float], ...] | None:
    """By rank and column, the factor and the summand that make a batch of one process those of the ranks.

    Rows of rank r are those from r on in steps of the number of ranks, or the r-th stretch of them. None where no such
    numbers make all of it, or where they change nothing but columns of evenly spaced values, or of two: those of other
    rows are such multiples of them.
    """
    whole, found = _find_values(native), [_find_values(part) for part in parts]
    each = [one for one in found if one is not None]
    lengths = [len(one) for one in each]
    if whole is None or len(each) < len(parts) or sum(lengths) != len(whole) or min(lengths) < 2 + _LEAST:
        return None
    for dealt in ([whole[rank :: len(each)] for rank in range(len(each))], [*whole.split(lengths)]):
        if any(mine.shape != one.shape for mine, one in zip(dealt, each, strict=True)):
            continue
        pairs = [(mine[:, n], one[:, n]) for mine, one in zip(dealt, each, strict=True) for n in range(one.shape[1])]
        fits = [_fit(mine, one) for mine, one in pairs]
        known = tuple(one for one in fits if one is not None)
        if len(known) == len(fits):
            changed = any(
                abs(a - 1) > _EXACT or abs(b) > _EXACT
                for (a, b), (mine, _) in zip(known, pairs, strict=True)
                if _tells_rows(mine)
            )
            return known if changed else None
    return None


def _tells_rows(column: Tensor) -> bool:
    """Whether other rows of the data are hardly its values scaled and shifted, as those of a grid or a flag are."""
    return len(column.unique()) > 2 and _fit(torch.arange(len(column), dtype=column.dtype), column) is None


def _find_values(batch: Any) -> Tensor | None:
    """The first tensor of a batch that holds real numbers, row by row."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim():
            return leaf.detach().double().reshape(len(leaf), -1)
    return None


def _fit(native: Tensor, given: Tensor) -> tuple[float, float] | None:
    """The factor and the summand that make all of one of the other."""
    spread = native - native.mean()
    if not spread.any():
        return None if (given - given[:1]).any() else (1.0, float((given - native)[0]))
    factor = float((spread * (given - given.mean())).sum() / (spread * spread).sum())
    more = float(given.mean() - factor * native.mean())
    off = (factor * native + more - given).abs().max()
    return (factor, more) if float(off) <= _EXACT * float(given.abs().max()) else None
