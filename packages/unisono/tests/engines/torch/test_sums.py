"""What a step reports is Σ sums / Σ counts over the whole global batch, whoever had which part of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import processes
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import StepResult
from unisono.engines.torch.numerics.metric_reduction import MetricReduction
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Loss

WIDE = torch.float64


def micro(counts: dict[str, float], *, number: int = 0, idle: bool = False, **work: float) -> MicroBatch:
    return MicroBatch(number, np.arange(2), {}, counts, work, idle)


def loss(sums: dict[str, float], metrics: dict[str, Any] | None = None, **weights: float) -> Loss:
    return Loss({name: torch.tensor(value) for name, value in sums.items()}, weights, metrics or {})


def reduction(world_size: int = 1) -> MetricReduction:
    return MetricReduction(world_size, torch.device("cpu"))


def reduced(parts: list[tuple[MicroBatch, Loss]], world_size: int = 1, squares: float | None = None) -> StepResult:
    """What the micro-batches of this process come to."""
    sums = reduction().sums()
    for batch, made in parts:
        sums.add(batch, made)
    counts = reduction(world_size).counts([batch for batch, _ in parts])
    norm = None if squares is None else torch.tensor(squares, dtype=WIDE)
    return reduction(world_size).reduce(sums, counts, norm)[0]


# one process ----------------------------------------------------------------------------------------------------------


def test_a_mean_over_micro_batches_is_the_sum_of_sums_over_the_sum_of_counts_in_the_wide_dtype() -> None:
    result = reduced([(micro({"a": 1}), loss({"a": 10.0})), (micro({"a": 9}), loss({"a": 20.0}))])
    assert result.terms == {"a": 3.0}, "the mean of the means would be 6.1"
    large = 2.0**24  # the next float32 is larger by two
    assert reduced([(micro({"a": 1}), loss({"a": large})), (micro({"a": 0}), loss({"a": 1.0}))]).terms["a"] == large + 1


def test_a_sum_that_is_not_finite_is_not_hidden() -> None:
    assert math.isnan(reduced([(micro({"a": 2}), loss({"a": math.nan})), (micro({"a": 2}), loss({"a": 1.0}))]).loss)


def test_the_loss_is_the_weighted_sum_of_the_terms_and_an_unnamed_weight_is_one() -> None:
    result = reduced([(micro({"a": 2, "b": 4}), loss({"a": 6.0, "b": 2.0}, b=10.0))])
    assert result.terms == {"a": 3.0, "b": 0.5}
    assert result.loss == 8.0


def test_metrics_are_sums_over_counts_of_tensors_and_of_numbers_and_work_is_added_up() -> None:
    parts = [
        (micro({"a": 1}, tokens=5.0), loss({"a": 0.0}, {"right": (torch.tensor(1), 1), "share": (0.5, 2.0)})),
        (micro({"a": 1}, tokens=7.0), loss({"a": 0.0}, {"right": (0, torch.tensor(3)), "share": (1.5, 2.0)})),
    ]
    assert reduced(parts).metrics == {"right": 0.25, "share": 0.5}
    assert reduced(parts).work == {"tokens": 12.0}


@pytest.mark.parametrize("nothing", [math.nan, math.inf, 5.0])
def test_an_idle_micro_batch_adds_nothing_whatever_it_computed(nothing: float) -> None:
    idle = micro({"a": 0.0}, idle=True, rows=0.0), loss({"a": nothing}, {"m": (torch.tensor(nothing), nothing)})
    result = reduced([(micro({"a": 4}, rows=4.0), loss({"a": 8.0}, {"m": (3.0, 4.0)})), idle])
    assert (result.loss, dict(result.metrics), dict(result.work)) == (2.0, {"m": 0.75}, {"rows": 4.0})


@pytest.mark.parametrize("total", [0.0, 3.0, math.nan])
def test_a_term_and_a_metric_whose_count_is_zero_are_zero(total: float) -> None:
    result = reduced([(micro({"a": 0.0, "b": 2.0}), loss({"a": total, "b": 1.0}, {"m": (total, 0)}))])
    assert result.terms == {"a": 0.0, "b": 0.5}
    assert result.metrics == {"m": 0.0}
    assert result.loss == 0.5


def test_sums_keep_no_graph() -> None:
    term = torch.tensor(2.0, requires_grad=True) * 3
    sums = reduction().sums()
    sums.add(micro({"a": 1}), Loss({"a": term}))
    assert not any(vector.requires_grad for vector in sums.vectors())


def test_the_norm_is_the_root_of_the_squares_zero_without_a_gradient_and_not_finite_if_they_are_not() -> None:
    part = micro({"a": 1}), loss({"a": 1.0})
    assert reduced([part], squares=9.0).grad_norm == 3.0
    assert reduced([part]).grad_norm == 0.0
    assert not any(reduced([part], squares=squares).is_finite for squares in (math.nan, math.inf))


def test_votes_and_flags_are_added_up_beside_the_sums_and_do_not_touch_them() -> None:
    sums = reduction().sums()
    sums.add(micro({"a": 2}, rows=3.0), loss({"a": 1.0}, {"m": (1.0, 4.0)}))
    counts = reduction().counts([micro({"a": 2})])
    flags = torch.tensor([1, 0])
    result, votes, used = reduction().reduce(sums, counts, torch.tensor(4.0), [7.0, 8.0], flags)
    assert (votes, used) == ([7.0, 8.0], [1.0, 0.0])
    expected = (0.5, {"m": 0.25}, {"rows": 3.0}, 2.0)
    assert (result.loss, dict(result.metrics), dict(result.work), result.grad_norm) == expected


def test_counts_are_those_of_all_micro_batches_together() -> None:
    counts = reduction().counts([micro({"b": 1, "a": 2.5}), micro({"b": 3, "a": 0})])
    assert {name: (value.item(), value.dtype, value.dim()) for name, value in counts.items()} == {
        "a": (2.5, WIDE, 0),
        "b": (4.0, WIDE, 0),
    }


# two processes --------------------------------------------------------------------------------------------------------


def on_two(place: ProcessInfo, group: Communicator) -> dict[str, Any]:
    """Rank 0 has one target and rank 1 has nine; the squares, and what is wrong with them, differ too."""
    first = place.is_first
    terms = loss({"a": 10.0 if first else 20.0, "none": 0.0}, {"m": (1, 1) if first else (0, 3)})
    part = micro({"a": 1.0 if first else 9.0, "none": 0.0}, tokens=1.0 if first else 9.0), terms
    idle = micro({"a": 1.0 if first else 0.0}, idle=not first), loss({"a": 4.0 if first else math.nan})
    result = reduced([part], 2, squares=9.0 if first else 16.0)
    return {
        "uneven": (result.loss, dict(result.terms), dict(result.metrics), dict(result.work)),
        "shards": result.grad_norm,
        "one bad": reduced([part], 2, squares=math.inf if first else 1.0).is_finite,
        "idle": reduced([idle], 2).loss,
        "counts": reduction(2).counts([part[0]])["a"].item(),
    }


@pytest.fixture(scope="module")
def both() -> list[dict[str, Any]]:
    return processes.run(on_two, 2)


def test_means_over_processes_with_uneven_counts_are_sums_over_sums(both: list[dict[str, Any]]) -> None:
    for result in both:
        assert result["uneven"] == (3.0, {"a": 3.0, "none": 0.0}, {"m": 0.25}, {"tokens": 10.0})
        assert result["counts"] == 10.0, "of the whole global batch"
        assert result["shards"] == 5.0, "squares are added up"
        assert result["idle"] == 4.0, "an idle micro-batch adds nothing"
        assert result["one bad"] is False, "a gradient that is not finite on one process is so on all"
