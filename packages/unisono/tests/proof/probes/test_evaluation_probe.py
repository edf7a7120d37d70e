"""A number that evaluations leave in the task and read again is found, and one that is kept once is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from unisono.proof.probes.evaluation_probe import find_kept_number, read_numbers
from unisono.task import Task


class Kept:
    """What stands for a task, whose evaluations come to 0.5, and those of other weights to more or less."""


def best(task: Any, loss: float) -> dict[str, float]:
    task.best = min(getattr(task, "best", 9.0), loss)
    return {"loss": loss, "best": task.best}


def against_the_first(task: Any, loss: float) -> dict[str, float]:
    task.first = getattr(task, "first", loss)
    return {"gain": task.first - loss}


def last(task: Any, loss: float) -> dict[str, float]:
    task.last = loss
    return {"loss": loss}


def counted_once(task: Any, loss: float) -> dict[str, float]:
    task.rows = getattr(task, "rows", 8)
    return {"loss": loss * 8 / task.rows}


def told(task: Any, loss: float) -> dict[str, float]:
    task.evaluations = getattr(task, "evaluations", 0) + 1
    return {"loss": loss}


def placed(task: Any, loss: float) -> dict[str, float]:
    place = getattr(task, "place", 0)
    recent = [0.0, 0.0, 0.0]
    recent[place] = loss  # there is no such place with a number that no evaluation leaves
    task.place = (place + 1) % 3
    return {"loss": loss}


def cleared_by_the_next(task: Any, loss: float) -> dict[str, float]:
    if getattr(task, "seen", 0) >= 24:
        task.seen, task.total = 0, 0.0
    task.seen, task.total = getattr(task, "seen", 0) + 24, getattr(task, "total", 0.0) + 24 * loss
    return {"loss": task.total / task.seen}


def counted_beside_a_list(task: Any, loss: float) -> dict[str, float]:
    vars(task).setdefault("losses", []).append(loss)
    task.evaluations = getattr(task, "evaluations", 0) + 1
    if len(task.losses) != task.evaluations:
        raise IndexError("one of them was put back alone")
    return {"loss": task.losses[task.evaluations - 1]}


@pytest.mark.parametrize(
    ("summary", "name"),
    [
        (best, "self.best"),
        (against_the_first, "self.first"),
        (last, ""),
        (counted_once, ""),
        (told, ""),
        (placed, ""),
        (cleared_by_the_next, ""),
        (counted_beside_a_list, ""),
    ],
)
def test_only_a_number_that_is_left_and_read_decides_an_evaluation(
    summary: Callable[[Any, float], dict[str, float]], name: str
) -> None:
    task: Any = Kept()
    before = read_numbers(cast("Task", task))
    values = summary(task, 0.5)
    kept = dict(vars(task))
    others = (0.75, 0.625, 0.375, 0.25)
    found, other = find_kept_number(
        task, lambda: summary(task, 0.5), lambda number: summary(task, others[number]), before, values
    )
    assert (found, bool(other), vars(task)) == (name, bool(name), kept)
