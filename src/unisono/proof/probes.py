"""Small experiments on a task's own functions, on one process, before any layout is tried.

They decide nothing by themselves: what they find is recorded, and tells faults apart that look alike in the numbers of
a run. All that they call is called with the same weights and rows, and random states are restored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from unisono.data.loading.loader import MicroBatch
from unisono.engines.observers import ModelView
from unisono.proof.predictions import Subsets, is_additive, is_equal, own_mean_weights
from unisono.task import Task

_ROWS = 4  # whose subsets are tried: 15 of them


@dataclass(frozen=True)
class LossProbe:
    """What the loss of some rows of one micro-batch says.

    Attributes:
        unstable: why it is another each time, empty if it is the same.
        additivity: of the terms that are no sums over rows: `mean` for one that divides by a count of its own,
            `statistic` for anything else.
    """

    unstable: str = ""
    additivity: dict[str, str] = field(default_factory=dict)


def probe_loss(view: ModelView, task: Task, micro: MicroBatch, scalars: Mapping[str, float], floor: float) -> LossProbe:
    """Compute the loss of the same rows twice, and of every set of the first few.

    Args:
        view: of the model; its outputs for these rows are the same each time, and do not depend on their neighbours.
        task: whose `counts` go with the sums.
        micro: whose rows they are.
        scalars: of the first step.
        floor: relative difference that is rounding.
    """
    with view.without_side_effects(), global_generators() as moved:
        once, again = view.sums(micro, scalars), view.sums(micro, scalars)
        for name, value in once.items():
            if not is_equal(value, again[name], floor):
                draws = "".join(f"; it draws from {generator}, which no key seeds" for generator in moved())
                said = f"'{name}' of the same outputs came to {value:.6g} and then to {again[name]:.6g}{draws}"
                return LossProbe(unstable=said)
        if not once or micro.size < 3:
            return LossProbe()
        rows = tuple(range(min(micro.size, _ROWS)))
        found = {
            subset: _of_rows(view, task, micro, scalars, subset)
            for size in range(1, len(rows) + 1)
            for subset in combinations(rows, size)
        }
        turned = _of_rows(view, task, micro, scalars, rows[::-1])
    kinds = {}
    for name in once:
        sums = {subset: value[0][name] for subset, value in found.items()}
        counts = {subset: value[1][name] for subset, value in found.items()}
        if is_equal(turned[0][name], sums[rows], floor):  # else it draws, or depends on the places of rows
            kinds[name] = _kind(Subsets(sums, counts), floor)
    return LossProbe(additivity={name: kind for name, kind in kinds.items() if kind})


def _kind(found: Subsets, floor: float) -> str:
    if is_additive(found.sums, floor) and is_additive(found.counts, floor):
        return ""
    if not all(found.counts.values()):
        return ""  # rows that count nothing leave open which of the two it is
    return "mean" if own_mean_weights(found, floor) else "statistic"


def _of_rows(
    view: ModelView, task: Task, micro: MicroBatch, scalars: Mapping[str, float], rows: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and counts of some rows of a micro-batch."""
    chosen = list(rows)
    arrays = {n: a[chosen] if is_per_row(a, micro.size) else a for n, a in micro.arrays.items()}
    part = replace(micro, arrays=arrays, rows=micro.rows[chosen])
    return view.sums(part, scalars), dict(task.counts(arrays))


def is_per_row(array: Any, rows: int) -> bool:
    """Whether an array has one entry for each row."""
    return getattr(array, "ndim", 0) > 0 and len(array) == rows


@contextmanager
def global_generators() -> Iterator[Any]:
    """Restore Python's and NumPy's generators, which no engine does; what it yields names those that have moved."""
    states = random.getstate(), np.random.get_state(legacy=False)

    def moved() -> list[str]:
        checks = {
            "Python's random": random.getstate() != states[0],
            "numpy.random": str(np.random.get_state(legacy=False)) != str(states[1]),
        }
        return [name for name, differs in checks.items() if differs]

    try:
        yield moved
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
