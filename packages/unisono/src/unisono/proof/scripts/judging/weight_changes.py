"""Changes of parameters that no optimizer makes: a decay by hand, a penalty of weights, values that are put into them.

A decay adds a multiple of every parameter to its gradient or to itself, by one and the same factor. Nothing else that
may differ between layouts does, so it is seen by the numbers alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from unisono.proof.comparison import ComparedQuantity
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import add_gradients, norm_of, sample_elements
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import Array
from unisono.proof.scripts.judging.gradient_sums import LEAST_ELEMENTS, ROUNDING, find_differing
from unisono.proof.scripts.recording.rank_facts import ScriptTrace, begun_moment
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

_OF_UPDATES = (FaultName.REPLICA_DRIFT, FaultName.UPDATE_BY_LAYOUT, FaultName.UPDATE_NOT_OF_GRADIENTS)
_FITTED = 1e-5  # relative, of small differences of large numbers
_ALIKE = "count a penalty or a decay alike, whatever the number of processes"
_ONCE = "add it once, after gradients are reduced, or give the optimizer a weight_decay"


def add_changes(
    found: Diagnosis,
    first: ComparedQuantity,
    mine: ScriptTrace,
    reference: ScriptTrace,
    parameters: ComparedQuantity | None = None,
) -> Diagnosis:
    """What was found of the first difference, or what of it a change of weights by the script explains.

    Args:
        found: of the difference.
        first: the quantity that differs first.
        mine: of many processes.
        reference: of one.
        parameters: as they were compared, with what was left out, and what rounding may come to.
    """
    step = first.worst.step - 1
    limit = max(_FITTED, first.allowed)
    if step < 0 or not (found.is_neutral or found.fault in _OF_UPDATES):
        return found
    of_update = first.quantity in ("optimizer state", "parameters")
    rounding = max(ROUNDING[mine.precision], first.allowed, parameters.allowed if parameters else 0.0)
    left_out = {name.partition(" (")[0] for name in (parameters.left_out if parameters else ())}
    if said := _find_other_values(mine, reference, step, rounding, left_out):
        return build_diagnosis(FaultName.UPDATE_NOT_OF_GRADIENTS, said) if step or of_update else found
    before = sample_elements(mine.tensors("parameters", step - 1) if step else mine.tensors("initial parameters", None))
    if first.quantity in ("loss", "raw gradients"):
        return _add_penalty(found, mine, reference, step, before, limit)
    ours, theirs = (sample_elements(trace.tensors("parameters", step)) for trace in (mine, reference))
    if first.quantity == "parameters" and (decayed := _find_decay(ours, theirs, before, limit, mine.precision)):
        because = (
            f"{found.because}; of {decayed[1]} it differs by {decayed[0]:.4g} times what it was before the update: "
            "look for a decay that is made more or less often, or by another factor"
        )
        return replace(found, because=because)
    return found


def _find_other_values(
    mine: ScriptTrace, reference: ScriptTrace, step: int, limit: float, left_out: Collection[str]
) -> str:
    """In words, that the script has changed parameters before an update to other values than on one process."""
    ours, theirs = (trace.tensors(begun_moment(0), step) for trace in (mine, reference))
    a, b = ({name: side[name] for name in ours if name in theirs and name not in left_out} for side in (ours, theirs))
    names = [name for name, value in b.items() if norm_of([a[name] - value]) > limit * norm_of([value])]
    if not names:
        return ""
    factor = predictions.common_factor({n: a[n] for n in names}, {n: b[n] for n in names}, _FITTED)
    times = "" if factor is None else f", {factor:.6g} times these: a decay by hand that is made more or less often?"
    return (
        f"the script itself changes {join_names(names, 3)} before update {step + 1}, to other values than on one "
        f"process{times}"
    )


def _add_penalty(
    found: Diagnosis, mine: ScriptTrace, reference: ScriptTrace, step: int, before: Mapping[str, Array], limit: float
) -> Diagnosis:
    """Of gradients that differ by a multiple of the weights; a name where one process adds its part by hand, too."""
    ours, theirs = (sample_elements(trace.tensors("raw gradients", step)) for trace in (mine, reference))
    decayed = _find_decay(ours, theirs, before, limit, mine.precision)
    if decayed is None:
        return found
    factor, names = decayed
    said = f"the gradients of {names} are those of one process and {factor:.4g} times the weights"
    alone = _find_decay(theirs, add_gradients(read_local_gradients(reference, 0, step)), before, limit, mine.precision)
    size = len(mine.ranks[step])
    if alone is not None and predictions.is_equal(factor, (size - 1) * alone[0], limit):
        detail = f"{said}, of which one process adds {alone[0]:.4g} by hand: so it is added {size} times"
        return replace(build_diagnosis(FaultName.TERM_PER_MICRO_BATCH, detail), remedy=_ONCE)
    because = f"{said}: look for a penalty or a decay that counts more or less often"
    return replace(found, because=because, remedy=_ALIKE)


def _find_decay(
    mine: Mapping[str, Array],
    reference: Mapping[str, Array],
    before: Mapping[str, Array],
    limit: float,
    precision: str,
) -> tuple[float, str] | None:
    """The factor of the weights by which two sides differ, and of which parameters; None if it is not one."""
    common = [name for name in mine if name in reference and name in before and mine[name].shape == before[name].shape]
    ours, theirs = ({name: side[name] for name in common} for side in (mine, reference))
    there = [name for name in common if before[name].any()]
    names = [name for name in find_differing(ours, theirs, precision) if name in there]
    if sum(before[name].size for name in names) < LEAST_ELEMENTS:
        return None
    more = {name: mine[name] - reference[name] for name in names}
    factor = predictions.common_factor(more, {name: before[name] for name in names}, limit)
    if factor is None:
        return None
    return factor, join_names(names, 3) if len(names) < len(there) else "all parameters"
