"""Chooses the held-out rows: whole groups, in an order that depends only on the groups.

Neither the seed nor the order of files nor other rows matter. So the same groups are held out in every run, for every
model, on every machine, and adding a row to a group never moves another row to the other side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.data.order.order import Shuffle
from unisono.runtime.errors import ConfigError, DataError, nearest
from unisono.runtime.rng import key


def hold_out(
    groups: int | Sequence[str],
    fraction: float,
    fold: int = 0,
    *,
    named: Sequence[str] | None = None,
    column: str | None = None,
    what: str = "row",
    hint: str = "",
    names_key: str = "data.held_out_groups",
) -> NDArray[np.bool_]:
    """Which rows are held out, (rows,).

    The groups are ordered by the hashes of their names or, without names, by a keyed permutation of their numbers. The
    order is cut into folds of `fraction` of the groups, the last of which may be smaller, and one fold is held out.
    Over all folds, every group is held out exactly once.

    Args:
        groups: the name of each row's group; or the number of rows, if each is its own group.
        fraction: of the groups; 0 for none.
        fold: which fold.
        named: groups to hold out instead of a fraction.
        column: that the groups come from, for errors.
        what: word for a row, for errors.
        hint: end of the error if there is only one group.
        names_key: setting that `named` comes from, for errors.

    Raises:
        ConfigError: for a fold or a group that does not exist.
        DataError: if there is only one group.
    """
    rows = groups if isinstance(groups, int) else len(groups)
    if named is not None:
        assert not isinstance(groups, int)
        return _hold_out_named(groups, named, column, names_key)
    if fraction == 0:
        return np.zeros(rows, dtype=bool)
    if isinstance(groups, int):
        names, members = [], np.arange(rows)
        count = rows
    else:
        names = sorted(set(groups), key=lambda name: (key("held out", name), name))
        place = {name: number for number, name in enumerate(names)}
        members = np.array([place[group] for group in groups], dtype=np.int64)
        count = len(names)
    if count < 2:
        where = (
            f"there is only one {what}"
            if not names or column is None
            else f"all {rows} {what}s have {column}={names[0]}"
        )
        raise DataError(
            f"data.held_out={fraction:g}: {where}, so holding it out would leave nothing to train on; set "
            "data.held_out=0" + (f", {hint}" if hint else ", or choose another data.group" if column else "")
        )
    size = min(count - 1, max(1, round(fraction * count)))
    parts = -(-count // size)
    if fold >= parts:
        raise ConfigError(
            f"data.fold={fold}: {count} groups, {size} of them held out at a time, make {parts} folds; choose 0 "
            f"to {parts - 1}"
        )
    part = np.arange(fold * size, min((fold + 1) * size, count))
    chosen = np.zeros(count, dtype=bool)
    chosen[part if names else Shuffle(count, key("held out"))(part)] = True
    return chosen[members]


def _hold_out_named(
    groups: Sequence[str], named: Sequence[str], column: str | None, names_key: str
) -> NDArray[np.bool_]:
    known = set(groups)
    for name in named:
        if name not in known:
            raise ConfigError(f"{names_key}: no row has {column or 'the group'}={name}, {nearest(name, known)}")
    if known <= set(named):
        raise ConfigError(f"{names_key} names all {len(known)} groups, which leaves none to train on")
    chosen = set(named)
    return np.array([group in chosen for group in groups], dtype=bool)
