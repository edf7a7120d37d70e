"""Which number of an optimizer is another, where equal gradients have become other parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import Diagnosis
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.runtime.fault_names import FaultName

_ROUNDING = 1e-9  # relative, of settings that are computed alike
_Settings = list[dict[str, list[float]]]
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
            if name := _find_other(each[0], settings, limit):
                return _add(found, name, number, each[0], settings, f"on rank 0, and {{}} on rank {rank}")
        if name := _find_other(each[0], one[0].settings, limit):
            return _add(found, name, number, each[0], one[0].settings, "instead of {}")
    return found


def _find_other(ours: _Settings, theirs: _Settings, limit: float) -> tuple[int, str] | None:
    """The first group and name whose numbers differ by more than rounding; None where groups are others."""
    if [[*group] for group in ours] != [[*group] for group in theirs]:
        return None  # each rank has a part of the parameters, say
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next(((n, name) for n, (a, b) in pairs for name in a if not _are_equal(a[name], b[name], limit)), None)


def _are_equal(ours: Sequence[float], theirs: Sequence[float], limit: float) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(a == b or predictions.is_equal(a, b, limit) for a, b in zip(ours, theirs, strict=True))


def _add(
    found: Diagnosis, which: tuple[int, str], number: int, ours: _Settings, theirs: _Settings, beside: str
) -> Diagnosis:
    group, name = which
    a, b = (" and ".join(f"{value:.6g}" for value in each[group][name]) for each in (ours, theirs))
    of_group = f" of group {group}" if len(ours) > 1 else ""
    said = f"{name}{of_group} of the optimizer is {a} {beside.format(b)} in step {number}"
    because = found.because.removesuffix(": compare its other settings")
    return replace(found, because=f"{because}; {said}", remedy=_REMEDY.format(name))
