"""What a proof prints: verdict, what differs first, why, how to fix it; below it all that was compared and was not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from unisono.proof.comparison import ComparedQuantity, Difference, Mark
from unisono.proof.recording.trace import QUANTITIES
from unisono.proof.verdict import DECISIVE, Verdict, abstentions, join_marks
from unisono.runtime.display.text_table import split_columns
from unisono.runtime.text import join_names

_NO_TENSORS = {"sample ids", "loss", "gradient norm", "learning rate", "metrics", "evaluation"}


def format_outcome(verdicts: Sequence[Verdict]) -> str:
    """The last word: PASS, FAIL or ABSTAIN; and of a PASS what it does not cover."""
    mark = join_marks(verdicts)
    if mark != "PASS":
        return mark
    wholly = [f"{v.case} against {v.reference}" for v in verdicts if v.reference and v.mark == "ABSTAIN"]
    cases: dict[str, list[str]] = {}
    for one in abstentions([v for v in verdicts if not v.reference or v.mark == "PASS"]):
        cases.setdefault(one.quantity, []).append(one.case)
    partly = [f"{what} ({names})" for what, names in _join_quantities(cases)]
    return f"PASS; not judged: {'; '.join([*wholly, *partly])}" if wholly or partly else mark


def format_verdicts(
    verdicts: list[Verdict],
    alone: list[Verdict],
    full: bool = False,
    mark: Mark | None = None,
    width: int | None = None,
) -> list[str]:
    """What a terminal shows: the verdict, what failed and why; then the table, what was left open, and its words.

    Args:
        verdicts: of the cases, a row each.
        alone: of their references.
        full: with a column for every quantity, not only the largest difference.
        mark: of all, where it is not that of `join_marks`.
        width: of the terminal, in which columns that do not fit follow below; None for no limit.
    """
    judged = [*alone, *verdicts]
    result = [_format_headline(judged, mark or join_marks(judged)), *_explain_failures(judged)]
    if full:
        shown = [quantity for quantity in QUANTITIES if any(_find_quantity(v, quantity) for v in verdicts)]
        heads = ["", *("\n".join(q.split()) for q in shown)]
        rows = [[v.case, *(_format_cell(_find_quantity(v, q)) for q in shown)] for v in verdicts]
        result += _format_table(heads, rows, width)
    else:
        result += _format_table(
            ["", "verdict", "largest difference"], [[v.case, v.mark, _format_worst(v)] for v in verdicts], None
        )
    result += _describe_cases(judged)
    reasons: dict[str, dict[str, list[str]]] = {}
    for one in abstentions(judged):
        reasons.setdefault(one.why, {}).setdefault(one.quantity, []).append(one.case)
    for why, quantities in reasons.items():
        result += [f"{cases}: ABSTAIN {what}: {why}" for what, cases in _join_quantities(quantities)]
    notes: dict[str, list[str]] = {}
    for verdict in judged:
        for note in verdict.notes:
            notes.setdefault(note, []).append(verdict.case)
    result += [f"{_format_cases(cases)}: {note}" for note, cases in notes.items()]
    left_out = sorted({name for v in verdicts for c in v.compared for name in c.left_out})
    if left_out:
        result.append(
            "left out of optimizer state and parameters, since their true gradient is zero and the optimizer "
            f"amplifies its rounding: {join_names(left_out, 6)}"
        )
    return result


def _format_headline(judged: Sequence[Verdict], mark: Mark) -> str:
    failed = [verdict for verdict in judged if verdict.mark == "FAIL"]
    if mark == "FAIL":
        return f"FAIL: {len(failed)} of {len(judged)} cases"
    if mark == "ABSTAIN":
        decisive = next((c.why for v in judged for c in v.abstained if c.quantity in DECISIVE), "")
        return f"ABSTAIN: {decisive or 'nothing could be compared'}"
    return format_outcome(judged)


_LETTER = re.compile(r" m(\d+) ")
_PRECISIONS = {"fp64": "double precision", "fp32": "single precision", "bf16": "computed in bf16"}


def _describe_cases(judged: Sequence[Verdict]) -> list[str]:
    """What the names of cases mean, by the first of them: `single m4 fp64`."""
    first = judged[0].case if judged else ""
    found = _LETTER.search(first)
    if not found:
        return []
    process, precision = first.partition(" ")[0], first.rpartition(" ")[2]
    who = "one process, which the others have to equal" if process == "single" else f"on {process}"
    rows = f"{found[1]} row{'s' * (found[1] != '1')} in a micro-batch"
    return [f"{first}: {who}; {rows}; {_PRECISIONS.get(precision, precision)}", ""]


def _explain_failures(judged: Sequence[Verdict]) -> list[str]:
    """Every fault once: what differs first, why and how to fix it; cases that fail alike stand in a line below."""
    failed = [verdict for verdict in judged if verdict.mark == "FAIL"]
    places = {verdict.case: number for number, verdict in enumerate(judged)}
    by_fault: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in sorted(failed, key=_is_of_the_proof):
        name = verdict.diagnosis.fault if verdict.diagnosis else ""
        error = _WHICH.sub("", verdict.fault) if verdict.fault else ""  # of one error, ranks and logs are others
        by_fault.setdefault((name, error), []).append(verdict)
    result: list[str] = []
    for alike in by_fault.values():
        shown, *others = sorted(alike, key=lambda v: (_is_of_the_proof(v), _begins(v), places[v.case]))
        result += _explain_verdict(shown)
        if others:
            more = f" and {len(others) - _MAX_CASES} more" if len(others) > _MAX_CASES else ""
            result.append(f"  also: {'; '.join(map(_format_case, others[:_MAX_CASES]))}{more}")
    return result


_WHICH = re.compile(r"\S*logs\S*|rank \d+|0x[0-9a-f]+|\d+(\.\d+)? s\b")
_MAX_CASES = 4  # that are named of those that fail alike


def _is_of_the_proof(verdict: Verdict) -> bool:
    """Whether what differs first is the proof's own update: what a user's run shows comes before it."""
    return verdict.first is not None and verdict.first.quantity == "update"


def _begins(verdict: Verdict) -> float:
    """The step of its first difference; those without one come last."""
    first = verdict.first
    return (first.worst.step if first else 0) or math.inf


def _format_case(verdict: Verdict) -> str:
    first = verdict.first
    if first is None:
        return verdict.case
    step = f", step {first.worst.step}" if first.worst.step else ""
    return f"{verdict.case} ({first.quantity}{step})"


def _explain_verdict(verdict: Verdict) -> list[str]:
    """Its failure: what differs, why, how to fix it, and where to read more."""
    first, diagnosis = verdict.first, verdict.diagnosis
    where = _format_difference(first.worst, first.quantity not in _NO_TENSORS) if first else verdict.fault
    result = [f"{verdict.case}: FAIL {first.quantity if first else 'the run'}: {where}"]
    if verdict.place:
        result.append(f"  made by: {verdict.place}")
    if diagnosis is not None:
        known = "" if diagnosis.because in where else f" ({diagnosis.because})"
        result += [
            f"  likely: {diagnosis.fault}{known}",
            f"  remedy: {diagnosis.remedy}",
            f"  more: {diagnosis.more}",
        ]
    return result


def _find_quantity(verdict: Verdict, quantity: str) -> ComparedQuantity | None:
    return next((c for c in verdict.compared if c.quantity == quantity and c.why != "there is none"), None)


def _format_cases(names: Sequence[str]) -> str:
    """One case by its name, of several the first and how many more."""
    more = len(names) - 1
    return f"{names[0]} and {more} more case{'s' if more > 1 else ''}" if more else names[0]


def _join_quantities(cases: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Quantities that stand for the same cases side by side, each time with these cases."""
    by_cases: dict[tuple[str, ...], list[str]] = {}
    for quantity, names in cases.items():
        by_cases.setdefault(tuple(names), []).append(quantity)
    return [(", ".join(quantities), _format_cases(names)) for names, quantities in by_cases.items()]


