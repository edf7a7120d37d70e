"""What each fault would make of the recorded numbers: a name is given only where its prediction is what was observed.

Everything here is a pure function. A global batch is a list of *parts*, its micro-batches, each with the sums and
counts that its rank computed. Every way of reducing them, right or wrong, gives each part a *weight*: the loss is then
the weighted sum of the parts' sums, and the gradient the same weighted sum of their gradients. So one list of weights
predicts both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from unisono.proof.recording.gradient_sample import norm_of
from unisono.proof.recording.trace import Array, Part

Weights = dict[int, float]  # of a part, by its place in the list of parts
Weigh = Callable[[Sequence[Part], str], Weights]  # for one term; ZeroDivisionError where it cannot be done
ROUNDING = 1e-9  # a prediction in fp64 holds if it is no further off than this
_EXACT = 1e-12  # relative difference of sums that were not rounded


@dataclass(frozen=True)
class Reduction:
    """One way to reduce the sums of parts.

    Attributes:
        words: what is done.
        weigh: the weights of the parts.
    """

    words: str
    weigh: Weigh


def is_equal(a: float, b: float, limit: float = ROUNDING) -> bool:
    """Whether two numbers differ by rounding at most."""
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= limit * max(abs(a), abs(b))


# ways to reduce -------------------------------------------------------------------------------------------------------


def means(parts: Sequence[Part]) -> list[Reduction]:
    """The ways to average averages."""
    ranks, micros = _by_rank(parts), [[i] for i in range(len(parts))]
    result = []
    for groups, of_what in ((micros, "micro-batches"), (ranks, "ranks")):
        words = f"the mean over {of_what} of what each divides by its own count"
        alike, by_rows = [1.0] * len(groups), [float(sum(parts[i].rows for i in group)) for group in groups]
        result.append(Reduction(words, _averaging(groups, alike)))
        result.append(Reduction(f"{words}, without empty ones", _averaging(groups, alike, empty=False)))
        result.append(Reduction(f"{words}, weighted by rows", _averaging(groups, by_rows)))
    of_rank = {i: 1 / len(rank) for rank in ranks for i in rank}
    nested = _averaging(micros, [of_rank[i] for (i,) in micros])
    return [*result, Reduction("the mean over ranks of their micro-batches' means", nested)]


def of_some(parts: Sequence[Part]) -> list[Reduction]:
    """The ways to leave out what other ranks, or other micro-batches, have."""
    result, every = [], range(len(parts))
    for places in _by_rank(parts):
        rank, last = parts[places[0]].rank, places[-1:]
        result.append(Reduction(f"the sums and counts of rank {rank} alone", _dividing(places, places)))
        result.append(Reduction(f"the sums of rank {rank} alone, over all counts", _dividing(places, every)))
        result.append(Reduction(f"the last micro-batch of rank {rank} alone", _dividing(last, last)))
    return result


def by_count_of_one(parts: Sequence[Part]) -> list[Reduction]:
    """All sums over the counts of one rank."""
    words, every = "all sums over the counts of rank {} alone", range(len(parts))
    return [Reduction(words.format(parts[own[0]].rank), _dividing(every, own)) for own in _by_rank(parts)]


def _averaging(groups: list[list[int]], shares: list[float], empty: bool = True) -> Weigh:
    """The mean over groups, with these shares, of what each has divided by its own count; without empty ones or not."""

    def weigh(parts: Sequence[Part], term: str) -> Weights:
        counts = [_count(parts, group, term) for group in groups]
        own = [share if empty or count else 0.0 for share, count in zip(shares, counts, strict=True)]
        whole = sum(own)
        return {
            i: share / whole / count if count else 0.0
            for group, count, share in zip(groups, counts, own, strict=True)
            for i in group
        }

    return weigh


def _dividing(places: Sequence[int], by: Sequence[int]) -> Weigh:
    """The sums of some parts over the counts of some."""

    def weigh(parts: Sequence[Part], term: str) -> Weights:
        count = _count(parts, by, term)
        return {i: 1 / count if i in places else 0.0 for i in range(len(parts))}

    return weigh


def _sharing(places: Sequence[int]) -> Weigh:
    """What some parts rightly have in the whole: their sums over all counts, and nothing of a term that counts none."""

    def weigh(parts: Sequence[Part], term: str) -> Weights:
        total = _count(parts, range(len(parts)), term)
        return {i: 1 / total if total and i in places else 0.0 for i in range(len(parts))}

    return weigh


def _count(parts: Sequence[Part], places: Iterable[int], term: str) -> float:
    return sum(parts[i].counts[term] for i in places)


def _by_rank(parts: Sequence[Part]) -> list[list[int]]:
    """Places of the parts of each rank."""
    return [[i for i, part in enumerate(parts) if part.rank == rank] for rank in sorted({p.rank for p in parts})]


# numbers --------------------------------------------------------------------------------------------------------------


def predict_value(parts: Sequence[Part], term: str, reduction: Reduction) -> float:
    """A term of the loss, or a metric, by a way of reducing; not a number where it divides by zero."""
    try:
        weights = reduction.weigh(parts, term)
    except ZeroDivisionError:
        return math.nan
    return sum(weight * parts[i].sums[term] for i, weight in weights.items())


def find_reduction(
    parts: Sequence[Part], observed: Mapping[str, float], ways: Iterable[Reduction], limit: float = ROUNDING
) -> Reduction | None:
    """The way of reducing that reproduces all these numbers to rounding.

    Args:
        parts: of the global batch, each with sums and counts of these names.
        observed: terms or metrics that are not what all sums over all counts come to.
        ways: to try, in this order.
        limit: relative difference that is rounding.
    """
    if (
        not parts
        or not observed
        or any(name not in part.sums or name not in part.counts for part in parts for name in observed)
    ):
        return None
    return next(
        (way for way in ways if all(is_equal(predict_value(parts, n, way), v, limit) for n, v in observed.items())),
        None,
    )


# gradients ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartGradients:
    """What every part adds to the gradient.

    Attributes:
        parts: of the global batch, with the ranks of the run in question.
        of_terms: by term and number of the micro-batch, elements of the gradient of its unscaled sum, by parameter.
    """

    parts: Sequence[Part]
    of_terms: Mapping[str, Mapping[int, Mapping[str, Array]]]

    def predict(self, weigh: Weigh) -> dict[str, Array]:
        """The gradient by a way of reducing; empty where it divides by zero."""
        try:
            weights = {term: weigh(self.parts, term) for term in self.of_terms}
        except ZeroDivisionError:
            return {}
        result: dict[str, Array] = {}
        for term, of_parts in self.of_terms.items():
            for i, part in enumerate(self.parts):
                factor = part.weights.get(term, 1.0) * weights[term][i]
                for name, value in of_parts.get(part.number, {}).items():
                    result[name] = result.get(name, 0.0) + factor * value
        return result

    @property
    def whole(self) -> dict[str, Array]:
        """What all parts rightly add up to."""
        return self.predict(_sharing(range(len(self.parts))))

    @property
    def each(self) -> list[dict[str, Array]]:
        """What each part rightly adds."""
        return [self.predict(_sharing([i])) for i in range(len(self.parts))]


def reproduces(predicted: Mapping[str, Array], observed: Mapping[str, Array], limit: float = ROUNDING) -> bool:
    """Whether a predicted gradient is the observed one, tensor by tensor, to rounding."""
    if not predicted or not set(observed) <= set(predicted):
        return False
    size = math.sqrt(sum(float(np.square(np.abs(value)).sum()) for value in observed.values()))
    return all(
        predicted[name].shape == value.shape
        and float(np.linalg.norm(predicted[name] - value)) <= limit * max(float(np.linalg.norm(value)), 1e-3 * size)
        for name, value in observed.items()
    )


def common_factor(mine: Mapping[str, Array], reference: Mapping[str, Array], limit: float = ROUNDING) -> float | None:
    """The factor by which every tensor is what it should be; None where they have not one and the same."""
    a, b = _joined(mine, reference)
    if not b.any() or not a.any():
        return None
    factor = float(a @ b / (b @ b))
    return (
        factor
        if reproduces({name: factor * v.astype(np.float64) for name, v in reference.items()}, mine, limit)
        else None
    )


def find_number(factor: float, numbers: Iterable[int], limit: float = ROUNDING) -> int | None:
    """The number, of those given, that a factor is, or one over which it is."""
    return next((n for n in numbers if n > 1 and (is_equal(factor, n, limit) or is_equal(factor, 1 / n, limit))), None)


def fit_weights(
    observed: Mapping[str, Array], parts: Sequence[Mapping[str, Array]], limit: float = ROUNDING
) -> list[float] | None:
    """The weights with which parts add up to a gradient; None where none do, or where several would."""
    if not parts or not set(observed) <= {name for part in parts for name in part}:
        return None
    columns = np.stack([_flat(part, observed) for part in parts], axis=1)
    wanted = np.concatenate([observed[name].ravel() for name in observed])
    if not (np.isfinite(columns).all() and np.isfinite(wanted).all()):
        return None
    scale = np.linalg.norm(columns, axis=0)
    there = scale > 0
    if len(wanted) < 2 * there.sum() or not there.any():
        return None
    solved, _, rank, singular = np.linalg.lstsq(columns[:, there] / scale[there], wanted, rcond=None)
    if rank < there.sum() or singular[-1] < 1e-5 * singular[0]:
        return None
    if np.linalg.norm(columns[:, there] / scale[there] @ solved - wanted) > limit * np.linalg.norm(wanted):
        return None
    weights = np.zeros(len(parts))
    weights[there] = solved / scale[there]
    return [float(weight) for weight in weights]


def _flat(part: Mapping[str, Array], like: Mapping[str, Array]) -> Array:
    """The elements of a part, with zeros where it has no gradient."""
    return np.concatenate([part.get(name, np.zeros(value.shape)).ravel() for name, value in like.items()])


def _joined(mine: Mapping[str, Array], reference: Mapping[str, Array]) -> tuple[Array, Array]:
    names = [name for name in reference if name in mine]
    a, b = (np.concatenate([np.float64(v[n]).ravel() for n in names] or [np.zeros(0)]) for v in (mine, reference))
    return a, b


# particular faults ----------------------------------------------------------------------------------------------------


def find_clipping(weights: Sequence[float], ranks: Sequence[Mapping[str, Array]], limit: float) -> bool:
    """Whether ranks' gradients were clipped to a limit before they were averaged.

    Args:
        weights: with which the ranks' shares add up to what was observed; 1 where nothing was clipped.
        ranks: each rank's share of the gradient, whole.
        limit: of the norm.
    """
    size = len(ranks)  # a rank's own gradient is its share times the number of ranks
    norms = [size * norm_of(rank.values()) for rank in ranks]
    wanted = [min(1.0, limit / own) if own else 1.0 for own in norms]
    known = [(w, f) for w, f, own in zip(weights, wanted, norms, strict=True) if own]
    return any(f < 1 for _, f in known) and all(is_equal(w, f, 1e-4) for w, f in known)


LOWER = {"bf16": 8, "fp16": 11, "fp32": 24}  # bits of the significand


def round_to(values: Array, bits: int) -> Array:
    """Numbers rounded to so many bits of significand, ties to even; exponents are as wide as they are."""
    significand, exponent = np.frexp(values.astype(np.float64))
    rounded: Array = np.ldexp(np.rint(significand * 2.0**bits), exponent - bits)
    return rounded


def find_lower_precision(observed: Mapping[str, Array], ranks: Sequence[Mapping[str, Array]]) -> str:
    """The precision in which the shares of ranks were added up, if rounding them to it reproduces what was observed.

    Args:
        observed: elements of the gradient by parameter.
        ranks: the same of what each rank rightly adds.

    Returns:
        Its name; empty where none reproduces it.
    """
    if len(ranks) < 2 or any(not set(observed) <= set(rank) for rank in ranks):
        return ""
    wanted = np.concatenate([observed[name].ravel() for name in observed])
    shares = [np.concatenate([rank[name].ravel() for name in observed]) for rank in ranks]
    size, exact = float(len(shares)), np.sum(shares, axis=0)
    slack = _EXACT * float(np.abs(wanted).max(initial=0.0))
    for name, bits in LOWER.items():
        parts = [round_to(size * share, bits) for share in shares]
        added = np.zeros_like(wanted)
        for part in parts:
            added = round_to(added + part, bits)
        for made in (np.sum(parts, axis=0) / size, added / size, round_to(exact, bits)):
            off, changed = np.abs(made - wanted) > slack, np.abs(exact - wanted) > slack
            # A share within rounding of a tie may go either way.
            if changed.any() and off.mean() < 0.01 and _within_unit(wanted, shares, bits, slack):
                return name
    return ""


def _within_unit(observed: Array, shares: Sequence[Array], bits: int, slack: float) -> bool:
    """Whether no element is further from the exact sum than roundings of its parts come to."""
    exact, largest = np.sum(shares, axis=0), np.sum(np.abs(shares), axis=0)
    return bool((np.abs(observed - exact) <= (len(shares) + 1) * 2.0 ** (1 - bits) * largest + slack).all())


# rates ----------------------------------------------------------------------------------------------------------------


def stepped_per_process(mine: Sequence[float], schedule: Sequence[float], size: int) -> bool:
    """Whether a rate is that of the schedule at `size` times the update, as far as the schedule is known.

    Args:
        mine: rates of the run in question, update by update.
        schedule: of one process; its first `k` values are known.
        size: number of processes.
    """
    known = [(rate, schedule[size * k]) for k, rate in enumerate(mine) if size * k < len(schedule)]
    return len(known) > 1 and all(is_equal(rate, wanted, ROUNDING) for rate, wanted in known)


# a loss of some of its rows -------------------------------------------------------------------------------------------


def is_additive(values: Mapping[tuple[int, ...], float], limit: float = ROUNDING) -> bool:
    """Whether the value of every set of rows is the sum of the values of its rows."""
    largest = max(map(abs, values.values()), default=0.0)
    return all(abs(sum(values[(i,)] for i in rows) - value) <= limit * largest for rows, value in values.items())


def find_constant(values: Mapping[tuple[int, ...], float], limit: float = ROUNDING) -> float | None:
    """What every set of rows has once, beside the sum of what its rows add; None if that is not all it has.

    It is found from one pair of rows, and has to hold for every other set, of which there must be larger ones.
    """
    largest = max(map(abs, values.values()), default=0.0)
    pair = next((rows for rows in values if len(rows) == 2), None)
    if pair is None or max(map(len, values)) < 3:
        return None
    constant = sum(values[(i,)] for i in pair) - values[pair]
    holds = all(
        abs(sum(values[(i,)] for i in rows) - (len(rows) - 1) * constant - value) <= 10 * limit * largest
        for rows, value in values.items()
    )
    return constant if holds and abs(constant) > 1e3 * limit * largest else None


def own_mean_weights(values: Mapping[tuple[int, ...], float], limit: float = ROUNDING) -> list[float] | None:
    """The weights of rows, if the value of every set is a mean of what its rows have alone; None otherwise.

    Such a term has divided by a count of its own: it is a mean whose weights do not depend on which rows are together.
    Weights are found from pairs, and have to hold for every larger set.
    """
    rows = sorted({row for subset in values for row in subset})
    size = max(map(abs, values.values())) or 1.0
    if len(rows) < 3 or not all(map(math.isfinite, values.values())):
        return None
    pairs = [pair for pair in combinations(rows, 2) if pair in values]
    matrix = np.zeros((len(pairs), len(rows)))
    for line, (i, j) in enumerate(pairs):
        matrix[line, rows.index(i)] = (values[(i,)] - values[(i, j)]) / size
        matrix[line, rows.index(j)] = (values[(j,)] - values[(i, j)]) / size
    _, singular, turned = np.linalg.svd(matrix)
    if len(singular) < len(rows) or singular[-1] > limit or singular[-2] < 1e-4:
        return None
    weights = turned[-1] * np.sign(turned[-1].sum())
    if (weights < -1e-6 * weights.max()).any():
        return None
    by_row = dict(zip(rows, weights / weights.max(), strict=True))
    for subset, value in values.items():
        whole = sum(by_row[row] for row in subset)  # of rows that count nothing the mean is zero
        wanted = sum(by_row[row] * values[(row,)] for row in subset) / whole if whole > 1e-6 else 0.0
        if abs(wanted - value) > 1e3 * limit * size:
            return None
    return [float(by_row[row]) for row in rows]
