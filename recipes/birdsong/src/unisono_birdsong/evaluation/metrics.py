"""cmAP, AUROC and top-1, computed once on the scores of all rows, with bootstrap intervals over whole recordings.

None of them is a mean over batches: each class is ranked over all rows, so nothing here depends on how the rows were
computed. Rows have weights (how often a bootstrap draws them), so a resample costs a sum and no sorting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NAMES, ENDS = ("cmap", "auroc", "top1"), ("", "_low", "_high")  # of metrics, and of columns with their scores
_INTERVAL = (1 - 0.95) / 2, (1 + 0.95) / 2  # percentiles that are its ends
_AT_ONCE = 64  # resamples, so that memory stays within a few rows × classes


@dataclass(frozen=True)
class Score:
    """A metric, and its bootstrap interval.

    Attributes:
        value: on all rows; NaN where no class has both what the metric needs.
        low: end of the interval.
        high: end of the interval.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def average_precision(scores: Array, truth: NDArray[np.bool_], weights: Array | None = None) -> Array:
    """Area under the steps of precision over recall; rows of the same score share one threshold.

    This is scikit-learn's `average_precision_score`, without interpolation, of one class: scores and truth are
    (rows,), and weights (resamples, rows), by default one resample in which every row counts once.

    Returns:
        (resamples,); NaN where no row of the class is drawn.
    """
    true, all_, ends = _sorted_sums(scores, truth, weights)
    hits, drawn = true[:, ends], all_[:, ends]
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(drawn > 0, hits / drawn, 0.0)
        area: Array = (precision * np.diff(hits, prepend=0.0, axis=1)).sum(axis=1) / hits[:, -1]
    return area


def auroc(scores: Array, truth: NDArray[np.bool_], weights: Array | None = None) -> Array:
    """Chance that a row of the class has a higher score than one that is not; the same score counts one half.

    Arguments and result as of `average_precision`; NaN where either kind of rows is missing.
    """
    true, all_, ends = _sorted_sums(scores, truth, weights)
    hits, misses = true[:, ends], (all_ - true)[:, ends]
    before = np.concatenate([np.zeros((len(hits), 1)), hits[:, :-1]], axis=1)
    won = (np.diff(misses, prepend=0.0, axis=1) * (before + hits) / 2).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        area: Array = won / (hits[:, -1] * misses[:, -1])
    return area


def top1(scores: Array, truth: NDArray[np.bool_], weights: Array | None = None) -> Array:
    """Share of the rows that have a class whose highest score is of a class they have; both are (rows, classes).

    Returns:
        (resamples,), by the weights as of `average_precision`; NaN where no row has a class.
    """
    weights = np.ones((1, len(scores))) if weights is None else weights
    counted = truth.any(axis=1)
    right = truth[np.arange(len(scores)), scores.argmax(axis=1)]
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Array = (weights @ right) / (weights @ counted)
    return share


def evaluate(
    scores: Array,
    truth: NDArray[np.bool_],
    groups: Sequence[str] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Mapping[str, Score]:
    """All metrics of (rows, classes), with 95 % intervals of the bootstrap, from percentile to percentile.

    A resample draws whole groups (recordings or recordists); without groups, each row is its own. Without resamples
    the ends are NaN.

    Returns:
        Scores by name: `cmap` and `auroc`, means over the classes that have rows (and others that do not), and `top1`.
    """
    found = _all_metrics(scores, truth, None)
    names, members = np.unique(list(groups), return_inverse=True) if groups is not None else (scores, None)
    members = np.arange(len(scores)) if members is None else members
    rng = np.random.default_rng(seed)
    drawn: list[dict[str, Array]] = []
    for first in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - first)
        times = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=count)
        drawn.append(_all_metrics(scores, truth, times[:, members].astype(np.float64)))
    scored = {}
    for name in NAMES:
        values = np.concatenate([each[name] for each in drawn]) if drawn else np.zeros(0)
        values = values[np.isfinite(values)]  # a resample without any row of any class says nothing
        low, high = np.quantile(values, _INTERVAL) if len(values) else (np.nan, np.nan)
        scored[name] = Score(float(found[name][0]), float(low), float(high))
    return scored


def _all_metrics(scores: Array, truth: NDArray[np.bool_], weights: Array | None) -> dict[str, Array]:
    classes = [number for number in range(truth.shape[1]) if truth[:, number].any()]
    precision = [average_precision(scores[:, n], truth[:, n], weights) for n in classes]
    areas = [auroc(scores[:, n], truth[:, n], weights) for n in classes]
    return {"cmap": _mean(precision, weights), "auroc": _mean(areas, weights), "top1": top1(scores, truth, weights)}


def _mean(by_class: list[Array], weights: Array | None) -> Array:
    """Over the classes that say something, resample by resample."""
    if not by_class:
        return np.full(1 if weights is None else len(weights), np.nan)
    values = np.stack(by_class)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: Array = np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)
    return mean


def _sorted_sums(
    scores: Array, truth: NDArray[np.bool_], weights: Array | None
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Weights of the rows of a class and of all rows down from the highest score, and where each score ends."""
    order = np.argsort(-scores, kind="stable")
    weights = np.ones((1, len(scores))) if weights is None else weights
    sorted_weights, sorted_scores = weights[:, order], scores[order]
    ends = np.flatnonzero(np.append(sorted_scores[1:] != sorted_scores[:-1], True))  # also of scores of -inf
    return np.cumsum(sorted_weights * truth[order], axis=1), np.cumsum(sorted_weights, axis=1), ends
