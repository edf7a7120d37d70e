"""Does a row's loss depend on the rows that `collate` is given beside it, by padding or by what it computes of them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.proof.diagnoses.predictions import is_equal
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts
from unisono.task import expand_counts

_ROWS = 4  # that are tried alone
_REORDERED = (
    "collate() puts rows into an order of its own (sorted by length?): the state of a place goes to whatever row it "
    "puts there, which depends on the rows beside it; keep the order of the samples"
)


def probe_neighbours(facts: RunFacts, trial: Trial, samples: Sequence[Any]) -> None:
    """Compute the loss of each row twice: from a batch of its own, and cut out of the batch with the others.

    All that differs between the two is what `collate` made of the row, so the sums over the rows are the same unless
    that changes the loss. Padding that is masked changes nothing but the order of a sum.

    Args:
        facts: to write what was found into.
        trial: of a model that draws nothing and looks at one row at a time.
        samples: one for each row.
    """
    micro, count = trial.micro, min(len(samples), _ROWS)
    if len(samples) != micro.size or micro.size < 2:
        return
    with trial.undone():
        alone = [trial.task.collate([sample]) for sample in samples[:count]]
        if not all(_is_of_rows(one, micro.arrays, micro.size) for one in alone):
            return  # no row can be cut out of a stream of all of them
        cut = [trial.take([row]).arrays for row in range(count)]
        if _is_reordered(alone, cut) and trial.view.carry(trial.copy(), trial.scalars):
            facts.carry_by_neighbours = _REORDERED
        if count < micro.size and not all(map(_is_padded, alone, cut)):
            return  # rows may have changed places, and with some alone one would compare others
        ours, theirs = (_add_up(trial, batches) for batches in (alone, cut))
    different = [name for name in theirs if not is_equal(ours.get(name, 0.0), theirs[name], trial.floor)]
    if not different or not ours:
        return
    name = different[0]
    said = f"{name} of {count} rows is {ours[name]:.6g} where each has a batch of its own, and {theirs[name]:.6g}"
    pairs = _pair_up(alone, cut)
    if all(_is_padded(a, c) for a, c in pairs):
        widest = next((n for n in alone[0] if any(np.shape(a[n]) != np.shape(c[n]) for a, c in pairs)), "")
        facts.padding = f"{said} where collate() pads '{widest}' to the longest" if widest else ""
        return
    wrong = next(n for n in cut[0] if not all(n in a and _fits(a[n], c[n]) for a, c in pairs))
    facts.collated = f"{said} beside others; collate() gives a row another '{wrong}' then"


def _is_of_rows(alone: Mapping[str, Any], together: Mapping[str, Any], count: int) -> bool:
    """Whether arrays of a batch have a place for each row, or are the same for a row alone."""
    pairs = [(np.shape(value), np.shape(together[name])) for name, value in alone.items() if name in together]
    return all(one == whole or (one[:1] == (1,) and whole[:1] == (count,)) for one, whole in pairs)


def _is_reordered(alone: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]) -> bool:
    """Whether every row is in the batch, and some in the place of another one."""
    fits = [[_is_padded(one, other) for other in cut] for one in alone]
    return all(map(any, fits)) and not all(fits[row][row] for row in range(len(fits)))


def _pair_up(alone: Sequence[dict[str, Any]], cut: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Every row alone with the same row beside others, which `collate` may have sorted; in order where it is not so."""
    left, pairs = list(cut), list[tuple[dict[str, Any], ...]]()
    for one in sorted(alone, key=lambda arrays: -sum(np.size(value) for value in arrays.values())):
        place = next((place for place, other in enumerate(left) if _is_padded(one, other)), None)
        if place is None:
            return [*zip(alone, cut, strict=True)]
        pairs.append((one, left.pop(place)))
    return pairs


def _add_up(trial: Trial, batches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Sums and counts over batches of one row."""
    total: dict[str, float] = {}
    for row, arrays in enumerate(batches):
        sums = trial.sums(replace(trial.micro, arrays=arrays, rows=trial.micro.rows[row : row + 1]))
        found = {f"the sum of '{name}'": value for name, value in sums.items()}
        if sums:
            counts = expand_counts(trial.task.counts(arrays), sums)
            found |= {f"the count of '{name}'": float(value) for name, value in counts.items()}
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _is_padded(alone: Mapping[str, Any], together: Mapping[str, Any]) -> bool:
    """Whether a row beside others is the row alone, and before or after it one number again and again.

    Of whole numbers one more may stand between: inputs of a language model lack the last token of the longest row.
    """
    return alone.keys() == together.keys() and all(_fits(alone[name], together[name]) for name in alone)


def _fits(alone: Any, together: Any) -> bool:
    if not (hasattr(alone, "ndim") and hasattr(together, "ndim")):
        return bool(alone == together)
    a, b = np.asarray(alone), np.asarray(together)
    if a.ndim != b.ndim or any(m > n for m, n in zip(a.shape, b.shape, strict=True)):
        return False
    at_end = tuple(slice(whole - size, whole) for size, whole in zip(a.shape, b.shape, strict=True))
    for inside in (tuple(slice(size) for size in a.shape), at_end):
        outside = np.ones(b.shape, dtype=bool)
        outside[inside] = False
        if np.array_equal(a, b[inside]) and len(np.unique(b[outside])) <= 1:
            return True
    longer = [axis for axis, (size, whole) in enumerate(zip(a.shape, b.shape, strict=True)) if size != whole]
    if b.dtype.kind not in "iu" or len(longer) != 1:
        return False
    a, b = (np.moveaxis(array, longer[0], -1) for array in (a, b))
    size = a.shape[-1]
    return np.array_equal(a, b[..., :size]) and len(np.unique(b[..., size + 1 :])) <= 1
