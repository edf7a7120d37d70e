"""Schedules: pure functions from the step to a factor between the floor and one.

The value at a step does not depend on the run's history, so resuming needs only the step, and no process can
advance a schedule too often. The exception is a plateau, of which a callback counts how often it has fallen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from unisono.config.schema.run import RunConfig
from unisono.config.schema.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseSqrt,
    Linear,
    Plateau,
    Restarts,
    ScheduleGroup,
    Wsd,
)
from unisono.runtime.errors import ConfigError


def schedule_factor(schedule: ScheduleGroup, step: int, total: int, falls: int = 0) -> float:
    """The factor at `step` of `total`: warm-up from `start`, then the shape of the kind, never below `floor`.

    A plateau has fallen `falls` times.

    The first update has `1/warmup` of the peak (if `start` is 0), and the last update of the warm-up reaches the peak,
    so no update is wasted at zero. For the same reason, the last update of a decay is one step before the floor.

    >>> from unisono.config.schema.schedules import Linear
    >>> [round(schedule_factor(Linear(kind="linear", warmup=2), step, 6), 3) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    total = schedule.steps or total
    warmup = _steps(schedule.warmup, total)
    if step < warmup:
        return schedule.start + (1.0 - schedule.start) * (step + 1) / warmup
    if isinstance(schedule, Plateau):
        return max(schedule.floor, float(schedule.factor**falls))
    if isinstance(schedule, Exponential):
        return float(schedule.floor ** _exponent(schedule, step, warmup, total))
    return max(schedule.floor, schedule.floor + (1.0 - schedule.floor) * _shape(schedule, step, warmup, total))


def check(schedules: Mapping[str, ScheduleGroup], total: int) -> None:
    """Reject schedules longer than the run.

    Raises:
        ConfigError: naming the schedule and the lengths.
    """
    for name, schedule in schedules.items():
        length = schedule.steps or total
        parts = _steps(schedule.warmup, length) + (_steps(schedule.decay, length) if isinstance(schedule, Wsd) else 0)
        if isinstance(schedule, Restarts) and not _steps(schedule.period, length):
            raise ConfigError(
                f"schedules.{name}: period={schedule.period:g} of {length} steps is less than one step; lengthen it"
            )
        if parts > length:
            what = "warm-up and decay" if isinstance(schedule, Wsd) else "warm-up"
            raise ConfigError(
                f"schedules.{name}: {what} take {parts} steps, but the schedule has {length}; shorten them, or give "
                "them as fractions below 1"
            )


def _steps(number: float, total: int) -> int:
    return round(number * total) if number < 1 else round(number)


def _shape(schedule: ScheduleGroup, step: int, warmup: int, total: int) -> float:
    """The shape after the warm-up, from one down to zero."""
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case Constant():
            return 1.0
        case Linear():
            return 1.0 - progress
        case Cosine():
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case InverseSqrt():
            timescale = schedule.timescale or max(1, warmup)
            return math.sqrt(timescale / max(timescale, step))
        case Restarts():
            return 0.5 * (1.0 + math.cos(math.pi * _progress_of_period(schedule, step - warmup, total)))
        case Wsd():
            decay = _steps(schedule.decay, total)
            fallen = min(1.0, max(0.0, (step - (total - decay)) / max(1, decay)))
            return {
                "linear": 1.0 - fallen,
                "cosine": 0.5 * (1.0 + math.cos(math.pi * fallen)),
                "sqrt": 1.0 - math.sqrt(fallen),
            }[schedule.shape]
    raise AssertionError(schedule)


def _exponent(schedule: Exponential, step: int, warmup: int, total: int) -> float:
    """The power of the floor. A rising schedule reaches one at the last update, a falling one the floor after it."""
    if schedule.rising:
        return 1.0 - min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    return min(1.0, (step - warmup) / max(1, total - warmup))


def _progress_of_period(schedule: Restarts, step: int, total: int) -> float:
    """How much of its period has passed, `step` updates after the warm-up; all of it after the end of the schedule."""
    if step >= total - _steps(schedule.warmup, total):
        return 1.0
    length = float(_steps(schedule.period, total))
    begin = 0.0
    while step >= begin + length:
        begin, length = begin + length, length * schedule.multiply
    return (step - begin) / length


def first_change(schedule: ScheduleGroup, before: int, after: int) -> int | None:
    """The first step (from 0) whose factor depends on whether the run has `before` or `after` steps; None if none does.

    A warm-up or a decay that is a fraction of all steps moves with their number, and so does a shape that ends with
    the run. A constant has neither, so its run can be extended at any step.

    >>> from unisono.config.schema.schedules import Constant, Wsd
    >>> first_change(Constant(kind="constant", warmup=10), 100, 200), first_change(Wsd(kind="wsd", decay=20), 100, 200)
    (None, 81)
    """
    points = zip(*(_points(schedule, schedule.steps or total) for total in (before, after)), strict=True)
    changed = [min(one[0], other[0]) for one, other in points if one != other]
    return min(changed, default=None)


def _points(schedule: ScheduleGroup, total: int) -> list[tuple[int, int]]:
    """What the factor depends on: the first step at which it does, and the number itself."""
    warmup = _steps(schedule.warmup, total)
    match schedule:
        case Linear() | Cosine() | Exponential():
            return [(0, warmup), (warmup + 1, total)]
        case Wsd():
            decay = _steps(schedule.decay, total)
            start = max(warmup, total - decay)
            return [(0, warmup), (start + 1, start), (start + 1, decay)]
        case Restarts():
            return [(0, warmup), (warmup + 1, _steps(schedule.period, total)), (total, total)]
    return [(0, warmup)]


class ScheduledScalars:
    """All scheduled values of a step: `lr` and `clip_norm`, and whatever else `schedules` names.

    Attributes:
        falls: how often a learning rate has fallen on a plateau.
    """

    def __init__(self, config: RunConfig, total: int) -> None:
        check(config.schedules, total)
        self._config, self._total = config, total
        optim, clip_norm = config.optim, config.train.clip_norm
        self.falls: Callable[[], int] = lambda: 0
        self._peaks = {"lr": optim.lr, "weight_decay": optim.weight_decay, "clip_norm": clip_norm}

    def __call__(self, step: int) -> dict[str, float]:
        """The values by name; a pure function of the step and of `falls`."""
        values = {name: peak for name in ("lr", "clip_norm") if (peak := self._peaks[name]) is not None}
        return values | {name: self._value(name, step) for name in self._config.schedules}

    def _value(self, name: str, step: int) -> float:
        schedule = self._config.schedules[name]
        peak = self._peaks.get(name, schedule.peak)
        assert peak is not None
        return peak * schedule_factor(schedule, step, self._total, self.falls())

    def step_programs(self, names: Sequence[str]) -> dict[str, str]:
        """How often a step is compiled whose program depends on scheduled values, as a fact to report; {} for once.

        Args:
            names: scalars that the program depends on, in whole numbers (`Task.static_scalars`).
        """
        scheduled = [name for name in names if name in self._config.schedules]
        found: dict[str, None] = {}
        for step in range(self._total if scheduled else 0):
            found.setdefault(", ".join(f"{name}={round(self._value(name, step))}" for name in scheduled))
        return {"compilations of the step": f"{len(found)} ({'; '.join(found)})"} if len(found) > 1 else {}
