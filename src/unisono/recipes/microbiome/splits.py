"""Which samples are held out: whole groups of them, chosen by a hash of the groups' names.

No seed, no order of files and no other sample has a say, so the same subjects are held out in every run, by every
model, on every machine; a sample that is added to a study never moves another one to the other side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from unisono.runtime.errors import ConfigError, DataError, nearest
from unisono.runtime.rng import key


def held_out(
    groups: Sequence[str], fraction: float, fold: int = 0, named: Sequence[str] | None = None, column: str | None = None
) -> NDArray[np.bool_]:
    """Which samples are held out, (samples,).

    The groups stand in the order of their names' hashes, cut into parts of `fraction` of them, the last of which may be
    smaller; one part is held out. So over all folds every group is held out exactly once.

    Args:
        groups: name of each sample's group.
        fraction: of the groups; 0 for none.
        fold: which part.
        named: groups that are held out in place of a fraction.
        column: that the groups come from, for errors.

    Raises:
        ConfigError: for a part or a group that is not there.
        DataError: where there is only one group.
    """
    names = sorted(set(groups), key=lambda name: (key("held out", name), name))
    if named is not None:
        for name in named:
            if name not in names:
                raise ConfigError(f"data.held_out_groups: no sample has {column}={name}, {nearest(name, names)}")
        chosen = set(named)
        if len(chosen) == len(names):
            raise ConfigError(f"data.held_out_groups has all {len(names)} groups, which leaves none to train on")
        return np.array([group in chosen for group in groups], dtype=bool)
    if fraction == 0:
        return np.zeros(len(groups), dtype=bool)
    if len(names) < 2:
        where = "there is only one sample" if column is None else f"all {len(groups)} samples have {column}={names[0]}"
        raise DataError(
            f"{where}, so data.held_out={fraction} cannot keep a group apart: "
            + ("" if column is None else "choose another data.group, or ")
            + "set data.held_out=0"
        )
    size = min(len(names) - 1, max(1, round(fraction * len(names))))
    parts = -(-len(names) // size)
    if fold >= parts:
        raise ConfigError(
            f"data.fold={fold}: {len(names)} groups, {size} of which are held out at a time, make {parts} parts; "
            f"choose 0 to {parts - 1}"
        )
    chosen = set(names[fold * size : (fold + 1) * size])
    return np.array([group in chosen for group in groups], dtype=bool)