def _format_worst(verdict: Verdict) -> str:
    """The first failure, or else the largest difference that was judged, with its quantity."""
    judged = [c for c in verdict.compared if c.quantity in QUANTITIES and c.mark != "ABSTAIN"]
    worst = verdict.first or max(judged, key=lambda c: c.worst.size, default=None)
    if worst is None:
        return "–"
    shown = f"{_format_size(worst.worst.size)} {worst.quantity}" if worst.worst.size else "equal"
    larger = any(c.worst.size > worst.worst.size for c in verdict.abstained)
    return f"{shown}, in part" if verdict.mark == "PASS" and larger else shown


def _format_cell(compared: ComparedQuantity | None) -> str:
    if compared is None:
        return "–"
    return f"{compared.mark}\n{_format_size(compared.worst.size)}"


def _format_size(size: float) -> str:
    return "equal" if size == 0 else "differs" if size == float("inf") else f"{size:.0e}"


def _format_difference(worst: Difference, tensor: bool) -> str:
    """In words, with the values of a scalar, or the norms of a tensor."""
    step = f"step {worst.step}, " if worst.step else ""
    ranks = f", ranks {list(worst.ranks)}" if worst.ranks else ""
    known = worst.mine is not None or worst.reference is not None
    values = f": {'norm ' * tensor}{worst.mine} instead of {worst.reference}" if known else ""
    size = "" if worst.size == float("inf") else f" (relative difference {worst.size:.1e})"
    return f"{step}{worst.name}{ranks}{values}{size}"


def _format_table(heads: list[str], rows: list[list[str]], width: int | None) -> list[str]:
    """Columns of two-line cells."""
    widths = [max(map(len, "\n".join(column).splitlines())) for column in zip(heads, *rows, strict=True)]
    return [
        line
        for columns in split_columns(widths, width and width - 2, gap=3)
        for line in _draw_table([[line[column] for column in columns] for line in (heads, *rows)])
    ]


def _draw_table(lines: list[list[str]]) -> list[str]:
    from io import StringIO

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for head in lines[0]:
        table.add_column(head, no_wrap=True)
    for row in lines[1:]:
        table.add_row(*row)
    screen = StringIO()
    Console(file=screen, width=10_000, highlight=False, emoji=False, markup=False).print(table)
    return [line.rstrip() for line in screen.getvalue().splitlines()]
