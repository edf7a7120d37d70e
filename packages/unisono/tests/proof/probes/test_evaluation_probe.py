"""A number that evaluations leave in the task and read again is found, and one that is kept once is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from unisono.proof.probes.evaluation_probe import find_kept_number, read_numbers
from unisono.task import Task


class Kept:
    """What stands for a task, whose evaluations come to 0.5."""


def best(task: Any) -> dict[str, float]:
    task.best = min(getattr(task, "best", 9.0), 0.5)
    return {"loss": 0.5, "best": task.best}


def last(task: Any) -> dict[str, float]:
    task.last = 0.5
    return {"loss": 0.5}


def counted_once(task: Any) -> dict[str, float]:
    task.rows = getattr(task, "rows", 8)
    return {"loss": 4 / task.rows}


def told(task: Any) -> dict[str, float]:
    task.evaluations = getattr(task, "evaluations", 0) + 1
    return {"loss": 0.5}


def placed(task: Any) -> dict[str, float]:
    place = getattr(task, "place", 0)
    recent = [0.0, 0.0, 0.0]
    recent[place] = 0.5  # there is no such place with another number
    task.place = (place + 1) % 3
    return {"loss": 0.5}


@pytest.mark.parametrize(
    ("summary", "name"), [(best, "best"), (last, ""), (counted_once, ""), (told, ""), (placed, "")]
)
def test_only_a_number_that_is_changed_and_read_decides_an_evaluation(
    summary: Callable[[Any], dict[str, float]], name: str
) -> None:
    task: Any = Kept()
    before = read_numbers(cast("Task", task))
    values = summary(task)
    kept = dict(vars(task))
    found, other = find_kept_number(task, lambda: summary(task), before, values)
    assert (found, bool(other), vars(task)) == (name, bool(name), kept)
