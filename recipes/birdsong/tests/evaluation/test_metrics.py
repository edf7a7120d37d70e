"""Metrics against scikit-learn's, and intervals against what they mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono_birdsong.evaluation import metrics

sklearn_metrics = pytest.importorskip("sklearn.metrics")


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(4, 60), ties=st.booleans())
def test_average_precision_and_auroc_are_scikit_learns_with_ties_and_weights(seed: int, rows: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    truth = rng.random(rows) < 0.4
    truth[:2] = True, False
    scores = np.round(rng.normal(size=rows), 0 if ties else 12) + truth
    weights = rng.integers(0, 4, size=(3, rows)).astype(float)
    weights[:, :2] = 1
    for row, precision, area in zip(
        weights,
        metrics.average_precision(scores, truth, weights),
        metrics.auroc(scores, truth, weights),
        strict=True,
    ):
        assert precision == pytest.approx(sklearn_metrics.average_precision_score(truth, scores, sample_weight=row))
        assert area == pytest.approx(sklearn_metrics.roc_auc_score(truth, scores, sample_weight=row))


def test_class_means_leave_out_classes_without_rows_and_top1_takes_any_class_of_a_row() -> None:
    rng = np.random.default_rng(0)
    scores, truth = rng.normal(size=(30, 4)), rng.random((30, 4)) < 0.3
    truth[:, 2] = False
    truth[0] = False  # a window without a bird
    found = metrics.evaluate(scores, truth, resamples=0)
    there = [0, 1, 3]
    precision = sklearn_metrics.average_precision_score(truth[:, there], scores[:, there], average="macro")
    assert found["cmap"].value == pytest.approx(precision)
    assert found["auroc"].value == pytest.approx(sklearn_metrics.roc_auc_score(truth[:, there], scores[:, there]))
    right = [truth[row, scores[row].argmax()] for row in range(30) if truth[row].any()]
    assert found["top1"].value == pytest.approx(np.mean(right))
    assert np.isnan(found["cmap"].low)


def test_mean_of_batches_would_be_another_number() -> None:
    rng = np.random.default_rng(1)
    truth = np.eye(3, dtype=bool)[rng.integers(3, size=40)]
    scores = rng.normal(size=(40, 3)) + truth
    whole = metrics.evaluate(scores, truth, resamples=0)["cmap"].value
    halves = [
        metrics.evaluate(scores[part], truth[part], resamples=0)["cmap"].value for part in np.split(np.arange(40), 2)
    ]
    assert abs(whole - np.mean(halves)) > 1e-3


def test_intervals_hold_the_value_repeat_exactly_and_widen_where_rows_come_in_groups() -> None:
    rng = np.random.default_rng(2)
    label = rng.integers(4, size=160)
    truth = np.eye(4, dtype=bool)[label]
    scores = rng.normal(size=(160, 4)) + 1.5 * truth
    rows = metrics.evaluate(scores, truth, resamples=300)
    assert rows == metrics.evaluate(scores, truth, resamples=300)
    for score in rows.values():
        assert score.low < score.value < score.high
    twins = np.repeat(np.arange(40), 4)  # the same forty rows four times: no more is known than of forty
    repeated = metrics.evaluate(scores[twins], truth[twins], [str(n) for n in twins], resamples=300)
    alone = metrics.evaluate(scores[twins], truth[twins], resamples=300)
    assert repeated["top1"].high - repeated["top1"].low > 1.5 * (alone["top1"].high - alone["top1"].low)
    assert repeated["top1"].value == alone["top1"].value
