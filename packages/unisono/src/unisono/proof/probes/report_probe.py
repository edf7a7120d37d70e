"""Are metrics and totals sums over rows? Tried on all rows of the first micro-batch, on one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from unisono.proof.diagnoses.predictions import is_equal
from unisono.proof.probes.state import repeat_call
from unisono.proof.probes.trial import Trial

_ROWS = 16  # that are tried by themselves, of a larger micro-batch the first ones


def find_unsummed(trial: Trial, training: bool = True) -> dict[str, list[str]]:
    """Compute sums and counts of metrics, the totals and the loss of all rows together and of each by itself.

    Args:
        trial: of a model whose outputs are the same each time.
        training: whether passes are those of the training, in which rows may not depend on those beside them.

    Returns:
        Those that are no sums over rows, and what they are; see `RunFacts.unsummed`.
    """
    view_report = getattr(trial.view, "report", None)  # torch's alone has it: in JAX a step is one program
    if view_report is None or trial.micro.size < 2 or not trial.can_take:
        return {}
    report, unsummed = partial(view_report, training=training), dict[str, list[str]]()
    rows = range(min(trial.micro.size, _ROWS))
    with trial.undone():
        whole = _report_rows(report, trial, rows)
        if not whole:
            return {}

        def repeats(made: Mapping[str, float]) -> bool:
            return all(is_equal(value, made[name], trial.floor) for name, value in whole.items())

        if not repeats(repeat_call(trial.task, lambda: _report_rows(report, trial, rows), repeats)):
            return {}  # it draws, or remembers: a matter of other probes
        alone, order = [_report_rows(report, trial, [row]) for row in rows], [1, 0, *rows[2:]]
        turned, fewer = _report_rows(report, trial, order), _report_rows(report, trial, rows[:-1])
    for name, value in whole.items():
        each = [numbers[name] for numbers in alone if name in numbers]
        if len(each) != len(rows):
            continue
        found: tuple[str, str] | None
        if not is_equal(value, turned.get(name, math.nan), trial.floor):
            found = "places", f"of {len(rows)} rows is {value:.6g}, and in another order {turned[name]:.6g}"
        elif (found := _find_kind(value, fewer.get(name, math.nan), each, trial.floor)) is None:
            continue
        unsummed[name] = list(found)
    return unsummed


def _report_rows(report: Callable[..., dict[str, float]], trial: Trial, rows: Sequence[int]) -> dict[str, float]:
    found: dict[str, float] = report(trial.take(rows), trial.scalars)
    return found


def _find_kind(whole: float, fewer: float, each: Sequence[float], floor: float) -> tuple[str, str] | None:
    """How a number of several rows is no sum of what they have alone; None where it is.

    Args:
        whole: of all rows.
        fewer: of all but the last one.
        each: of every row alone.
        floor: relative difference that is rounding.
    """
    added, count = sum(each), len(each)
    limit = max(floor, 1e-9) * max(map(abs, [whole, added, *each]))
    if abs(whole - added) <= limit:
        return None
    once = (added - whole) / (count - 1)
    is_constant = max(abs(one - once) for one in each) <= limit  # as the count of a mean
    if count > 2 and not is_constant and abs(sum(each[:-1]) - (count - 2) * once - fewer) <= limit:
        return "constant", f"of any rows is the sum of what each of them adds, and once more {once:.6g}"
    is_mean = is_equal(whole, added / count, 1e-9)
    how = ", but their mean" if is_mean else ""
    said = f"of {count} rows is {whole:.6g}, which is not the sum of what they have alone, {added:.6g}{how}"
    return "statistic", said
