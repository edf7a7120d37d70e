"""The columns of a classifier's predictions: which class, how probable, and which it is.

A task that does not name its columns is a classifier if it has one output of a number per class, and the batch one
column of whole numbers that can be classes. So a regression with several outputs must not have such a column alone
beside it; it can define `predictions`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.launch.data_check import CLASS_NAMES

_IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out


def describe_classes(columns: Mapping[str, list[Any]], *, with_outputs: bool) -> dict[str, list[Any]]:
    """Replace a classifier's numbers by class with `prediction`, `probability` and `truth`; other columns stay.

    Args:
        columns: As a prediction makes them by default.
        with_outputs: Keep the numbers by class as well.

    >>> describe_classes({"row": [0, 1], "output": [[0.0, 9.0], [9.0, 0.0]], "label": [1, 1]}, with_outputs=False)
    {'row': [0, 1], 'prediction': [1, 0], 'probability': [0.9998766054240137, 0.9998766054240137], 'truth': [1, 1]}
    """
    wide = [name for name, values in columns.items() if values and isinstance(values[0], list | np.ndarray)]
    if len(wide) != 1 or (scores := _scores(columns[wide[0]])) is None:
        return dict(columns)
    target = _find_target(columns, scores.shape[1])
    if target is None:
        return dict(columns)
    probabilities = _softmax(scores)
    described = {
        "prediction": scores.argmax(1).tolist(),
        "probability": probabilities.max(1).tolist(),
        "truth": [None if value == _IGNORED else value for value in columns[target]],
    }
    leading = {name: columns[name] for name in ("source", "row") if name in columns}
    replaced = {*leading, *described, target, *([] if with_outputs else wide)}
    return {**leading, **described, **{name: values for name, values in columns.items() if name not in replaced}}


def _scores(values: Sequence[Any]) -> NDArray[np.float64] | None:  # (rows, classes)
    """A column as a matrix of finite numbers by class; None if it is something else."""
    if len({np.shape(value) for value in values}) != 1 or not isinstance(values[0][0], float | np.floating):
        return None
    scores = np.asarray(values, dtype=np.float64)
    return scores if scores.ndim == 2 and scores.shape[1] > 1 and np.isfinite(scores).all() else None


def _find_target(columns: Mapping[str, list[Any]], classes: int) -> str | None:
    """The column of true classes; None if there is none, or one cannot tell which it is."""
    found = [
        name
        for name, values in columns.items()
        if name not in ("source", "row")
        and all(type(value) is int and (0 <= value < classes or value == _IGNORED) for value in values)
    ]
    named = [name for name in found if name.removeprefix("true_") in CLASS_NAMES]
    chosen = named if len(named) == 1 else found
    return chosen[0] if len(chosen) == 1 else None


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities from logits; log-probabilities and probabilities by class are recognised."""
    if (scores >= 0).all() and np.allclose(scores.sum(1), 1.0, atol=1e-3):
        return scores
    powers = np.exp(scores - scores.max(1, keepdims=True))
    normalised: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return normalised
