"""Probes of frozen embeddings: a linear layer, a small MLP, and the nearest centroid.

The first two are fitted to all rows at once by L-BFGS in fp64, to the optimum of a smooth loss, so a result does not
hang on a learning rate or an order of rows. How much their weights are held back (L2) is chosen on a part of the
*training* rows, whole recordings of them, and the held-out rows are never looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from unisono import DataError, generator, hold_out
from unisono_birdsong.evaluation import metrics
from unisono_birdsong.objectives.supervised import asymmetric, cross_entropy
from unisono_birdsong.settings import Asymmetric

Array = NDArray[np.float64]
Kind = Literal["linear", "mlp", "centroid"]
Objective = Literal["cross_entropy", "asymmetric"]
KINDS: tuple[Kind, ...] = ("linear", "mlp", "centroid")
DECAYS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_HIDDEN = 128  # features of the MLP
_ITERATIONS: dict[str, int] = {"linear": 500, "mlp": 150}
_CHOOSING = 0.25  # of the training groups, to choose the decay on


@dataclass(frozen=True)
class Probe:
    """A fitted probe.

    Attributes:
        kind: of it.
        classes: (c,) numbers of the classes that training rows have, ascending; scores are of these.
        decay: L2 that was chosen; None of centroids, which have none.
        scores: (rows, d) embeddings to (rows, c) scores.
    """

    kind: Kind
    classes: NDArray[np.int64]
    decay: float | None
    scores: Callable[[Array], Array]


def fit(
    kind: Kind,
    embeddings: Array,
    truth: NDArray[np.bool_],
    groups: Sequence[str],
    *,
    objective: Objective | None = None,
    seed: int = 0,
) -> Probe:
    """Fit a probe to training rows.

    Args:
        kind: of it.
        embeddings: (rows, d).
        truth: (rows, classes), whether the row has the class.
        groups: recording or recordist of each row; none of them is on both sides where the decay is chosen.
        objective: `cross_entropy`, for rows that have one class each, or `asymmetric`, for rows that may have several
            or none; None: by the rows.
        seed: for the MLP's initial weights and the groups that select the weight decay.

    Raises:
        DataError: where fewer than two classes have rows.
    """
    classes = np.flatnonzero(truth.any(axis=0))
    if len(classes) < 2:
        raise DataError(
            f"a probe needs training rows of at least 2 classes, and there are {len(classes)}; use other data, or "
            "another data.label"
        )
    own = truth[:, classes]
    objective = objective or ("cross_entropy" if (own.sum(axis=1) == 1).all() else "asymmetric")
    if kind == "centroid":
        return Probe(kind, classes, None, _centroids(embeddings, own))
    decay = _choose_decay(kind, embeddings, own, groups, objective, seed)
    return Probe(kind, classes, decay, _fit_network(kind, embeddings, own, objective, decay, seed))


def _choose_decay(
    kind: Kind, embeddings: Array, truth: NDArray[np.bool_], groups: Sequence[str], objective: Objective, seed: int
) -> float:
    """The decay whose probe ranks a part of the training rows best, the larger of two that do it equally well."""
    if (count := len(set(groups))) < 2:
        return 1e-2
    parts = count // max(1, round(_CHOOSING * count))
    chosen_on = hold_out(list(groups), _CHOOSING, seed % parts, what="row")
    there = truth[~chosen_on].any(axis=0)
    if there.sum() < 2 or not truth[chosen_on][:, there].any():
        return 1e-2
    best, chosen = -np.inf, 1e-2
    for decay in reversed(DECAYS):
        scores = _fit_network(kind, embeddings[~chosen_on], truth[~chosen_on][:, there], objective, decay, seed)
        found = metrics.evaluate(scores(embeddings[chosen_on]), truth[chosen_on][:, there], resamples=0)
        value = found["cmap"].value
        if value > best + 1e-9:
            best, chosen = value, decay
    return chosen


def _fit_network(
    kind: Kind, embeddings: Array, truth: NDArray[np.bool_], objective: Objective, decay: float, seed: int
) -> Callable[[Array], Array]:
    mean, scale = _standard(embeddings)
    first = _initial(kind, embeddings.shape[1], truth.shape[1], seed)
    ends = np.cumsum([leaf.size for leaf in first.values()])

    def unravel(flat: Array) -> dict[str, Array]:
        parts = np.split(flat, ends[:-1])
        return {name: part.reshape(leaf.shape) for (name, leaf), part in zip(first.items(), parts, strict=True)}

    with jax.enable_x64(True):
        x, y = jnp.asarray((embeddings - mean) / scale), jnp.asarray(truth)

        def value_and_gradient(flat: Array) -> tuple[float, Array]:
            value, gradient = _loss_and_gradient(unravel(flat), x, y, decay, objective)
            return float(value), np.concatenate([np.asarray(gradient[name]).ravel() for name in first])

        start = np.concatenate([leaf.ravel() for leaf in first.values()])
        found = scipy.optimize.minimize(
            value_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": _ITERATIONS[kind]}
        )
    fitted = unravel(found.x)

    def scores(rows: Array) -> Array:
        with jax.enable_x64(True):
            return np.asarray(_logits(fitted, jnp.asarray((rows - mean) / scale)))

    return scores


def _initial(kind: Kind, width: int, classes: int, seed: int) -> dict[str, Array]:
    """First weights: zeros of a linear layer, whose optimum is the only one; draws of an MLP."""
    if kind == "linear":
        return {"weight_out": np.zeros((width, classes)), "bias_out": np.zeros(classes)}
    rng = generator("birdsong probe", seed)
    return {
        "weight_in": rng.normal(scale=width**-0.5, size=(width, _HIDDEN)),
        "bias_in": np.zeros(_HIDDEN),
        "weight_out": rng.normal(scale=_HIDDEN**-0.5, size=(_HIDDEN, classes)),
        "bias_out": np.zeros(classes),
    }


@partial(jax.jit, static_argnames="objective")
def _loss_and_gradient(weights: Any, x: Any, truth: Any, decay: Any, objective: Objective) -> Any:
    def loss(weights: Any) -> Any:
        norm = sum((leaf**2).sum() for name, leaf in weights.items() if name.startswith("weight"))
        logits = _logits(weights, x)
        if objective == "cross_entropy":
            return cross_entropy(logits, truth.argmax(axis=1)).mean() + decay * norm / 2
        return asymmetric(logits, truth, Asymmetric()).mean() + decay * norm / 2

    return jax.value_and_grad(loss)(weights)


def _logits(weights: dict[str, Any], x: Any) -> Any:
    """(rows, d) to (rows, classes)."""
    if "weight_in" in weights:
        x = jax.nn.gelu(x @ weights["weight_in"] + weights["bias_in"])
    return x @ weights["weight_out"] + weights["bias_out"]


def _centroids(embeddings: Array, truth: NDArray[np.bool_]) -> Callable[[Array], Array]:
    """Cosine of a standardised embedding with the mean of each class's."""
    mean, scale = _standard(embeddings)
    standard = (embeddings - mean) / scale
    centroids = _unit(np.stack([standard[own].mean(axis=0) for own in truth.T]))
    return lambda rows: np.asarray(_unit((rows - mean) / scale) @ centroids.T)


def _standard(embeddings: Array) -> tuple[Array, Array]:
    deviation = embeddings.std(axis=0)
    return embeddings.mean(axis=0), np.where(deviation > 1e-12, deviation, 1.0)


def _unit(rows: Array) -> Array:
    unit: Array = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    return unit
