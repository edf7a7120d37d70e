"""What it means that gradients agree and the update does not."""

from __future__ import annotations

from dataclasses import replace

from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.optimizer_settings import describe_other, find_other
from unisono.runtime.fault_names import FaultName

_KEPT_REMEDY = "keep it as a tensor in the optimizer's state of a parameter"
_DRAWN_REMEDY = "draw for the whole parameter, by its name and the update (unisono.key), and take the part of the shard"
_COUPLED_REMEDY = "compute norms and means of the whole parameter: of the DTensor itself, not of its local part"
_SETTING_REMEDY = "give {} the same value on all layouts"
_SAME = 1e-9  # relative, of settings that are computed alike
# What the optimizer makes, and the names that say no more than that.
_AFTER_THE_UPDATE = ("update", "optimizer state", "parameters", "replicas")
_OF_UPDATES = (
    FaultName.UPDATE_BY_LAYOUT, FaultName.UPDATE_NOT_OF_GRADIENTS, FaultName.OPTIMIZER_STATE_LOST,
    FaultName.STATE_NOT_CARRIED, FaultName.REPLICA_DRIFT,
)  # fmt: skip


def _diagnose_parameter(pattern: Pattern) -> Diagnosis | None:
    """Of one that has its own memory now and that of another on one process, or that was not to be trained."""
    name = pattern.worst.name.removeprefix("optimizer/")
    of_one = pattern.root.overlapping or pattern.reference.facts.overlapping
    for group in of_one:
        is_parted = group not in pattern.mine.facts.overlapping
        if is_parted and any(name == one or name.startswith(f"{one}/") for one in group):
            detail = (
                f"{' and '.join(group)} have the same memory on one process (.data =), and memory of their own here"
            )
            return build_diagnosis(FaultName.UNTIED_WEIGHTS, detail)
    if pattern.worst.name in pattern.mine.facts.frozen:
        return build_diagnosis(FaultName.FROZEN_PARAMETER_TRAINED, pattern.worst.name)
    return None


def diagnose_update(pattern: Pattern) -> Diagnosis:
    """Of the update or the optimizer's state, from the same gradients and rate if these were compared."""
    if found := _diagnose_parameter(pattern):
        return found
    if pattern.first.quantity != "update" and pattern.abstains("raw gradients", "clipped gradients"):
        detail = f"'{pattern.worst.name}' differs; whether the gradients do is not known, since they were not compared"
        return build_diagnosis(
            FaultName.STATE_NOT_CARRIED if pattern.is_resumed else FaultName.GRADIENTS_BY_LAYOUT, detail
        )
    detail = f"'{pattern.worst.name}' differs, and gradients and learning rate agree"
    return build_diagnosis(FaultName.OPTIMIZER_STATE_LOST if pattern.is_resumed else FaultName.UPDATE_BY_LAYOUT, detail)


def diagnose_parameters(pattern: Pattern) -> Diagnosis:
    """Of parameters, where all that is compared before them agrees."""
    name = pattern.worst.name
    if found := _diagnose_parameter(pattern):
        return found
    if any(c.quantity == "update" and c.mark == "FAIL" for c in pattern.compared):
        return build_diagnosis(
            FaultName.UPDATE_BY_LAYOUT, f"'{name}' differs, after an update from equal gradients too"
        )
    if pattern.abstains("raw gradients", "clipped gradients"):
        return diagnose_update(pattern)
    if pattern.failed("replicas"):
        detail = f"gradients agree, '{name}' of rank 0 does not, and replicas differ: {pattern.step.replicas[:1]}"
        return build_diagnosis(FaultName.REPLICA_DRIFT, detail)
    if (size := pattern.distance_of("clipped gradients")) > pattern.rounding:
        detail = f"clipped gradients differ by {size:.1e}, which rounding may come to; '{name}' differs by more"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    by_script = {*pattern.mine.facts.by_script, *pattern.reference.facts.by_script}
    if pattern.mine.facts.optimizer and name not in by_script:
        detail = f"'{name}' differs after the optimizer's step, gradients and rate agree: compare its other settings"
        return build_diagnosis(FaultName.UPDATE_BY_LAYOUT, detail)
    return build_diagnosis(FaultName.UPDATE_NOT_OF_GRADIENTS, f"'{name}' differs, and all gradients agree")


def consider_optimizer(pattern: Pattern, diagnosis: Diagnosis) -> Diagnosis:
    """The same, with what decides an update beside gradients and state, where the update is what differs."""
    if diagnosis.fault not in _OF_UPDATES or pattern.first.quantity not in _AFTER_THE_UPDATE:
        return diagnosis
    facts, is_resumed = pattern.root, pattern.is_resumed
    ours, theirs = pattern.mine.facts.settings, pattern.reference.facts.settings
    if (which := find_other(ours, theirs, _SAME)) is not None:
        said = describe_other(which, ours, theirs, "instead of {}")
        because = f"{diagnosis.because}; before the first update, {said}"
        return replace(build_diagnosis(FaultName.UPDATE_BY_LAYOUT, because), remedy=_SETTING_REMEDY.format(which[1]))
    if facts.kept_by_optimizer:
        from_checkpoint = is_resumed or pattern.first.quantity == "update"  # which is made from the reference's
        fault = FaultName.OPTIMIZER_STATE_LOST if from_checkpoint else diagnosis.fault
        because = f"{diagnosis.because}; an update changes {facts.kept_by_optimizer} of the optimizer, which no "
        because += "checkpoint has"
        return replace(build_diagnosis(fault, because), remedy=_KEPT_REMEDY)
    if facts.update_draws and not is_resumed:
        because = f"{diagnosis.because}; the optimizer draws from {facts.update_draws}, which no key seeds for it"
        return replace(build_diagnosis(FaultName.UPDATE_BY_LAYOUT, because), remedy=_DRAWN_REMEDY)
    if facts.coupled and pattern.mine.facts.sharded and not is_resumed:
        because = f"{diagnosis.because}; on one process elements of {facts.coupled} move otherwise where gradients of "
        because += "other elements are others, as by a norm or a mean, and here each process has a part of them"
        return replace(build_diagnosis(FaultName.UPDATE_BY_LAYOUT, because), remedy=_COUPLED_REMEDY)
    return diagnosis
