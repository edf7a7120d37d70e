"""Are metrics and totals sums over rows? Tried on all rows of the first micro-batch, on one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from unisono.proof.diagnoses.predictions import is_equal
from unisono.proof.probes.state import repeat_call
from unisono.proof.probes.trial import Trial
from unisono.proof.recording.trace import RunFacts

_ROWS = 16  # that are tried by themselves, of a larger micro-batch the first ones


def probe_reports(facts: RunFacts, trial: Trial) -> None:
    """Compute sums and counts of metrics, and the totals, of all rows together and of each by itself.

    Args:
        facts: to write what was found into.
        trial: of a model whose outputs are the same each time, and do not depend on the rows beside a row.
    """
    report = getattr(trial.view, "report", None)  # torch's alone has it: in JAX a step is one program
    if report is None or trial.micro.size < 2:
        return
    rows = range(min(trial.micro.size, _ROWS))
    with trial.undone():
        whole = _report_rows(report, trial, rows)
        if not whole:
            return

        def repeats(made: Mapping[str, float]) -> bool:
            return all(is_equal(value, made[name], trial.floor) for name, value in whole.items())

        if not repeats(repeat_call(trial.task, lambda: _report_rows(report, trial, rows), repeats)):
            return  # it draws, or remembers: a matter of other probes
        alone = [_report_rows(report, trial, [row]) for row in rows]
    for name, value in whole.items():
        each = [numbers[name] for numbers in alone if name in numbers]
        if len(each) == len(rows) and (said := _describe_numbers(value, each, trial.floor)):
            facts.unsummed[name] = said


def _report_rows(report: Callable[..., dict[str, float]], trial: Trial, rows: Sequence[int]) -> dict[str, float]:
    found: dict[str, float] = report(trial.take(rows), trial.scalars)
    return found


def _describe_numbers(whole: float, each: Sequence[float], floor: float) -> str:
    """How a number of several rows is no sum of what they have alone, in words; empty where it is."""
    added = sum(each)
    scale = max(map(abs, [whole, *each]))
    if abs(whole - added) <= max(floor, 1e-9) * max(scale, abs(added)):
        return ""
    is_mean = is_equal(whole, added / len(each), 1e-9)
    how = ", but their mean" if is_mean else ""
    return f"of {len(each)} rows is {whole:.6g}, which is not the sum of what they have alone, {added:.6g}{how}"
