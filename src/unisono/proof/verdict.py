"""What a proof came to: verdicts, the table and the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field

from unisono.proof.comparison import Compared, Difference, Mark, first_failed
from unisono.proof.fault_names import Diagnosis
from unisono.proof.recording.trace import QUANTITIES


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
    compared: list[Compared] = field(default_factory=list)
    invariants: list[Compared] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    fault: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def mark(self) -> Mark:
        """FAIL if anything failed, PASS if an equality passed, else ABSTAIN."""
        marks = [c.mark for c in (*self.compared, *self.invariants)]
        if self.fault or "FAIL" in marks:
            return "FAIL"
        return "PASS" if any(c.mark == "PASS" for c in self.compared) else "ABSTAIN"

    @property
    def first(self) -> Compared | None:
        """The first that failed, in causal order."""
        return first_failed([*self.compared, *self.invariants])


def exit_code(verdicts: list[Verdict]) -> int:
    """0: an equality passed and nothing failed; 1: something failed; 2: nothing could be said."""
    marks = {verdict.mark for verdict in verdicts}
    return 1 if "FAIL" in marks else 0 if "PASS" in marks else 2


def lines(verdicts: list[Verdict], alone: list[Verdict]) -> list[str]:
    """The table and what explains it, for a terminal."""
    shown = [quantity for quantity in QUANTITIES if any(_of(v, quantity) for v in verdicts)]
    heads = ["", *("\n".join(q.split()) for q in shown)]
    rows = [[v.case, *(_cell(_of(v, q)) for q in shown)] for v in verdicts]
    result = _table(heads, rows)
    for verdict in (*alone, *verdicts):
        result += _explained(verdict)
    left_out = sorted({name for v in verdicts for c in v.compared for name in c.left_out})
    if left_out:
        result.append(
            "left out of optimizer state and parameters, since their true gradient is zero and the optimizer makes "
            f"steps of its rounding: {', '.join(left_out[:6])}"
        )
    return result


def _of(verdict: Verdict, quantity: str) -> Compared | None:
    return next((c for c in verdict.compared if c.quantity == quantity and c.why != "there is none"), None)


def _cell(compared: Compared | None) -> str:
    if compared is None:
        return "–"
    size = compared.worst.size
    return f"{compared.mark}\n{'equal' if size == 0 else 'differs' if size == float('inf') else f'{size:.0e}'}"


def _explained(verdict: Verdict) -> list[str]:
    abstained = [
        c for c in (*verdict.compared, *verdict.invariants) if c.mark == "ABSTAIN" and c.why != "there is none"
    ]
    result = [f"{verdict.case}: {note}" for note in verdict.notes]
    result += [f"{verdict.case}: ABSTAIN {c.quantity}: {c.why}" for c in abstained]
    first = verdict.first
    if first is None and not verdict.fault:
        return result
    where = _where(first.worst) if first else verdict.fault
    result.append(f"{verdict.case}: FAIL {first.quantity if first else 'the run'}: {where}")
    if verdict.diagnosis is not None:
        told = verdict.diagnosis
        result += [f"  likely: {told.fault} ({told.because})", f"  remedy: {told.remedy}", f"  page: {told.page}"]
    return result


def _where(worst: Difference) -> str:
    step = f"step {worst.step}, " if worst.step else ""
    ranks = f", ranks {list(worst.ranks)}" if worst.ranks else ""
    values = "" if worst.mine is None and worst.reference is None else f": {worst.mine} instead of {worst.reference}"
    size = "" if worst.size == float("inf") else f" (relative difference {worst.size:.1e})"
    return f"{step}{worst.name}{ranks}{values}{size}"


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
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
