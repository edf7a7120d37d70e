"""Which checkpoints remain is a pure function of what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packages.unisono.tests.runs import configuration
from unisono.checkpoint.core.retention import Retention

steps = st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=12)


def known(*steps: int) -> dict[int, None]:
    return dict.fromkeys(steps)


def test_the_newest_and_every_nth_remain() -> None:
    assert Retention(2).find_removable(8, known(8, 2, 6, 4)) == [2, 4]
    assert Retention(1, every=4).find_removable(9, known(2, 4, 6, 8, 9)) == [2, 6]


@pytest.mark.parametrize(("largest", "remains"), [(False, 4), (True, 2)])
def test_the_best_remains_too(largest: bool, remains: int) -> None:
    judged = {2: {"a": 3.0}, 4: {"a": 1.0}, 6: {"a": 2.0}, 8: {"a": 2.5}}
    assert Retention(1, best="a", largest=largest).find_removable(8, judged) == sorted({2, 4, 6} - {remains})


@pytest.mark.parametrize(("largest", "remain"), [(False, {4, 6}), (True, {2, 8})])
def test_several_of_the_best_remain(largest: bool, remain: set[int]) -> None:
    judged = {2: {"a": 3.0}, 4: {"a": 1.0}, 6: {"a": 2.0}, 8: {"a": 2.5}, 10: {"a": 2.2}}
    removed = Retention(1, best="a", largest=largest, best_count=2).find_removable(10, judged)
    assert set(removed) == {2, 4, 6, 8} - remain


def test_of_two_that_are_as_good_one_remains() -> None:
    judged = {2: {"a": 1.0}, 4: {"a": 1.0}, 6: None}
    assert len(Retention(1, best="a").find_removable(6, judged)) == 1


def test_what_was_not_judged_or_is_not_a_number_is_not_the_best() -> None:
    judged = {2: {"a": float("nan")}, 4: {"b": 0.0}, 6: {"a": 9.0}, 8: {"a": float("-inf")}, 9: None}
    assert Retention(1, best="a").find_removable(9, judged) == [2, 4, 8]


@given(there=steps, made=st.integers(1, 60), keep=st.integers(1, 4), every=st.none() | st.integers(1, 9))
def test_the_one_just_made_and_all_later_ones_remain(there: list[int], made: int, keep: int, every: int | None) -> None:
    going = Retention(keep, every).find_removable(made, known(*{*there, made}))
    remaining = {*there, made} - set(going)
    assert made in remaining
    assert {step for step in there if step > made} <= remaining
    assert len([step for step in remaining if step <= made]) >= min(keep, len({s for s in there if s < made} | {made}))


def test_it_follows_the_configuration() -> None:
    assert Retention.from_settings(configuration().checkpoint) == Retention(2)
    best = {"keep": 3, "every": 5, "keep_every": 10, "keep_best": {"metric": "accuracy", "mode": "max"}}
    config = configuration(checkpoint=best, eval={"every": 5})
    assert Retention.from_settings(config.checkpoint) == Retention(3, 10, "accuracy", largest=True)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"checkpoint": {"keep_best": {}}}, "eval.every is null"),
        ({"checkpoint": {"keep_best": {}, "every": 5}, "eval": {"every": 2}}, "not a multiple of eval.every=2"),
        ({"checkpoint": {"keep_every": 7, "every": 5}}, "checkpoint.keep_every=7 is not a multiple"),
    ],
)
def test_what_would_never_keep_anything_is_refused(groups: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        configuration(**groups)
