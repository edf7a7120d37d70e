"""The result of a proof: verdicts, the table and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.proof.comparison import NEIGHBOURS, ComparedQuantity, Difference, Mark, first_failure
from unisono.proof.fault_names import Diagnosis
from unisono.proof.recording.trace import QUANTITIES

EXIT_CODES: Mapping[Mark, int] = {"PASS": 0, "FAIL": 1, "ABSTAIN": 2}
ON_EVERY_LAYOUT = "a comparison that can fail on every layout"
_DECISIVE = {NEIGHBOURS, ON_EVERY_LAYOUT}  # an ABSTAIN of these is one of the whole proof
_NO_TENSORS = {"sample ids", "loss", "gradient norm", "learning rate", "metrics", "evaluation"}


@dataclass(frozen=True)
class Abstention:
    """What was not compared, and why.

    Attributes:
        case: in which.
        quantity: or an invariant, or `the run` where all of it was not compared.
        why: the reason.
    """

    case: str
    quantity: str
    why: str


@dataclass
class Verdict:
    """What was found for one case.

    Attributes:
        case: its name.
        reference: the name of the case it was compared with.
        bitwise: whether it had to be equal in every bit.
        compared: quantity by quantity, in causal order.
        invariants: what must hold of the run alone.
        diagnosis: the likely fault, if something failed.
        fault: the error that ended the run, if one did.
        notes: what is worth knowing beside the marks.
    """

    case: str
    reference: str
    bitwise: bool
    compared: list[ComparedQuantity] = field(default_factory=list)
    invariants: list[ComparedQuantity] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    fault: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def mark(self) -> Mark:
        """FAIL if anything failed, PASS if an equality passed, else ABSTAIN, and where gradients were not compared."""
        marks = [c.mark for c in (*self.compared, *self.invariants)]
        if self.fault or "FAIL" in marks:
            return "FAIL"
        if any(c.quantity == "raw gradients" for c in self.abstained):
            return "ABSTAIN"
        return "PASS" if any(c.mark == "PASS" for c in self.compared) else "ABSTAIN"

    @property
    def abstained(self) -> list[ComparedQuantity]:
        """What is there and was not compared."""
        found = (*self.compared, *self.invariants)
        return [c for c in found if c.mark == "ABSTAIN" and c.why != "there is none"]

    @property
    def withholds(self) -> bool:
        """Whether it leaves something open without which a proof has not shown that layouts compute the same."""
        return any(c.quantity in _DECISIVE for c in self.abstained)

    @property
    def first(self) -> ComparedQuantity | None:
        """The first that failed, in causal order."""
        return first_failure([*self.compared, *self.invariants])


def join_marks(verdicts: Sequence[Verdict]) -> Mark:
    """FAIL if something failed, PASS if an equality passed and nothing decisive is open, else ABSTAIN."""
    marks = {verdict.mark for verdict in verdicts}
    if "FAIL" in marks:
        return "FAIL"
    return "PASS" if "PASS" in marks and not any(verdict.withholds for verdict in verdicts) else "ABSTAIN"


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """That of the mark of all."""
    return EXIT_CODES[join_marks(verdicts)]


def abstentions(verdicts: Sequence[Verdict]) -> list[Abstention]:
    """What was not compared, in the order of the verdicts."""
    return [Abstention(v.case, c.quantity, c.why) for v in verdicts for c in v.abstained]


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
    return f"PASS, except {'; '.join([*wholly, *partly])}" if wholly or partly else mark


def format_verdicts(verdicts: list[Verdict], alone: list[Verdict], full: bool = False) -> list[str]:
    """The table and what explains it, for a terminal.

    Args:
        verdicts: of the cases, a row each.
        alone: of their references.
        full: with a column for every quantity, not only the largest difference; wider than a terminal.
    """
    if full:
        shown = [quantity for quantity in QUANTITIES if any(_find_quantity(v, quantity) for v in verdicts)]
        heads = ["", *("\n".join(q.split()) for q in shown)]
        rows = [[v.case, *(_format_cell(_find_quantity(v, q)) for q in shown)] for v in verdicts]
        result = _format_table(heads, rows)
    else:
        result = _format_table(
            ["", "verdict", "largest difference"], [[v.case, v.mark, _format_worst(v)] for v in verdicts]
        )
    judged = [*alone, *verdicts]
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
    told: set[Diagnosis] = set()
    for verdict in judged:
        result += _explain_verdict(verdict, told)
    left_out = sorted({name for v in verdicts for c in v.compared for name in c.left_out})
    if left_out:
        result.append(
            "left out of optimizer state and parameters, since their true gradient is zero and the optimizer "
            f"amplifies its rounding: {', '.join(left_out[:6])}"
        )
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


def _explain_verdict(verdict: Verdict, told: set[Diagnosis]) -> list[str]:
    """Its failure; of a diagnosis that was told before, its name alone."""
    first = verdict.first
    if first is None and not verdict.fault:
        return []
    where = _format_difference(first.worst, first.quantity not in _NO_TENSORS) if first else verdict.fault
    result = [f"{verdict.case}: FAIL {first.quantity if first else 'the run'}: {where}"]
    diagnosis = verdict.diagnosis
    if diagnosis in told:
        result.append(f"  likely: {diagnosis.fault}, as above")
    elif diagnosis is not None:
        told.add(diagnosis)
        result += [
            f"  likely: {diagnosis.fault} ({diagnosis.because})",
            f"  remedy: {diagnosis.remedy}",
            f"  page: {diagnosis.page}",
        ]
    return result


def _format_difference(worst: Difference, tensor: bool) -> str:
    """In words, with the values of a scalar, or the norms of a tensor."""
    step = f"step {worst.step}, " if worst.step else ""
    ranks = f", ranks {list(worst.ranks)}" if worst.ranks else ""
    known = worst.mine is not None or worst.reference is not None
    values = f": {'norm ' * tensor}{worst.mine} instead of {worst.reference}" if known else ""
    size = "" if worst.size == float("inf") else f" (relative difference {worst.size:.1e})"
    return f"{step}{worst.name}{ranks}{values}{size}"


def _format_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Columns of two-line cells."""
    from io import StringIO

    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1))
    for head in heads:
        table.add_column(head, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    screen = StringIO()
    Console(file=screen, width=200, highlight=False, emoji=False, markup=False).print(table)
    return [line.rstrip() for line in screen.getvalue().splitlines()]
