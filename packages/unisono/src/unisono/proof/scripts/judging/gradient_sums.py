"""How the gradient of an update is made of those that the ranks computed: pure functions of numbers.

It is looked for as a weighted sum; the weights say what was reduced.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.proof.comparison import relative_distances
from unisono.proof.diagnoses import predictions
from unisono.proof.recording.gradient_sample import add_gradients
from unisono.proof.recording.trace import Array
from unisono.runtime.text import join_names

LEAST_ELEMENTS = 8  # of a gradient, for every number fitted to it, which can hardly hold by chance then
_PART = 1e-3  # of the largest weight: that of a part that is there, and by what weights are others
ROUNDING = {"fp64": 1e-9, "fp32": 1e-3}  # relative, by the precision of a run


@dataclass(frozen=True)
class WeightedSum:
    """How the gradient of an update is made of those of the ranks.

    Attributes:
        weights: of every rank, if it is their weighted sum.
        off: the parameters where it is not.
    """

    weights: tuple[float, ...] | None
    off: Sequence[str] = ()

    def __str__(self) -> str:
        if self.weights is None:
            return "nothing of the kind"
        first, count = self.weights[0], len(self.weights)
        if max(self.weights) - min(self.weights) > 1e-6 * abs(first):
            return f"sum weighted by {', '.join(f'{weight:.4g}' for weight in self.weights)}"
        known = {1.0: "sum", 1 / count: "mean"}
        return next(
            (name for size, name in known.items() if math.isclose(first, size, rel_tol=1e-6)), f"sum × {first:.4g}"
        )


def explain_reduction(
    own: Sequence[Mapping[str, Array]], reduced: Mapping[str, Array], precision: str = "fp64"
) -> WeightedSum:
    """The weights by which the gradients of the ranks add up to the reduced one: equal ones, if these do.

    Example:
        >>> explain_reduction([{"w": np.ones(2)}, {"w": np.full(2, 3.0)}], {"w": np.full(2, 2.0)}).weights
        (0.5, 0.5)
    """
    target = {name: reduced[name] for name in sorted({name for rank in own for name in rank} & {*reduced})}
    if not target:
        return WeightedSum(None)
    wanted = _flatten(target, target)
    columns = np.stack([_flatten(rank, target) for rank in own], axis=1)
    if not (np.isfinite(columns).all() and np.isfinite(wanted).all()):
        return WeightedSum(None, [*target])

    def find_off(weights: Sequence[float]) -> list[str]:
        parts = [{n: w * rank[n] for n in target if n in rank} for w, rank in zip(weights, own, strict=True)]
        return find_differing(add_gradients(parts), target, precision)

    total = columns.sum(axis=1)
    equal = [float(total @ wanted) / max(float(total @ total), 1e-300)] * len(own)
    if not (off := find_off(equal)):
        return WeightedSum(tuple(equal))
    fitted = np.linalg.lstsq(columns, wanted, rcond=None)[0].tolist()
    return WeightedSum(None, off) if find_off(fitted) else WeightedSum(tuple(fitted))


def have_other_weights(
    own: Sequence[Mapping[str, Array]], mine: Mapping[str, Array], reference: Mapping[str, Array], precision: str
) -> bool:
    """Whether two gradients are sums of the same parts, of every one of them, and with other weights.

    Args:
        own: what each backward pass of every rank has computed.
        mine: of the ranks' update.
        reference: of that of one process.
        precision: of the runs.
    """
    elements = sum(value.size for value in reference.values())
    if len(own) < 2 or elements < LEAST_ELEMENTS * len(own):
        return False
    ours, theirs = (predictions.fit_weights(made, own, ROUNDING[precision]) for made in (mine, reference))
    if ours is None or theirs is None or min(theirs) < _PART * max(theirs):
        return False
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) > _PART * max(theirs)


def _flatten(values: Mapping[str, Array], like: Mapping[str, Array]) -> NDArray[np.float64]:
    return np.concatenate([np.float64(values.get(name, np.zeros(one.shape))).ravel() for name, one in like.items()])


def find_differing(mine: Mapping[str, Array], reference: Mapping[str, Array], precision: str) -> list[str]:
    """The tensors in which two sides differ by more than rounding."""
    return [name for name, size in relative_distances(mine, reference).items() if size > ROUNDING[precision]]


def find_unequal(reduced: Sequence[Mapping[str, Array]], precision: str) -> list[str]:
    """Parameters whose gradient is not the same on all ranks; one that is not finite equals none and hides no other."""
    if len(reduced) == 1:
        return []
    infinite = find_infinite(reduced)
    first, *others = ({name: value for name, value in rank.items() if name not in infinite} for rank in reduced)
    return sorted(infinite.union(*(find_differing(first, rank, precision) for rank in others)))


def find_infinite(gradients: Iterable[Mapping[str, Array]]) -> set[str]:
    """Parameters of which a gradient is not all finite numbers."""
    return {name for one in gradients for name, value in one.items() if not np.isfinite(value).all()}


def is_left_alone(
    passes: Sequence[Sequence[Mapping[str, Array]]],
    reduced: Sequence[Mapping[str, Array]],
    names: Sequence[str],
    precision: str,
) -> bool:
    """Whether gradients of a rank are its own, or a sum in which a backward pass of it is without those of the others.

    All are of every rank: the gradients of each backward pass, and after the reduction, of the parameters `names`.
    """
    limit = ROUNDING[precision]
    number = min(map(len, passes))
    columns = [{n: one[n] for n in names if n in one} for each in passes for one in each[:number]]
    for rank, gradients in enumerate(reduced):
        observed = {name: gradients[name] for name in names if name in gradients}
        if predictions.reproduces(add_gradients(passes[rank]), observed, limit):
            return True
        fitted = predictions.fit_weights(observed, columns, limit)
        if fitted is None:
            continue
        of_ranks = np.abs(np.reshape(fitted, (len(passes), number))) > 1e-6 * np.abs(fitted).max()
        if (of_ranks[rank] & (of_ranks.sum(axis=0) == 1)).any():
            return True
    return False


def describe_changed(reduced: Sequence[Mapping[str, Array]], precision: str) -> str:
    """In words, what differs although no rank has its own gradients; whether it is one factor per rank."""
    factors = [predictions.common_factor(rank, reduced[0], ROUNDING[precision]) for rank in reduced[1:]]
    known = [f"{factor:.4g}" for factor in factors if factor is not None]
    if len(known) < len(factors):
        return ", and no rank has its own: look at how they are paired and reduced, and at what changes them then"
    return (
        f": they are {join_names(known, 3)} times those of rank 0, so each rank multiplies or divides the reduced ones "
        "by a number of its own (a count of its own rows?)"
    )
