"""What a task's loss says of itself, on a few rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from unisono.data.loading.loader import MicroBatch
from unisono.proof import probes


class View:
    """Of a model that is not there: the loss is a function of the rows' numbers."""

    def __init__(self, loss: Callable[[Any], float]) -> None:
        self._loss = loss

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        yield

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        return {"term": float(self._loss(micro.arrays["x"]))}


class Counting:
    def __init__(self, count: Callable[[Any], float]) -> None:
        self.counts = lambda arrays: {"term": float(count(arrays["x"]))}


def probed(loss: Callable[[Any], float], count: Callable[[Any], float] = len) -> probes.LossProbe:
    values = np.array([3.0, 1.0, 4.0, 1.5, 9.0])
    micro = MicroBatch(0, np.arange(5), {"x": values}, {"term": 5.0}, {})
    view: Any = View(loss)
    task: Any = Counting(count)
    return probes.probe_loss(view, task, micro, {}, 1e-9)


@pytest.mark.parametrize(
    ("loss", "count", "kind"),
    [
        (np.sum, len, {}),
        (np.sum, np.sum, {}),  # rows may count as much as they like
        (np.mean, lambda x: 1.0, {"term": "mean"}),
        (lambda x: len(x) * np.average(x, weights=x), len, {"term": "mean"}),
        (np.var, len, {"term": "statistic"}),
        (lambda x: x.sum() * len(x), len, {"term": "statistic"}),
        (np.sum, lambda x: 0.0, {}),
        (lambda x: x @ np.arange(len(x)), len, {}),  # depends on the places of rows: nothing is said
    ],
)
def test_a_loss_is_a_sum_over_rows_a_mean_of_its_own_or_a_statistic(loss: Any, count: Any, kind: Any) -> None:
    assert probed(loss, count) == probes.LossProbe(additivity=kind)


def test_a_loss_that_remembers_is_another_the_second_time() -> None:
    calls: list[Any] = []

    def loss(x: Any) -> float:
        calls.append(x)
        return float(x.sum()) * len(calls)

    assert probed(loss).unstable == "'term' of the same outputs came to 18.5 and then to 37"


@pytest.mark.parametrize(("draw", "name"), [(random.random, "Python's random"), (np.random.random, "numpy.random")])
def test_the_generator_that_a_loss_draws_from_is_named_and_restored(draw: Any, name: str) -> None:
    before = str(random.getstate()), str(np.random.get_state(legacy=False))
    assert f"it draws from {name}, which no key seeds" in probed(lambda x: x.sum() * draw()).unstable
    assert (str(random.getstate()), str(np.random.get_state(legacy=False))) == before
