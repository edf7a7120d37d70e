"""The numbers that an optimizer computes with beside its learning rates, and which of two runs' are others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

# What is compared by itself, and how torch executes an update, which layouts may choose otherwise.
_OF_NO_UPDATE = ("params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable")
OF_GROUPS = "choose groups of parameters by their names as they are before the model is wrapped, alike on all ranks"
Settings = Sequence[Mapping[str, Sequence[float]]]  # group by group and by name


def read_settings(optimizer: Any) -> list[dict[str, list[float]]]:
    """The numbers that an optimizer computes with beside its learning rates, group by group and by name."""
    return [
        {
            name: [float(one) for one in (value if isinstance(value, list | tuple) else [value])]
            for name, value in group.items()
            if name not in _OF_NO_UPDATE and _is_numeric(value)
        }
        for group in optimizer.param_groups
    ]


def find_groups(optimizer: Any, parameters: Mapping[str, Any]) -> dict[str, int]:
    """The number of the group that holds each of these parameters, of those that the optimizer holds."""
    if any("lr" not in group for group in optimizer.param_groups):
        return {}  # rates are numbered without these
    held = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: held[id(p)] for name, p in parameters.items() if id(p) in held}


def _is_numeric(value: Any) -> bool:
    each = value if isinstance(value, list | tuple) else [value]
    return bool(each) and all(isinstance(one, int | float) for one in each)


def find_other_members(
    ours: Settings, theirs: Settings, held: Sequence[Mapping[str, int]], limit: float
) -> tuple[str, list[str]] | None:
    """The first number that parameters have otherwise as their groups do, and which have; None if there is none.

    Args:
        ours: settings of one optimizer.
        theirs: of the other.
        held: of both, the group of each parameter.
        limit: relative difference that is rounding.
    """
    pairs = [(name, ours[held[0][name]], theirs[held[1][name]]) for name in held[0] if name in held[1]]
    found = [(key, n) for n, a, b in pairs for key in a if key in b and not _are_equal(a[key], b[key], limit)]
    return (found[0][0], [name for key, name in found if key == found[0][0]]) if found else None


def find_other(ours: Settings, theirs: Settings, limit: float) -> tuple[int, str] | None:
    """The first group and name whose numbers differ by more than rounding; None where groups are others."""
    if [[*group] for group in ours] != [[*group] for group in theirs]:
        return None  # each rank has a part of the parameters, say
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next(((n, name) for n, (a, b) in pairs for name in a if not _are_equal(a[name], b[name], limit)), None)


def _are_equal(ours: Sequence[float], theirs: Sequence[float], limit: float) -> bool:
    if len(ours) != len(theirs):
        return False
    return all(a == b or math.isclose(a, b, rel_tol=limit) for a, b in zip(ours, theirs, strict=True))


def describe_other(which: tuple[int, str], ours: Settings, theirs: Settings, beside: str) -> str:
    """In words, that a setting of a group is another; `beside` says what the second is, with braces in its place."""
    group, name = which
    a, b = (" and ".join(f"{value:.6g}" for value in each[group][name]) for each in (ours, theirs))
    return f"{name}{f' of group {group}' if len(ours) > 1 else ''} of the optimizer is {a} {beside.format(b)}"
