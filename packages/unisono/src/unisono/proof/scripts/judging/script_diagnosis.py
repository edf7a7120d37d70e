"""The likely fault behind what differs first in a script, with all that its runs show beside the differences."""

from __future__ import annotations

from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import diagnosis
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.scripts.judging import self_check
from unisono.proof.scripts.judging.confirmations import confirm
from unisono.proof.scripts.judging.optimizer_settings import add_settings
from unisono.proof.scripts.judging.script_comparison import find_unmoved
from unisono.proof.scripts.judging.weight_changes import add_changes
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.verdict import Verdict
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names


def diagnose_script(
    judged: Verdict, check: self_check.SelfCheck, mine: ScriptTrace, reference: ScriptTrace
) -> Diagnosis | None:
    """The likely fault, or None if nothing failed.

    Args:
        judged: what was compared, and what the run shows by itself.
        check: the latter.
        mine: of many processes.
        reference: of one.
    """
    first, world = judged.first, len(mine.facts.steps[0].by_rank)
    found = diagnosis.diagnose(mine, reference, [*judged.compared, *judged.invariants], world)
    if first is None:
        return None
    failed = check.failed if check.failed in judged.invariants else None
    same_step = failed is not None and failed.worst.step == first.worst.step
    if same_step and first.quantity not in ("initial parameters", "sample ids"):
        found = check.diagnosis
    elif found is not None:
        found = _consider_run(found, first, judged, check, mine, reference)
    if found is None:
        return None
    found = confirm(found, first, mine, reference)
    named = add_settings(found, mine, reference, first.worst.step, first.allowed)
    if named is not found:
        return named
    parameters = next((one for one in judged.compared if one.quantity == "parameters"), None)
    return add_changes(found, first, mine, reference, parameters)


def find_line(judged: Verdict, mine: ScriptTrace) -> str:
    """In words, where the loss is that differs first, or whose gradients do; empty where a line is named already."""
    first, known = judged.first, judged.diagnosis.because if judged.diagnosis else ""
    if first is None or first.quantity not in ("loss", "raw gradients") or ".py" in known:
        return ""
    seen = mine.ranks[first.worst.step - 1] if 0 < first.worst.step <= len(mine.ranks) else []
    return f"backward() at {seen[0].line}" if seen and seen[0].line else ""


def _consider_run(
    found: Diagnosis,
    first: ComparedQuantity,
    judged: Verdict,
    check: self_check.SelfCheck,
    mine: ScriptTrace,
    reference: ScriptTrace,
) -> Diagnosis:
    """The same, or another where more of the run says so."""
    copies = next((one for one in judged.compared if one.quantity == "EMA" and one.mark == "FAIL"), None)
    if found.is_neutral and copies and copies is not first and 1 < copies.worst.step <= first.worst.step:
        world = len(mine.ranks[0])
        found = diagnosis.diagnose(mine, reference, [copies], world) or found  # the loss may read what differs before
    step = first.worst.step
    second = mine.facts.steps[1:2]  # with which copies of the model are first looked at
    apart = second[0].average_apart if second else ""
    if found.is_neutral and step == 1 and first.quantity == "loss" and apart:
        detail = (
            f"{apart} before the second update, when copies of the model are first looked at, and their weights are; "
            "the loss, which differs from the first update on, may read it: made before weights were brought together?"
        )
        found = build_diagnosis(FaultName.EMA_DRIFT, detail)
    left_out = check.dropped.get(step - 1, []) if first.quantity == "raw gradients" else []
    if left_out and found.is_neutral:
        detail = f"step {step}: what the backward passes of ranks {left_out} made is not in the update"
        found = build_diagnosis(FaultName.PART_OF_THE_BATCH, detail)
    is_late = step > 1 or first.quantity in ("optimizer state", "parameters")
    if is_late and found.is_neutral and (still := find_unmoved(mine, reference, step)):
        detail = f"{join_names(still, 3)}: moved on one process, and by no update here"
        found = build_diagnosis(FaultName.PARAMETERS_NOT_TRAINED, detail)
    if first.quantity == "loss" and check.inside == self_check.TOGETHER and step > 1:
        detail = (
            "each rank makes an update of its own gradients, and the script brings parameters together after it, of "
            f"which step {step} has another loss than one process; averaged they are the same for plain SGD"
        )
        found = build_diagnosis(FaultName.NOT_SYNCHRONISED, detail)
    return found
