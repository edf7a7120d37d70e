"""Which number of an optimizer is another, where equal gradients have become other parameters."""

from __future__ import annotations

from dataclasses import replace

from unisono.proof.diagnoses.remedies import Diagnosis
from unisono.proof.recording.optimizer_settings import Settings, describe_other, find_other
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.runtime.fault_names import FaultName

_ROUNDING = 1e-9  # relative, of settings that are computed alike
_OF_UPDATES = (FaultName.REPLICA_DRIFT, FaultName.UPDATE_BY_LAYOUT)
_REMEDY = "give {} the same value on every rank, of a function of the update or of a reduced number"


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
    for number, (seen, one) in enumerate(zip(mine.ranks[:until], reference.ranks, strict=False), 1):
        each = [rank.settings for rank in seen]
        limit = _ROUNDING if number == 1 else max(_ROUNDING, allowed)
        for rank, settings in enumerate(each[1:], 1):
            if name := find_other(each[0], settings, limit):
                return _add(found, name, number, each[0], settings, f"on rank 0, and {{}} on rank {rank}")
        if name := find_other(each[0], one[0].settings, limit):
            return _add(found, name, number, each[0], one[0].settings, "instead of {}")
    return found


def _add(
    found: Diagnosis, which: tuple[int, str], number: int, ours: Settings, theirs: Settings, beside: str
) -> Diagnosis:
    said = f"{describe_other(which, ours, theirs, beside)} in step {number}"
    because = found.because.removesuffix(": compare its other settings")
    return replace(found, because=f"{because}; {said}", remedy=_REMEDY.format(which[1]))
