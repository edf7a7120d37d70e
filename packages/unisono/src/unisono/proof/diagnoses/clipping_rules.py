"""What it means that a norm of gradients or their clipping differs, or that gradients were clipped too early."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import add_gradients, norm_of
from unisono.proof.recording.trace import Array
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

_CLIPPED = 1e-4  # a norm comes so near to its limit, to which some add 1e-6 before they divide


def diagnose_norm(pattern: Pattern) -> Diagnosis:
    """Of a norm of gradients that agree."""
    worst, size = pattern.worst, pattern.world_size
    whole = pattern.mine.tensors("raw gradients", pattern.number)
    shown = f"{worst.mine:.9g} instead of {worst.reference:.9g}"
    exact = norm_of(whole.values())
    if pattern.abstains("raw gradients") or (exact and predictions.is_equal(worst.mine, exact, 1e-9)):
        detail = f"the norm is {shown}, and that of the run's own gradients is {exact:.9g}: it is they that differ"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    parts = {f"the shards of rank {rank}": norm_of(_shard(whole, rank, size).values()) for rank in range(size)}
    parts |= {
        f"{size} copies of it": exact * math.sqrt(size),
        f"an N-th of its squares, N = {size}": exact / math.sqrt(size),
    }
    for name, norm in parts.items() if size > 1 else ():
        if predictions.is_equal(worst.mine, norm, max(pattern.rounding, 1e-6)):
            return build_diagnosis(FaultName.NORM_OF_A_PART, f"{shown}, the norm of {name}")
    for name, bits in predictions.LOWER.items():
        unit, rounded = 2.0 ** (1 - bits), float(predictions.round_to(np.array([worst.mine]), bits)[0])
        if rounded == worst.mine and abs(worst.mine - exact) <= 64 * unit * exact:
            detail = f"{shown}, a number of {name}"
            return build_diagnosis(FaultName.LOW_PRECISION_NORM, detail)
    return build_diagnosis(
        FaultName.NORM_BY_LAYOUT, f"{shown}; the gradients agree, and it is the norm of no rank's shards"
    )


def diagnose_clipped(pattern: Pattern) -> Diagnosis:
    """Of clipped gradients, where raw ones and their norm agree."""
    number, size = pattern.number, pattern.world_size
    if pattern.abstains("raw gradients"):
        detail = "clipped gradients differ; whether those before it do is not known, since they were not compared"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    raw, clipped = (pattern.mine.tensors(f"{kind} gradients", number) for kind in ("raw", "clipped"))
    limit, factors, known = pattern.limit, [], True
    for rank in range(size):
        shard = _shard(raw, rank, size)
        factor = predictions.common_factor(_shard(clipped, rank, size), shard, 1e-6)
        wanted = min(1.0, limit / norm) if (norm := norm_of(shard.values())) else 1.0
        known = known and factor is not None and predictions.is_equal(factor, wanted, 1e-4)
        factors.append(math.nan if factor is None else factor)
    if known and max(factors) > min(factors):
        detail = f"each rank has scaled its shards by their own norm: by {show_numbers(factors)}"
        return build_diagnosis(FaultName.LOCAL_NORM, detail)
    some = {name: value for name, value in raw.items() if not np.array_equal(value, clipped.get(name, value))}
    factor = predictions.common_factor({name: clipped[name] for name in some}, some, 1e-6)
    if factor and len(some) < len(raw) and predictions.is_equal(factor, limit / norm_of(some.values()), 1e-4):
        detail = f"{join_names(sorted(some), 3)} are scaled by {factor:.4g}, by the norm of these alone; others are not"
        return build_diagnosis(FaultName.NORM_OF_A_PART, detail)
    return build_diagnosis(FaultName.CLIPPING_BY_LAYOUT, "gradients and norm agree before it")


def _shard(tensors: Mapping[str, Array], rank: int, size: int) -> dict[str, Array]:
    """A rank's pieces of tensors, as `fully_shard` deals them out: along the first axis, by `torch.chunk`."""
    result = {}
    for name, value in tensors.items():
        value = np.atleast_1d(value)
        rows = -(-len(value) // size)
        result[name] = value[rank * rows : (rank + 1) * rows]
    return result


# of raw gradients, which were clipped before anything saw it --------------------------------------------------


def find_clipped_before(pattern: Pattern, whole: Mapping[str, Array]) -> str:
    """Whether ranks' gradients were clipped to the limit of the norm before they were averaged."""
    limit, shares = pattern.limit, pattern.rank_shares
    if not limit < norm_of(whole.values()) * (1 - 1e-6) or any(
        pattern.gradient.get(n, np.zeros(0)).size != v.size for n, v in whole.items()
    ):
        return ""  # nothing is clipped on one process, or norms of ranks are not known
    weights = predictions.fit_weights(pattern.gradient, shares, pattern.fitting)
    if weights is None or not predictions.find_clipping(weights, shares, limit):
        return ""
    return f"each rank's gradient was first scaled to the limit of {limit:.4g}: {show_numbers(weights)} of what it is"


def find_clipped_by_pass(pattern: Pattern, whole: Mapping[str, Array]) -> str:
    """Whether ranks clip what they have accumulated after every backward pass but the last, which reduces it."""
    limit, ranks = pattern.limit, range(pattern.world_size)
    passes = [[own for rank, own in pattern.local_gradients if rank == number] for number in ranks]
    local = [own for each in passes for own in each]
    if not limit or {*map(len, passes)} == {1} or any(pattern.gradient[n].size != v.size for n, v in whole.items()):
        return ""
    fitted = predictions.fit_weights(pattern.gradient, local, pattern.fitting)
    wanted = [factor for each in passes for factor in _factors_of_clipping(each, limit)]
    if fitted is None or min(wanted) == 1:
        return ""
    factors = [weight * pattern.world_size for weight in fitted]
    if not all(predictions.is_equal(a, b, _CLIPPED) for a, b in zip(factors, wanted, strict=True)):
        return ""
    return (
        f"each rank has scaled what it had accumulated to the limit of {limit:.4g} after every backward pass but the "
        f"last: {show_numbers(factors)} of what the passes of the ranks made is in the mean"
    )


def _factors_of_clipping(passes: Sequence[Mapping[str, Array]], limit: float) -> list[float]:
    """What is left of every pass of a rank, where it clips what it has accumulated after all but the last."""
    result: list[float] = []
    for number in range(len(passes)):
        result.append(1.0)
        made = add_gradients([{n: f * v for n, v in p.items()} for f, p in zip(result, passes, strict=False)])
        if number < len(passes) - 1 and (norm := norm_of(made.values())) > limit:
            result = [factor * limit / norm for factor in result]
    return result


def find_clipped_by_hand(pattern: Pattern, a: Mapping[str, Array], b: Mapping[str, Array]) -> str:
    """Whether each rank has scaled its shards, by their own norm, to the limit of the whole, where no clipping is seen.

    On one process the gradient has the limit as its norm then; so have a rank's shards, unless they were within it.
    """
    if pattern.mine.tensors("clipped gradients", pattern.number):
        return ""
    limit, ranks = norm_of(b.values()), range(pattern.world_size)
    shards = [(_shard(a, rank, pattern.world_size), _shard(b, rank, pattern.world_size)) for rank in ranks]
    there = [(ours, theirs) for ours, theirs in shards if norm_of(theirs.values())]
    if len(there) < 2:
        return ""
    factors = [predictions.common_factor(ours, theirs, pattern.fitting) for ours, theirs in there]
    norms = [norm_of(ours.values()) for ours, _ in there]
    known = all(f is not None and f > 1 for f in factors) and max(norms) <= limit * (1 + _CLIPPED)
    if not known or not any(predictions.is_equal(norm, limit, _CLIPPED) for norm in norms):
        return ""
    shown = show_numbers(norms)
    return f"each rank's shards have the norm {shown}, which on one process the whole gradient has: {limit:.4g}"


def show_numbers(numbers: list[float]) -> str:
    """The first of them, in words."""
    return ", ".join(f"{number:.4g}" for number in numbers[:8]) + (", …" if len(numbers) > 8 else "")
