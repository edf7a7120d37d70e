"""The rules of a step, on plain numbers: what a second engine must compute too."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.tasks import LinearTask
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.runtime.errors import ConfigError
from unisono.task import Loss


def micro(number: int = 0, idle: bool = False, **counts: float) -> MicroBatch:
    return MicroBatch(number, np.arange(2), {}, counts, {"rows": 2.0}, idle)


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_a_term_that_counts_nothing_has_scale_zero() -> None:
    with np.errstate(divide="ignore"):
        scales = rules.loss_scales({"a": np.float64(4.0), "b": np.float64(0.0)}, 2.0, np.where)
    assert scales == {"a": 0.5, "b": 0.0}


@pytest.mark.parametrize("counts", [{"a": -1.0}, {"a": math.inf}, {"a": math.nan}, {"b": 1.0}])
def test_what_is_no_count_is_refused(counts: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"counts\(\) returned .* every batch must count the terms a,"):
        rules.sum_counts([micro(a=1.0), micro(**counts)])


def test_the_total_is_each_sum_times_its_weight_and_its_scale_and_an_unnamed_weight_is_one() -> None:
    assert rules.scaled_sum({"a": 3.0, "b": 5.0}, {"b": 10.0}, {"a": 0.5, "b": 0.25}) == 3.0 * 0.5 + 10 * 5.0 * 0.25


@pytest.mark.parametrize("counted", [["a"], ["a", "b", "c"], ["a", "x"], []])
def test_terms_and_counts_have_the_same_names_and_in_evaluation_terms_may_be_missing(counted: list[str]) -> None:
    loss = Loss({"a": 1.0, "b": 1.0})  # type: ignore[dict-item]
    with pytest.raises(ConfigError) as refused:
        rules.check_terms(LinearTask(), loss, counted, training=True)
    told = f"LinearTask: loss() returned the terms ['a', 'b'], but counts() counted {counted}"
    assert str(refused.value).startswith(told)
    rules.check_terms(LinearTask(), loss, {*counted, "a", "b"}, training=False)
    with pytest.raises(ConfigError, match="returned no term"):
        rules.check_terms(LinearTask(), Loss({}), counted, training=False)


def test_a_result_is_made_of_sums_and_counts_in_any_framework() -> None:
    sums = rules.MetricSums(vector)
    for number, (loss, idle) in enumerate([(3.0, False), (5.0, False), (math.nan, True)]):
        sums.add(micro(number, idle), Loss({"a": loss}, {"a": 2.0}, {"m": (loss, 4.0)}))  # type: ignore[dict-item]
    flat = np.concatenate(sums.vectors()).tolist()
    result = sums.result(flat, [4.0], squared_norm=9.0)
    assert (result.loss, result.terms, result.metrics) == (4.0, {"a": 2.0}, {"m": 1.0})
    assert (result.work, result.grad_norm, result.is_finite) == ({"rows": 6.0}, 3.0, True)


def test_out_of_memory_names_sizes_that_can_be_asked_for() -> None:
    error = rules.out_of_memory_error("rank 1, step 3", BatchSplit(24, 2, 6), "no bytes left")
    assert str(error) == (
        "rank 1, step 3: out of memory with 6 rows in a micro-batch (no bytes left). Use a smaller layout.micro_batch "
        "(1, 2, 3, 4), or let `unisono autobatch` find the largest that fits."
    )


X = np.array([3.0, 1.0, 4.0, 1.5])


@pytest.mark.parametrize(
    ("term", "named"),
    [
        (np.mean, "A mean of means"),
        (lambda x: np.average(x, weights=x), "A mean of means"),
        (lambda x: 7.0, "A term is added once per micro-batch"),
        (np.std, "A statistic of the batch is taken of its parts"),
        (np.median, "A statistic of the batch is taken of its parts"),
        (np.max, "The loss depends on the micro-batch"),
        (lambda x: min(x.sum(), 5.0), "The loss depends on the micro-batch"),
    ],
)
def test_a_term_that_does_not_double_is_named_by_what_a_few_rows_show(term: Any, named: str) -> None:
    """A clamped sum, a largest row and a deviation were all taken for a mean."""

    def name(size: int) -> str:
        return rules.name_doubled("t", lambda rows: {"t": term(X[list(rows)])}, size)

    assert (name(4), name(2)) == (named, "The loss depends on the micro-batch")


def test_a_term_over_pairs_of_rows_is_warned_of_and_one_over_rows_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: outputs of (N, 1) beside targets of (N,) trained in silence, on a loss that depends on the processes."""
    rows = np.arange(1.0, 9.0)
    task: Any = SimpleNamespace()

    def check(term: Any, **told: bool) -> str:
        def sums(places: Any) -> dict[str, float]:
            return {"t": float(term(rows[list(places)]))}

        rules.check_sum(task, sums(range(8)), sums, sums, 8, **told)
        return capsys.readouterr().err

    def pairs(x: Any) -> Any:
        return np.square(x[:, None] - x).sum()

    assert "four times as much if every row is given twice" in check(pairs)
    assert "make (N, N): give both one shape" in check(pairs)
    assert not check(pairs, warns=False)
    assert not check(np.sum)


def test_what_loss_returns_is_a_loss() -> None:
    """Each ended in an AttributeError or a TypeError of ours."""
    task: Any = SimpleNamespace()
    for value in (np.float32(1), {"t": 1.0}, None):
        returned: Any = value
        with pytest.raises(ConfigError, match=r"SimpleNamespace: loss\(\) returned a .*; return unisono.Loss\("):
            rules.check_terms(task, returned, {"t"}, True)
    given: Any = np.float32(1)
    with pytest.raises(ConfigError, match="Loss is given a float32; give it a sum over the rows by name"):
        Loss(given)
