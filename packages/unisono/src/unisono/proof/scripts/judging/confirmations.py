"""Names that a pattern suggests, held against what else they predict of a script; neutral ones where that fails."""

from __future__ import annotations

from collections import Counter

from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.scripts.judging.gradient_sums import ROUNDING
from unisono.proof.scripts.judging.self_check import find_apart
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.runtime.fault_names import FaultName


def confirm(found: Diagnosis, first: ComparedQuantity, mine: ScriptTrace, reference: ScriptTrace) -> Diagnosis:
    """The same, or a neutral name where the run does not show what the name predicts.

    Args:
        found: of the first difference.
        first: the quantity that differs first.
        mine: of many processes.
        reference: of one.
    """
    step = first.worst.step - 1
    if step < 0 or step >= min(len(mine.ranks), len(reference.ranks)):
        return found
    if found.fault == FaultName.REPLICA_DRIFT and first.quantity == "loss" and not find_apart(mine.ranks[step]):
        because = "the loss differs first, of weights that ranks have alike; after the update they have others"
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, because)
    if found.fault == FaultName.SCALED_LOSS and not _is_gradient_scaled(first, mine, reference, step):
        because = f"{found.because}; the gradients are not so many times those of one process"
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, because)
    if found.fault == FaultName.GRADIENTS_NOT_CLEARED and reference.facts.steps[step].clean is False:
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, f"{found.because}, and so it did on one process")
    ours, theirs = (Counter(trace.facts.steps[step].rows) for trace in (mine, reference))
    computed = {row for one in mine.facts.steps[:step] for row in one.rows} | {*theirs}
    other = {
        FaultName.DROPPED_ROWS: (ours - theirs).total() > 0,
        FaultName.REPEATED_ROWS: any(row not in computed for row in ours - theirs),
    }
    if first.quantity == "sample ids" and other.get(found.fault):
        return build_diagnosis(FaultName.ORDER_BY_WORLD_SIZE, f"{found.because}, and some are others")
    return found


def _is_gradient_scaled(first: ComparedQuantity, mine: ScriptTrace, reference: ScriptTrace, step: int) -> bool:
    """Whether gradients are as many times those of one process as the loss is; so, too, where none were seen."""
    ours, theirs = (trace.tensors("raw gradients", step) for trace in (mine, reference))
    if not ours or not theirs or not first.worst.reference:
        return True
    limit = max(ROUNDING[mine.precision], first.allowed)
    factor = predictions.common_factor(ours, theirs, limit)
    return factor is not None and predictions.is_equal(factor, first.worst.mine / first.worst.reference, limit)
