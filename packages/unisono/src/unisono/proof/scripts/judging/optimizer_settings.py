"""Which number of an optimizer is another, where equal gradients have become other parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.optimizer_settings import (
    OF_GROUPS,
    Settings,
    describe_other,
    find_other,
    find_other_members,
)
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

_ROUNDING = 1e-9  # relative, of settings that are computed alike
_OF_UPDATES = (FaultName.REPLICA_DRIFT, FaultName.UPDATE_BY_LAYOUT, FaultName.UPDATE_NOT_OF_GRADIENTS)
_REMEDY = "give {} the same value on every rank, of a function of the update or of a reduced number"
_Held = Mapping[str, int]  # the group of each parameter


def add_settings(found: Diagnosis, mine: ScriptTrace, reference: ScriptTrace, until: int, allowed: float) -> Diagnosis:
    """Add the first setting of the optimizer that ranks, or many processes and one, have not alike.

    Args:
        found: of the difference.
        mine: of many processes.
        reference: of one.
        until: the step, from 1, in which the difference was found.
        allowed: relative difference after the first step; some numbers follow from gradients, as Prodigy's `d` does.
    """
    if found.fault not in _OF_UPDATES:
        return found
    steps = zip(mine.facts.steps, reference.facts.steps, strict=False)
    held = [(step.groups or [{} for _ in step.by_rank], one.groups or [{}]) for step, one in steps]
    for number, (seen, one) in enumerate(zip(mine.ranks[:until], reference.ranks, strict=False), 1):
        each = [rank.settings for rank in seen]
        limit = _ROUNDING if number == 1 else max(_ROUNDING, allowed)
        ours, theirs = held[number - 1]
        for rank, settings in enumerate(each[1:], 1):
            beside = f"on rank 0, and {{}} on rank {rank}"
            if other := _find(each[0], settings, (ours[0], ours[rank]), limit, beside):
                return _add(found, other, number)
        if other := _find(each[0], one[0].settings, (ours[0], theirs[0]), limit, "instead of {}"):
            return _add(found, other, number)
    return found


def _find(ours: Settings, theirs: Settings, held: Sequence[_Held], limit: float, beside: str) -> tuple[str, str] | None:
    """What is to be said of a setting that is another, and the remedy; None if all are alike."""
    if all(group == held[1].get(name, group) for name, group in held[0].items()):
        which = find_other(ours, theirs, limit)
        if which is None:
            return None
        return describe_other(which, ours, theirs, beside), _REMEDY.format(which[1])
    other = find_other_members(ours, theirs, held, limit)
    if other is None:
        return None
    setting, names = other
    a, b = (each[of[names[0]]][setting] for each, of in zip((ours, theirs), held, strict=True))
    shown = [" and ".join(f"{value:.6g}" for value in values) for values in (a, b)]
    said = f"the optimizer holds {join_names(names, 3)} in another group, whose {setting} is {shown[0]}"
    return f"{said} {beside.format(shown[1])}", OF_GROUPS


def _add(found: Diagnosis, other: tuple[str, str], number: int) -> Diagnosis:
    said, remedy = other
    because = f"{found.because.removesuffix(': compare its other settings')}; {said} in step {number}"
    if found.fault == FaultName.UPDATE_NOT_OF_GRADIENTS:  # which a script that also changes parameters need not be
        found = build_diagnosis(FaultName.UPDATE_BY_LAYOUT, because)
    return replace(found, because=because, remedy=remedy)
