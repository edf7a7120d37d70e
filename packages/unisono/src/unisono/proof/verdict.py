"""The result of a proof: verdicts, marks and the exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unisono.proof.comparison import ComparedQuantity, Mark, first_failure
from unisono.proof.diagnoses.remedies import Diagnosis
from unisono.proof.invariants import NEIGHBOURS

EXIT_CODES: Mapping[Mark, int] = {"PASS": 0, "FAIL": 1, "ABSTAIN": 2}
ON_EVERY_LAYOUT = "a comparison that can fail on every layout"
DECISIVE = {NEIGHBOURS, ON_EVERY_LAYOUT}  # an ABSTAIN of these is one of the whole proof


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
        place: the functions of the user that make what differs first, with their lines; empty where none is known.
    """

    case: str
    reference: str
    bitwise: bool
    compared: list[ComparedQuantity] = field(default_factory=list)
    invariants: list[ComparedQuantity] = field(default_factory=list)
    diagnosis: Diagnosis | None = None
    fault: str = ""
    notes: list[str] = field(default_factory=list)
    place: str = ""

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
        return any(c.quantity in DECISIVE for c in self.abstained)

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
