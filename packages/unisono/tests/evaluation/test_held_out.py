"""The held-out rows are cut for any number of processes so that each is evaluated exactly once."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.protocol import Engine, StepResult
from unisono.evaluation.held_out import HeldOut
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import DataError


class Numbers(LinearTask):
    """Held-out rows that are their own numbers."""

    def collate(self, samples: Any) -> dict[str, Any]:
        return {"x": np.array(samples)}


def batches(size: int, world: int = 1, micro: int = 4, **evaluation: Any) -> list[list[list[MicroBatch]]]:
    """Rank by rank, step by step, the micro-batches of one evaluation."""
    config = configuration(eval=evaluation)
    ranks = [HeldOut(Numbers(), range(size), config, ProcessInfo(rank, world), micro) for rank in range(world)]
    return [list(rank.batches()) for rank in ranks]


def evaluated(ranks: list[list[list[MicroBatch]]]) -> list[int]:
    """Rows in the order of the global micro-batches, idle ones left out."""
    steps = zip(*ranks, strict=True)
    return [row for step in steps for rank in step for micro in rank if not micro.idle for row in micro.rows.tolist()]


layouts = {"size": st.integers(1, 40), "world": st.integers(1, 6), "micro": st.integers(1, 12)}


@settings(max_examples=60, deadline=None)
@given(**layouts)
def test_every_row_is_evaluated_exactly_once_on_any_layout(size: int, world: int, micro: int) -> None:
    """And counted once, in equally many passes of every rank."""
    ranks = batches(size, world, micro)
    assert evaluated(ranks) == list(range(size))
    assert len({sum(len(step) for step in rank) for rank in ranks}) == 1
    everything = [m for rank in ranks for step in rank for m in step]
    assert sum(m.counts["square"] for m in everything) == sum(m.work["rows"] for m in everything) == size


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 50), **layouts)
def test_of_some_rows_each_is_evaluated_once_and_they_are_the_same_on_any_layout(
    rows: int, size: int, world: int, micro: int
) -> None:
    chosen = evaluated(batches(size, world, micro, rows=rows))
    assert len(set(chosen)) == len(chosen) == min(rows, size)
    assert chosen == evaluated(batches(size, 1, size, rows=rows))


def test_some_rows_are_drawn_from_all_of_them() -> None:
    chosen = evaluated(batches(1000, 1, 10, rows=100))
    assert all(any(first <= row < first + 100 for row in chosen) for first in range(0, 1000, 100))
    assert HeldOut(Numbers(), range(10), configuration(eval={"rows": 7}), ProcessInfo(), 4).rows == 7


@pytest.mark.parametrize(("given", "expected"), [(None, 4), (2, 2), (100, 10)])
def test_the_micro_batch_is_that_of_evaluation_or_else_of_training(given: int | None, expected: int) -> None:
    ((first, *_),) = batches(10, 1, 4, micro_batch=given)
    assert len(first[0].rows) == expected


def test_held_out_rows_can_be_evaluated_as_often_as_wanted_and_their_samples_are_the_same() -> None:
    held_out = HeldOut(Numbers(), range(10), configuration(), ProcessInfo(), 4)
    first, second = ([m.rows.tolist() for step in held_out.batches() for m in step] for _ in range(2))
    assert first == second == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    task = TransformerTask()
    held_out = HeldOut(task, task.held_out(), configuration(), ProcessInfo(), 4)
    first, second = ([m.arrays["tokens"] for step in held_out.batches() for m in step] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_evaluation_leaves_no_threads_even_if_it_breaks_off() -> None:
    before = set(threading.enumerate())
    batches(10, 2, 2)
    assert set(threading.enumerate()) == before
    running = HeldOut(Numbers(), range(10), configuration(), ProcessInfo(), 2).batches()
    next(running)
    running.close()
    assert set(threading.enumerate()) == before


def test_an_empty_held_out_source_is_refused() -> None:
    with pytest.raises(DataError, match=r"Numbers\.held_out\(\) has no rows; return None for no evaluation"):
        HeldOut(Numbers(), [], configuration(), ProcessInfo(), 4)


class Counting:
    """An engine that takes the batches of an evaluation, and computes nothing."""

    def evaluate(self, steps: Iterable[list[MicroBatch]], step: int, scalars: object, average: bool) -> StepResult:
        return StepResult(float(len(list(steps))), {}, {}, {})


def test_an_evaluation_reports_the_rows_that_are_done_over_both_sets_of_weights() -> None:
    seen: list[tuple[int, int]] = []
    config = configuration(ema={"decay": 0.9})
    held_out = HeldOut(Numbers(), range(10), config, ProcessInfo(), 4)
    held_out.evaluate(cast(Engine, Counting()), 1, {}, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 20), (4, 20), (8, 20), (10, 20), (14, 20), (18, 20)]
