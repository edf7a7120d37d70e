"""Is the loss the same each time, and is it a sum over rows? Tried on a few rows, on one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from unisono.data.loading.checksum import checksum
from unisono.proof.diagnoses.predictions import find_constant, is_additive, is_equal, own_mean_weights
from unisono.proof.probes.state import describe_state, repeat_call
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts
from unisono.task import expand_counts

_ROWS = 4  # whose subsets are tried: 15 of them


def probe_loss(facts: RunFacts, trial: Trial) -> None:
    """Compute the loss of the same rows twice, and of every set of the first few.

    Args:
        facts: to write what was found into.
        trial: of a model whose outputs are the same each time, and do not depend on the rows beside a row.
    """
    task, micro, floor = trial.task, trial.micro, trial.floor

    def repeat() -> dict[str, float]:
        return trial.sums(trial.copy())

    with trial.undone():
        used = trial.copy()
        once = trial.sums(used)
        changed = (n for n, array in used.arrays.items() if checksum(array) != checksum(micro.arrays[n]))
        overwritten = next(changed, "")
        if once and micro.size > 1:  # what is remembered of the same rows alone may have settled by now
            trial.sums(trial.take(range(micro.size // 2)))

        def is_same(made: Mapping[str, float], name: str) -> bool:
            return is_equal(once[name], made[name], floor) or _is_rounding([once, made], name, floor)

        again = repeat_call(task, repeat, lambda made: all(is_same(made, name) for name in once))
        for name, value in once.items():
            if not is_same(again, name):
                said = f"'{name}' of the same outputs came to {value:.6g} and then to {again[name]:.6g}"
                facts.unstable_loss = f"{said}; {describe_state(task, repeat, None)}"
                return
        facts.overwritten = overwritten
        if not once or micro.size < 3 or not trial.can_take:
            return
        rows = tuple(range(min(micro.size, _ROWS)))
        found = {
            subset: _of_rows(trial, subset) for size in range(1, len(rows) + 1) for subset in combinations(rows, size)
        }
        # Neighbours in a row, and halves, are the same from either end.
        others = [_of_rows(trial, order)[0] for order in (rows[::-1], (rows[1], rows[0], *rows[2:]))]
        kinds = {}
        for name in once:
            if _is_rounding([sums for sums, _ in found.values()], name, floor):
                continue
            sums, counts = ({subset: values[i][name] for subset, values in found.items()} for i in (0, 1))
            # Else it draws, or depends on the places of rows.
            at_places = all(is_equal(turned[name], sums[rows], floor) for turned in others)
            kinds[name] = _kind(sums, counts, floor) if at_places else "places"
        facts.carry_by_neighbours = _find_carried_beside(trial, rows)
        facts.additivity = {name: kind for name, kind in kinds.items() if kind}
        if {"statistic", "number"} & {*kinds.values()}:
            facts.by_number = _find_by_number(trial, rows)


def _is_rounding(found: Sequence[Mapping[str, float]], name: str, floor: float) -> bool:
    """Whether a term is what the square of rounding leaves of zero beside the others: it follows no rule."""
    largest = max(abs(value) for sums in found for value in sums.values())
    return all(abs(sums[name]) <= floor**2 * largest for sums in found)


def _kind(sums: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], float], floor: float) -> str:
    """Of a term of which sets of rows have these sums and counts; see `RunFacts.additivity`."""
    if is_additive(sums, floor):
        return ""  # where counts do not add up, they are what is wrong, and are compared by themselves
    if is_additive(counts, floor) and find_constant(sums, floor) is not None:
        return "constant"
    if not all(counts.values()):
        return ""  # rows that count nothing leave open which of the two it is
    if own_mean_weights({rows: value / counts[rows] for rows, value in sums.items()}, floor):
        return "mean"
    if own_mean_weights(sums, floor):
        return "averaged"
    if _is_scaled_by_number(sums, floor):
        return "number"
    if _is_mean_of_some(sums, counts, floor):
        return "mean"
    return "largest" if is_additive_but_for_one(sums, floor) else "statistic"


def _is_mean_of_some(
    sums: Mapping[tuple[int, ...], float], counts: Mapping[tuple[int, ...], float], floor: float
) -> bool:
    """Whether all sets of three rows are such means, whose count of the fourth is 0 and clamped where it is alone."""
    for some in combinations(sorted({row for rows in sums for row in rows}), 3):
        part = {rows: value for rows, value in sums.items() if {*rows} <= {*some}}
        if is_additive(part, floor):
            continue
        if own_mean_weights({rows: value / counts[rows] for rows, value in part.items()}, floor):
            return True
    return False


def _is_scaled_by_number(values: Mapping[tuple[int, ...], float], limit: float) -> bool:
    """Whether every set of rows has the sum of what they have alone, times a number that only their number decides."""
    factors: dict[int, list[float]] = {}
    for rows, value in values.items():
        whole = sum(values[(row,)] for row in rows)
        factors.setdefault(len(rows), []).append(value / whole if whole else float("nan"))
    return all(is_equal(factor, each[0], 1e3 * limit) for each in factors.values() for factor in each)


def is_additive_but_for_one(values: Mapping[tuple[int, ...], float], limit: float) -> bool:
    """Whether, beside some one row, all others add up: what they are given depends on that row alone.

    So it is where rows are cut or padded to the longest, or divided by the largest. Where no two others add something,
    as to a maximum, that says nothing.
    """
    largest = max(map(abs, values.values()), default=0.0)
    for one in {row for rows in values for row in rows}:
        added = {
            tuple(row for row in rows if row != one): value - values[(one,)]
            for rows, value in values.items()
            if one in rows and len(rows) > 1
        }
        some = [rows for rows, value in added.items() if len(rows) == 1 and abs(value) > 1e3 * limit * largest]
        if len(some) > 1 and is_additive(added, limit):
            return True
    return False


def _find_by_number(trial: Trial, rows: Sequence[int]) -> str:
    """An output of the first two rows that is another where more rows are in the batch; empty for none."""
    few, many = (trial.outputs(trial.take(some)) for some in (rows[:2], rows))
    for name, value in many.items():
        if name in few and value.ndim and (len(few[name]), len(value)) == (2, len(rows)):
            off = np.abs(few[name] - value[:2]).max(initial=0)
            if off > trial.floor * np.abs(value).max(initial=0):
                return name
    return ""


def _find_carried_beside(trial: Trial, rows: Sequence[int]) -> str:
    """How the state that a row leaves for the next step differs with the rows beside it; empty if it does not."""
    together = trial.view.carry(trial.take(rows), trial.scalars)
    for row in rows if together else ():
        alone = trial.view.carry(trial.take([row]), trial.scalars)
        for name, value in together.items():
            off = np.abs(value[row].astype(float) - alone[name][0].astype(float)).max(initial=0)
            if off > trial.floor * np.abs(value).max(initial=0):
                return f"the state '{name}' that loss() returns for a row is another where other rows are beside it"
    return ""


def _of_rows(trial: Trial, rows: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums and counts of some rows."""
    part = trial.take(rows)
    sums = trial.sums(part)
    return sums, expand_counts(trial.task.counts(part.arrays), sums)
