"""Groups are held out whole, chosen by the hash of their names; rows without groups by a permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.holding_out import hold_out
from unisono.runtime.errors import ConfigError, DataError

NAMES = st.sampled_from([f"subject {n}" for n in range(12)])
GROUPS = st.lists(NAMES, min_size=2, max_size=60).filter(lambda groups: len(set(groups)) > 1)


@given(groups=GROUPS, fraction=st.floats(0.01, 0.99))
@settings(max_examples=100, deadline=None)
def test_no_group_stands_on_both_sides_and_neither_side_is_empty(groups: list[str], fraction: float) -> None:
    held = hold_out(groups, fraction)
    sides = [{g for g, h in zip(groups, held, strict=True) if bool(h) is side} for side in (True, False)]
    assert not sides[0] & sides[1]
    assert sides[0]
    assert sides[1]


@given(groups=GROUPS, fraction=st.floats(0.05, 0.95))
@settings(max_examples=60, deadline=None)
def test_over_all_folds_every_sample_is_held_out_once(groups: list[str], fraction: float) -> None:
    folds = []
    while True:
        try:
            folds.append(hold_out(groups, fraction, len(folds)))
        except ConfigError:
            break
    assert len(folds) >= 2
    assert (np.sum(folds, axis=0) == 1).all()


def test_the_fraction_is_of_the_groups() -> None:
    groups = [f"g{n}" for n in range(20) for _ in range(n + 1)]
    held = hold_out(groups, 0.25)
    assert len({g for g, h in zip(groups, held, strict=True) if h}) == 5
    assert not hold_out(groups, 0.0).any()


def test_neither_the_order_of_samples_nor_their_number_has_a_say() -> None:
    groups = [f"g{n % 10}" for n in range(30)]
    chosen = {g for g, h in zip(groups, hold_out(groups, 0.3), strict=True) if h}
    other = [*reversed(groups), "g0", "g1", "g1"]
    assert {g for g, h in zip(other, hold_out(other, 0.3), strict=True) if h} == chosen
    assert len(chosen) == 3


def test_the_choice_is_the_same_in_every_version() -> None:
    """Published results of a split hold only as long as it does."""
    groups = [f"g{n}" for n in range(10)]
    assert [g for g, h in zip(groups, hold_out(groups, 0.3), strict=True) if h] == ["g1", "g4", "g7"]


def test_groups_may_be_named() -> None:
    held = hold_out(["a", "b", "a", "c"], 0.2, named=["a", "c"], column="subject")
    assert held.tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    ("groups", "settings_", "error", "told"),
    [
        (["a", "a", "a"], {"column": "subject"}, DataError, r"data\.held_out=0\.2: all 3 samples have subject=a"),
        (["a", "a"], {"column": "x", "hint": "or y=z"}, DataError, r"set data\.held_out=0, or y=z$"),
        (["a"], {}, DataError, r"there is only one sample"),
        (["a", "b"], {"fold": 2}, ConfigError, r"data\.fold=2: 2 groups, 1 of them .* make 2 folds; choose 0 to 1"),
        (["anna", "b"], {"named": ["ana"], "column": "x"}, ConfigError, r"no row has x=ana, did you mean 'anna'"),
        (["a", "b"], {"named": ["a", "b"], "column": "x"}, ConfigError, r"names all 2 groups"),
    ],
)
def test_what_cannot_be_split_is_refused(groups: list[str], settings_: dict, error: type, told: str) -> None:
    with pytest.raises(error, match=told):
        hold_out(groups, 0.2, **settings_, what="sample")


# rows without groups --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(2, 500), st.floats(0.001, 0.999))
def test_a_part_of_the_rows_is_held_out_and_neither_side_is_empty(count: int, fraction: float) -> None:
    held = hold_out(count, fraction)
    assert held.shape == (count,)
    assert 1 <= held.sum() < count
    assert abs(held.sum() - fraction * count) <= 1


def test_over_all_folds_every_row_is_held_out_once_and_none_at_zero() -> None:
    assert (sum(hold_out(17, 0.25, fold) for fold in range(5)) == 1).all()
    assert not hold_out(3, 0.0).any() and not hold_out(1, 0.0).any()


def test_the_split_depends_on_no_generator_and_never_changes() -> None:
    """A run that is continued by a later version must not train on what it held out: the numbers are pinned."""
    for seed in (0, 1):
        np.random.seed(seed)
        assert np.flatnonzero(hold_out(20, 0.2)).tolist() == [4, 9, 12, 16]


def test_a_single_row_cannot_be_split_and_the_error_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"data\.held_out=0\.05: there is only one document.*held_out=0, or cut it"):
        hold_out(1, 0.05, what="document", hint="or cut it")
