"""Do many processes evaluate the rows that one evaluates? Held against what comes of the evaluation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.predictions import is_equal
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.replay.reading import ReadingFacts, read_reading
from unisono.runtime.fault_names import FaultName

EVALUATED = "evaluations read every row once"
_SAME = 1e-6  # relative, of numbers that come of an evaluation


def judge_evaluation(
    mine: ScriptTrace, reference: ScriptTrace, compared: Sequence[ComparedQuantity]
) -> tuple[ComparedQuantity | None, Diagnosis | None]:
    """What is to be said of the first evaluation of a script; nothing where none reads all rows of its data set.

    Rows that are read twice do no harm where the metric leaves them out, as `gather_for_metrics` of Accelerate does.
    So it fails where no number that the script reads after the evaluation is one that one process reads, every rank
    that has evaluated reads one of them alike, and weights are the same: numbers of weights that were drawn otherwise,
    or trained for longer, say nothing of rows, and what a rank alone reads may be a number of the rank (its own loss).

    Args:
        mine: of several processes.
        reference: of one.
        compared: what was compared of both, weights among it.
    """
    readings = [read_reading(mine.folder, rank) for rank in range(len(mine.ranks[0]))]
    one = read_reading(reference.folder, 0)
    known = [reading for reading in readings if reading is not None and reading.evaluated]
    if one is None or not one.evaluated or not known:
        return None, None
    if any(reading.evaluated_of != one.evaluated_of for reading in known):  # numbers of other data sets
        return None, None
    if len({*one.evaluated}) < max(len(one.evaluated), one.evaluated_of):  # some rows, which may be drawn
        return None, None
    wanted, each = Counter(one.evaluated), [Counter(reading.evaluated) for reading in known]
    joined = sum(each, Counter[int]())
    if all(rows == wanted for rows in each) or joined == wanted:
        return ComparedQuantity(EVALUATED, "PASS"), None
    twice, never = (joined - wanted).total(), (wanted - joined).total()
    said = f"of {wanted.total()} rows that one process evaluates, {twice} are read twice and {never} never"
    ours, theirs = known[0].numbers_of_it, one.numbers_of_it
    ends = zip(reversed(ours), reversed(theirs), strict=False)
    if ours and theirs and all(_agree(a, b) for a, b in ends):
        return ComparedQuantity(EVALUATED, "PASS", why=f"{said}; what comes of it agrees"), None
    every = [number for reading in known for number in reading.numbers_of_it]
    none = theirs and not any(_agree(a, b) for a in every for b in theirs)
    shared = [number for number in ours if all(number in reading.numbers_of_it for reading in known)]
    same = _has_same_weights(known[0], one, compared)
    if none and shared and same and mine.precision == "fp64":
        shown = f"{said}, and every rank reads {shared[-1]:.6g} after it instead of {theirs[-1]:.6g}"
        failed = ComparedQuantity(EVALUATED, "FAIL", Difference(math.inf, len(mine.facts.steps), shown))
        return failed, build_diagnosis(FaultName.EVALUATION_BY_LAYOUT, shown)
    left = "no number that all ranks read shows it" if same else "its numbers are not shown to be of the same weights"
    why = f"{said}: what counts each of them is not that of one process, and {left}"
    return ComparedQuantity(EVALUATED, "ABSTAIN", why=why), None


def _has_same_weights(ours: ReadingFacts, theirs: ReadingFacts, compared: Sequence[ComparedQuantity]) -> bool:
    """Whether both have evaluated weights that were shown to be the same."""
    which = "parameters" if ours.evaluated_after else "initial parameters"
    shown = any(one.quantity == which and one.mark == "PASS" for one in compared)
    return shown and ours.evaluated_after == theirs.evaluated_after


def _agree(a: float, b: float) -> bool:
    return a == b or is_equal(a, b, _SAME)
