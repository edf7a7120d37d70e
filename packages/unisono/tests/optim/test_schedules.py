"""Schedules are pure functions of the step: warm-up from `start` to the peak, then a shape that falls to the floor."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from packages.unisono.tests.runs import configuration
from unisono.config.schema.schedules import Schedule, ScheduleGroup
from unisono.optim.schedules import ScheduledScalars, check, first_change, schedule_factor
from unisono.runtime.errors import ConfigError

KINDS = ("constant", "linear", "cosine", "wsd", "inverse_sqrt", "restarts")
FALLING = ("linear", "cosine", "wsd", "restarts")  # those that arrive at the floor with the run
SHAPES = ("linear", "cosine", "sqrt")


def schedule(kind: str, **settings: Any) -> ScheduleGroup:
    made: ScheduleGroup = TypeAdapter(Schedule).validate_python({"kind": kind, **settings})
    return made


def factors(kind: str, total: int, **settings: Any) -> list[float]:
    return [schedule_factor(schedule(kind, **settings), step, total) for step in range(total)]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[ScheduleGroup, int]:
    """Any schedule that `check` takes, and the steps of its run."""
    total = draw(st.integers(1, 300))
    length = st.one_of(st.integers(0, total), st.floats(0, 1, exclude_max=True))
    kind, settings = draw(st.sampled_from(KINDS)), {"warmup": draw(length)}
    settings |= {"start": draw(st.floats(0, 1))} if settings["warmup"] else {}
    settings |= {"floor": draw(st.floats(0, 1))} if kind != "constant" else {}
    if kind == "restarts":
        settings |= {"period": draw(st.integers(1, total)), "multiply": draw(st.floats(1, 3))}
    if kind == "wsd":
        settings |= {"decay": draw(length), "shape": draw(st.sampled_from(SHAPES))}
    made = schedule(kind, **settings)
    try:
        check({"lr": made}, total)
    except ConfigError:
        assume(False)
    return made, total


def warm_up(of: ScheduleGroup, total: int) -> int:
    return round(of.warmup * total) if of.warmup < 1 else round(of.warmup)


# warm-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_warm_up_is_a_straight_line_from_start_to_the_peak_over_a_number_or_a_fraction_of_steps(kind: str) -> None:
    assert factors(kind, 100, warmup=10)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors(kind, 100, warmup=10)[10] == factors(kind, 100)[0] == 1.0
    assert factors(kind, 100, warmup=4, start=0.2)[:4] == pytest.approx([0.4, 0.6, 0.8, 1.0])
    assert factors(kind, 200, warmup=0.1) == factors(kind, 200, warmup=20)
    end = {"steps": 50} if kind in FALLING else {}
    assert factors(kind, 200, warmup=0.1, steps=50) == factors(kind, 200, warmup=5, **end)
    assert factors(kind, 200, warmup=1) == factors(kind, 200, warmup=1 / 200)


def test_a_decay_below_one_is_a_fraction_of_all_steps_and_none_stays_at_the_peak() -> None:
    assert factors("wsd", 200, decay=0.25) == factors("wsd", 200, decay=50)
    assert factors("wsd", 50, warmup=5, decay=0)[5:] == [1.0] * 45


# shapes -------------------------------------------------------------------------------------------------------------


def test_constant_stays_linear_falls_by_equal_steps_and_cosine_is_half_a_cosine() -> None:
    assert factors("constant", 50) == [1.0] * 50
    assert factors("linear", 110, warmup=10, floor=0.2)[60] == pytest.approx(0.6)
    falling = factors("linear", 50, warmup=10)[10:]
    assert [a - b for a, b in pairwise(falling)] == pytest.approx([1 / 40] * 39)
    cosine = factors("cosine", 110, warmup=10)
    assert [cosine[step] for step in (10, 35, 60, 85)] == pytest.approx([1, 0.5 + math.sqrt(0.125), 0.5, 0.1464466])


@pytest.mark.parametrize("kind", FALLING)
def test_the_last_update_stands_one_step_before_the_floor(kind: str) -> None:
    made = schedule(kind, warmup=10, floor=0.1)
    assert schedule_factor(made, 99, 100) > 0.1
    assert schedule_factor(made, 100, 100) == pytest.approx(0.1)


@pytest.mark.parametrize("kind", FALLING)
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_after_its_end_a_schedule_stays_at_the_floor(kind: str, floor: float) -> None:
    assert factors(kind, 100, warmup=5, steps=40, floor=floor)[40:] == pytest.approx([floor] * 60)


def test_a_schedule_longer_than_the_run_is_left_on_its_way() -> None:
    assert factors("linear", 50, steps=100) == factors("linear", 100)[:50]


@pytest.mark.parametrize(
    ("shape", "quarter", "half"),
    [("linear", 0.75, 0.5), ("cosine", 0.5 + math.sqrt(0.125), 0.5), ("sqrt", 0.5, 1 - math.sqrt(0.5))],
)
def test_wsd_is_stable_after_the_warm_up_and_decays_in_its_shape(shape: str, quarter: float, half: float) -> None:
    values = factors("wsd", 100, warmup=10, decay=20, shape=shape)
    assert values[9:81] == [1.0] * 72
    assert values[81] < 1.0
    assert (values[85], values[90]) == pytest.approx((quarter, half))


def test_restarts_begin_again_at_the_peak_after_each_period() -> None:
    values = factors("restarts", 110, warmup=10, period=25, floor=0.2)
    assert values[10:35] == values[35:60] == values[60:85] == values[85:110]
    assert values[10] == 1.0 and values[35] == 1.0
    assert values[10:35] == pytest.approx([schedule_factor(schedule("cosine", floor=0.2), t, 25) for t in range(25)])
    assert factors("restarts", 100, period=0.25) == factors("restarts", 100, period=25)
    growing = factors("restarts", 70, period=10, multiply=2)
    assert [step for step, value in enumerate(growing) if value == 1.0] == [0, 10, 30]
    assert growing[30:70] == factors("cosine", 40)
    with pytest.raises(ConfigError, match="less than one step"):
        check({"lr": schedule("restarts", period=0.001)}, 100)


def test_inverse_sqrt_halves_after_four_times_the_warm_up_or_its_timescale() -> None:
    values = factors("inverse_sqrt", 1000, warmup=16)
    assert (values[64], values[256]) == (0.5, 0.25)
    values = factors("inverse_sqrt", 1000, warmup=16, timescale=100)
    assert values[16:101] == [1.0] * 85
    assert values[400] == 0.5


@settings(max_examples=40, deadline=None)
@given(warmup=st.integers(1, 50), more=st.none() | st.integers(0, 50), floor=st.floats(0, 1))
def test_inverse_sqrt_has_no_jump(warmup: int, more: int | None, floor: float) -> None:
    timescale = None if more is None else warmup + more
    values = factors("inverse_sqrt", 200, warmup=warmup, timescale=timescale, floor=floor, start=1.0)
    steepest = 1 / (2 * (timescale or warmup))  # of √(t/x), at x = t
    assert all(0 <= a - b <= steepest + 1e-12 for a, b in pairwise(values))


# any schedule -------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(of=schedules(), seed=st.integers(0, 2**32))
def test_a_factor_rises_from_start_to_one_in_the_warm_up_and_then_never_falls_below_the_floor(
    of: tuple[ScheduleGroup, int], seed: int
) -> None:
    made, total = of
    values, warm = [schedule_factor(made, step, total) for step in range(2 * total)], warm_up(made, total)
    assert all(made.start <= value <= 1 + 1e-12 for value in values[:warm])
    assert all(made.floor * (1 - 1e-12) <= value <= 1 + 1e-12 for value in values[warm:])
    assert all(a <= b + 1e-12 for a, b in pairwise(values[:warm]))
    if made.kind != "restarts":
        assert all(a >= b - 1e-12 for a, b in pairwise(values[warm:]))
    steps = list(range(2 * total))
    random.Random(seed).shuffle(steps)  # what was asked for before changes nothing
    assert all(schedule_factor(made, step, total) == values[step] for step in steps)


# what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "told"),
    [
        *((kind, {"warmup": 101}, r"take 101 steps, but the schedule has 100") for kind in KINDS if kind != "wsd"),
        ("wsd", {"warmup": 101}, r"take 1\d\d steps, but the schedule has 100"),
        ("wsd", {"warmup": 60, "decay": 50}, "warm-up and decay take 110 steps, but the schedule has 100"),
        ("wsd", {"warmup": 0.6, "decay": 0.5}, "warm-up and decay take 110 steps, but the schedule has 100"),
        ("linear", {"warmup": 60, "steps": 50}, "take 60 steps, but the schedule has 50"),
    ],
)
def test_parts_longer_than_the_schedule_are_refused_by_name(kind: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=rf"schedules\.depth: .*{told}"):
        check({"lr": schedule("constant"), "depth": schedule(kind, **settings)}, 100)
    check({"lr": schedule("wsd", warmup=0.5, decay=0.5), "other": schedule("linear", warmup=100)}, 100)


def test_compilations_of_a_step_are_the_different_whole_numbers_of_what_its_program_depends_on() -> None:
    """A ramp from 1.2 to 6 and one from 1 to 3 change the depths five times and once."""
    ramps = {
        "deep": {"kind": "constant", "peak": 6, "start": 0.2, "warmup": 100},
        "wide": {"kind": "constant", "peak": 2, "start": 0.5, "warmup": 50},
    }
    scalars = ScheduledScalars(configuration(schedules=ramps), 400)
    (told,) = scalars.step_programs(["deep"]).values()
    assert told == "6 (deep=1; deep=2; deep=3; deep=4; deep=5; deep=6)"
    pairs = list(dict.fromkeys((round(scalars(step)["deep"]), round(scalars(step)["wide"])) for step in range(400)))
    (told,) = scalars.step_programs(["deep", "wide"]).values()
    assert told.startswith(f"{len(pairs)} (deep=1, wide=1; ") and len(pairs) == 7
    level = ScheduledScalars(configuration(schedules={"deep": {"kind": "constant", "peak": 6}}), 9)
    assert scalars.step_programs([]) == scalars.step_programs(["elsewhere"]) == level.step_programs(["deep"]) == {}


OTHERS = {
    "warmup": 6, "start": 0.5, "floor": 0.3, "steps": 20, "decay": 9, "shape": "sqrt", "timescale": 9, "rising": True,
    "period": 7, "multiply": 2.0,
}  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "exponential"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_every_setting_of_a_schedule_changes_its_values_or_is_refused(kind: str, warmup: int) -> None:
    given: dict[str, Any] = {"warmup": warmup, "decay": 8} if kind == "wsd" else {"warmup": warmup}
    given |= {"floor": 0.1} if kind == "exponential" else {}
    for key in type(schedule(kind, **given)).model_fields.keys() - {"kind", "peak"}:
        with suppress(ValidationError):
            if schedule(kind, **given | {key: OTHERS[key]}).find_unused() is None:
                assert factors(kind, 40, **given | {key: OTHERS[key]}) != factors(kind, 40, **given), key


# another number of steps --------------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.sampled_from([0, 0.1, 3]),
    steps=st.sampled_from([None, None, 20]),
    before=st.integers(6, 40),
    after=st.integers(6, 40),
)
def test_the_first_change_by_another_length_is_where_the_factors_part(
    kind: str, warmup: float, steps: int | None, before: int, after: int
) -> None:
    """A run may be extended up to there: every factor before is the same, and one of a falling shape soon is not."""
    assume(steps is None or kind in FALLING or 0 < warmup < 1)
    made = schedule(kind, warmup=warmup, steps=steps)
    first = first_change(made, before, after)
    same = [schedule_factor(made, n, before) == schedule_factor(made, n, after) for n in range(50)]
    assert all(same[:first])
    if first is not None and kind in FALLING:
        assert not all(same[first:])


# exponential ---------------------------------------------------------------------------------------------------------


def test_exponential_multiplies_by_one_factor_a_step_from_one_to_the_floor_or_back() -> None:
    falling = factors("exponential", 12, warmup=2, floor=0.01)
    assert falling[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert [b / a for a, b in pairwise(falling[2:])] == pytest.approx([0.01**0.1] * 9)
    rising = factors("exponential", 11, floor=1e-4, rising=True)
    assert (rising[0], rising[-1]) == pytest.approx((1e-4, 1.0))
    assert [b / a for a, b in pairwise(rising)] == pytest.approx([10**0.4] * 10)
    assert first_change(schedule("exponential", floor=0.1), 10, 20) == 1


def test_exponential_needs_a_floor() -> None:
    with pytest.raises(ValueError, match="floor has to be above 0 for kind=exponential"):
        schedule("exponential")
