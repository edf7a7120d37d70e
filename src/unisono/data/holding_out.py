"""Which rows are held out: whole groups of them, in an order that nothing but the groups decides.

No seed, no order of files and no other row has a say. So the same groups are held out in every run, by every model, on
every machine, and a row that is added to a group never moves another one to the other side.
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
) -> NDArray[np.bool_]:
    """Which rows are held out, (rows,).

    The groups are put in an order, by the hashes of their names or, without names, by a keyed permutation of their
    numbers, and cut into parts of `fraction` of them, the last of which may be smaller. One part is held out. So over
    all folds every group is held out exactly once.

    Args:
        groups: name of each row's group; or how many rows there are, each of which is a group of its own.
        fraction: of the groups; 0 for none.
        fold: which part.
        named: groups that are held out in place of a fraction.
        column: that the groups come from, for errors.
        what: a row is called, for errors.
        hint: end of the error where there is only one group.

    Raises:
        ConfigError: for a part or a group that does not exist.
        DataError: where there is only one group.
    """
    rows = groups if isinstance(groups, int) else len(groups)
    if named is not None:
        assert not isinstance(groups, int)
        return _hold_out_named(groups, named, column)
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
            f"data.held_out={fraction:g}: {where}, so none can be held out while another is left to train on; set "
            "data.held_out=0" + (", or choose another data.group" if column else f", {hint}" if hint else "")
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


def _hold_out_named(groups: Sequence[str], named: Sequence[str], column: str | None) -> NDArray[np.bool_]:
    known = set(groups)
    for name in named:
        if name not in known:
            raise ConfigError(
                f"data.held_out_groups: no row has {column or 'the group'}={name}, {nearest(name, known)}"
            )
    if known <= set(named):
        raise ConfigError(f"data.held_out_groups names all {len(known)} groups, which leaves none to train on")
    chosen = set(named)
    return np.array([group in chosen for group in groups], dtype=bool)
