"""What it means that gradients are the first to differ.

What was observed is taken as a sum of what every micro-batch adds on one process. The weights of that sum, if there are
any, say which fault it is; a fault whose weights, or whose rounding, reproduce nothing is not named.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.clipping_rules import (
    find_clipped_before,
    find_clipped_by_hand,
    find_clipped_by_pass,
    show_numbers,
)
from unisono.proof.diagnoses.loss_rules import find_means
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import norm_of
from unisono.proof.recording.trace import Array, Part
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

_BF16_ROUNDING = 1e-2  # more than a tensor differs when it was rounded to bf16
_FITTED = 1e-6  # a weight that was fitted is known so well
_REDUCE_ONCE = "reduce what was accumulated once per update, with the last backward pass"


def diagnose_gradients(pattern: Pattern) -> Diagnosis:
    """Of raw gradients that are the first to differ, or that a loss follows which nobody recorded."""
    step, number = pattern.worst.step, pattern.number
    if pattern.step.clean is False:
        return build_diagnosis(FaultName.GRADIENTS_NOT_CLEARED, f"step {step} began with gradients")
    a, b = (trace.tensors("raw gradients", number) for trace in (pattern.mine, pattern.reference))
    if frozen := sorted(({*b} - {*a}) & {*pattern.mine.facts.frozen}):
        detail = f"{join_names(frozen)} {'are' if len(frozen) > 1 else 'is'} frozen here, and trained on one process"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    if missing := sorted({*b} - {*a}):
        return build_diagnosis(FaultName.UNUSED_PARAMETERS, f"no gradient for {', '.join(missing[:3])}")
    if (parts := pattern.reference_gradients) is not None and not predictions.reproduces(
        parts.whole, pattern.true_gradient, pattern.fitting
    ):
        detail = (
            "the gradient of one process is not the sum of what its micro-batches add by themselves: a hook, a "
            "clipping or a backward function changes it on the way, and no fault of the reduction can be read from it"
        )
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    factor = predictions.common_factor(a, b, pattern.rounding)
    if factor is not None and not predictions.is_equal(factor, 1.0, _FITTED):
        return _diagnose_factor(pattern, factor)
    if detail := _not_synchronised_alone(pattern):
        return build_diagnosis(FaultName.PARTLY_SYNCHRONISED, detail)
    if detail := find_clipped_before(pattern, b) or find_clipped_by_pass(pattern, b):
        return build_diagnosis(FaultName.CLIPPED_TOO_EARLY, detail)
    if diagnosis := _diagnose_own_gradient(pattern):
        return diagnosis
    if means := find_means(pattern):
        return build_diagnosis(FaultName.MEAN_OF_MEANS, means)
    if lower := predictions.find_lower_precision(pattern.gradient, pattern.rank_shares):
        detail = f"every element is that of one process after rounding what the ranks add to {lower}"
        return build_diagnosis(FaultName.LOW_PRECISION_REDUCTION, detail)
    if not pattern.shares and (lower := _find_lower_numbers(pattern)):
        detail = f"every element of the tensors that differ is a number of {lower}, and off by rounding to it"
        return build_diagnosis(FaultName.LOW_PRECISION_REDUCTION, detail)
    if detail := find_clipped_by_hand(pattern, a, b):
        return build_diagnosis(FaultName.LOCAL_NORM, detail)
    weights = _weights(pattern)
    if weights is not None:
        return _diagnose_weights(pattern, weights)
    if diagnosis := _diagnose_regrouped(pattern):
        return diagnosis
    if pattern.mine.facts.crosses == "rows" and pattern.worst.size > _BF16_ROUNDING and not pattern.failed("loss"):
        detail = "the loss crosses samples and agrees, the gradients differ in direction, tensor by tensor"
        return build_diagnosis(FaultName.CROSS_SAMPLE_GRADIENTS, detail)
    return _diagnose_neutrally(pattern, a, b)


def _diagnose_factor(pattern: Pattern, factor: float) -> Diagnosis:
    size, passes = pattern.world_size, len(pattern.step.parts) // pattern.world_size
    meanings = [(size, "number of processes"), (size * size, "number of processes, twice")]
    meanings += [(passes, "number of micro-batches of a process"), (passes * size, "number of micro-batches")]
    known = {n: f": by the {' or the '.join(what for m, what in meanings if m == n)}" for n, _ in meanings}
    found = predictions.find_number(factor, known, pattern.rounding)
    shown = f"every tensor is {factor:.6g} times what it should be"
    if found is not None and (words := pattern.explain_factor_by_passes(factor)):
        fault = FaultName.SCALED_GRADIENTS if pattern.shares_passes else FaultName.GRADIENTS_BY_LAYOUT
        return build_diagnosis(fault, f"every tensor is {words}")
    if found is None:
        detail = f"{shown}, which is neither the number of processes nor that of micro-batches"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    return build_diagnosis(FaultName.SCALED_GRADIENTS, shown + known[found])


def _wrong_tensors(pattern: Pattern) -> list[str]:
    return [
        name
        for name, value in pattern.gradient.items()
        if not predictions.reproduces({name: pattern.true_gradient[name]}, {name: value}, pattern.rounding)
    ]


def _find_lower_numbers(pattern: Pattern) -> str:
    """The precision of which all numbers of the tensors that differ are.

    It decides where what ranks add is not known: `fully_shard` hides it, and the sum that it makes has that precision,
    on one process too. Of fp32, which a part of a model may compute in, few numbers of one process may be.
    """
    names = [name for name in _wrong_tensors(pattern) if pattern.true_gradient[name].any()]
    pairs = [(pattern.gradient[name], pattern.true_gradient[name]) for name in names]
    if not pairs or any(mine.shape != true.shape for mine, true in pairs):
        return ""
    mine, true = (np.concatenate(each) for each in zip(*pairs, strict=True))
    off = float(np.linalg.norm(mine - true)) / float(np.linalg.norm(true))
    for name, bits in predictions.LOWER.items():
        within = off <= (pattern.world_size + 1) * 2.0 ** (1 - bits)
        known = (predictions.round_to(mine, bits) == mine).all() and (
            predictions.round_to(mine, bits - 1) != mine
        ).any()
        if within and known and (name != "fp32" or (predictions.round_to(true, bits) == true).mean() < 0.5):
            return name
    return ""


def _not_synchronised_alone(pattern: Pattern) -> str:
    """Whether some tensors are a rank's own and all others are right."""
    wrong = _wrong_tensors(pattern)
    if not wrong or len(wrong) == len(pattern.gradient) or pattern.agrees("replicas"):
        return ""  # where replicas agree, gradients were reduced
    found = _rank_whose_gradient(pattern, {name: pattern.gradient[name] for name in wrong})
    return "" if found is None else f"{', '.join(wrong[:3])} are those of rank {found[0]} alone, all others agree"


def _diagnose_own_gradient(pattern: Pattern) -> Diagnosis | None:
    """Whether the gradient is that of a rank, or is so but for micro-batches that were reduced.

    Gradients that were not reduced leave replicas with other parameters. Where replicas agree, they were reduced, and
    other ranks had nothing to add.
    """
    found = _rank_whose_gradient(pattern, pattern.gradient)
    if found is not None:
        rank, factor = found
        detail = f"every tensor is what the rows of rank {rank} alone come to"
        if not pattern.agrees("replicas"):
            return build_diagnosis(FaultName.NOT_SYNCHRONISED, detail)
        if factor == 1:
            detail += ", and replicas agree: gradients were reduced, and those of the other ranks were zero"
        else:
            detail += f", {factor} times, and replicas agree: all ranks have the gradient of one"
        detail += "; look for the rank, and for a broadcast, in outputs(), loss() and hooks"
        return build_diagnosis(FaultName.PART_OF_THE_BATCH, detail)
    weights = _weights(pattern)
    if weights is None or not pattern.failed("replicas"):
        return None
    size = pattern.world_size
    known = all(any(abs(w - n) < _FITTED for n in (0, 1, size)) for w in weights)
    others = [w for (rank, _), w in zip(pattern.shares, weights, strict=True) if rank and abs(w) < _FITTED]
    if not known or not others:
        return None
    detail = f"micro-batches of other ranks are missing, and replicas differ; weights {show_numbers(weights)}"
    return build_diagnosis(FaultName.NOT_SYNCHRONISED, detail)


def _rank_whose_gradient(pattern: Pattern, observed: Mapping[str, Array]) -> tuple[int, int] | None:
    """The rank, and how many times the gradient is what it adds to that of all: N times, where nothing was averaged."""
    shares = pattern.rank_shares
    for rank, share in enumerate(shares if len(shares) > 1 else []):
        for factor in (1, pattern.world_size):
            own = {name: factor * value for name, value in share.items()}
            if predictions.reproduces(own, observed, pattern.fitting):
                return rank, factor
    return None


def _weights(pattern: Pattern) -> list[float] | None:
    """The weights with which the micro-batches of one process add up to what was observed."""
    return predictions.fit_weights(pattern.gradient, [share for _, share in pattern.shares], pattern.fitting)


def _diagnose_weights(pattern: Pattern, weights: list[float]) -> Diagnosis:
    largest = max(map(abs, weights))
    if max(abs(weight - 1) for weight in weights) < _FITTED:
        detail = (
            f"they differ by {pattern.worst.size:.1g}: more than rounding was measured to be, and no part is missing"
        )
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    absent = [i for i, weight in enumerate(weights) if abs(weight) < _FITTED * largest]
    rest = [weight for weight in weights if abs(weight) >= _FITTED * largest]
    if absent and max(rest) - min(rest) < _FITTED * largest:
        detail = f"micro-batches {absent[:8]} are missing from the sum, and the others are in it alike"
        return build_diagnosis(FaultName.PART_OF_THE_BATCH, detail)
    detail = (
        f"micro-batches are in the sum {show_numbers(weights)} times, instead of once; these are not means of means"
    )
    neutral = build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    if not _are_summed_by_pass(pattern, weights):
        return neutral
    detail += ": what a rank had accumulated was added up over ranks after every backward pass, and not once"
    return replace(neutral, because=detail, remedy=_REDUCE_ONCE)


def _are_summed_by_pass(pattern: Pattern, weights: Sequence[float]) -> bool:
    """Whether every backward pass of each rank is in the sum N times as often as the one after it."""
    size, each = pattern.world_size, zip((rank for rank, _ in pattern.shares), weights, strict=True)
    pairs = [(a, b) for (rank, a), (other, b) in itertools.pairwise(each) if rank == other]
    return size > 1 and bool(pairs) and all(predictions.is_equal(a, size * b, _FITTED) for a, b in pairs)


def _diagnose_regrouped(pattern: Pattern) -> Diagnosis | None:
    """Of one process with other micro-batches: what those inside of one of the reference add, beside what that adds.

    Where the difference is one and the same gradient for every further micro-batch, it does not come from rows.
    """
    sides = [
        (trace.facts.steps[pattern.number].parts, trace.tensors("term gradients", pattern.number))
        for trace in (pattern.mine, pattern.reference)
    ]
    if pattern.root.kept_by_task:  # a state may have any effect
        return None
    extra = find_extra_gradients(sides[0], sides[1], pattern.fitting)
    if extra is None:
        return None
    term, constant, names = extra
    if constant:
        detail = (
            f"every micro-batch adds the same to the gradient of {join_names(names)}, whatever its rows, by '{term}'"
        )
        return build_diagnosis(FaultName.TERM_PER_MICRO_BATCH, detail)
    detail = (
        f"the gradient of '{term}' for {join_names(names)} is, of rows together, not the sum of what they have "
        "in smaller micro-batches, and their loss is: a factor without a gradient (detach), a hook or a backward "
        "function computes something of several rows"
    )
    return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)


def find_extra_gradients(
    mine: tuple[Sequence[Part], Mapping[str, Array]],
    reference: tuple[Sequence[Part], Mapping[str, Array]],
    limit: float,
) -> tuple[str, bool, list[str]] | None:
    """How the gradients of smaller micro-batches do not add up to that of the larger ones that they are parts of.

    Args:
        mine: the smaller micro-batches, in order, and their gradients as `term/number/parameter`.
        reference: the larger ones.
        limit: relative difference that is rounding.

    Returns:
        A term, whether every micro-batch adds one and the same gradient to it once, and the parameters in question;
        None where they add up, or where micro-batches do not fit into one another.
    """
    smaller, larger = mine[0], reference[0]
    groups, left = [], list(smaller)
    for whole in larger:
        group: list[Part] = []
        while left and sum(part.rows for part in group) < whole.rows:
            group.append(left.pop(0))
        if sum(part.rows for part in group) != whole.rows:
            return None
        groups.append(group)
    if not larger or len(smaller) == len(larger) or not (mine[1] and reference[1]):
        return None
    names = dict.fromkeys(tuple(key.split("/", 2)[::2]) for key in (*reference[1], *mine[1]))
    found: dict[str, dict[str, bool]] = {}
    for term, name in names:
        once = []  # what every further micro-batch adds, by larger one
        sizes = [1e-300]
        for whole, group in zip(larger, groups, strict=True):
            true = reference[1].get(f"{term}/{whole.number}/{name}")
            parts = [mine[1][key] for part in group if (key := f"{term}/{part.number}/{name}") in mine[1]]
            if true is None or not parts:
                return None
            once.append((np.sum(parts, axis=0) - true) / max(1, len(group) - 1))
            sizes += [float(np.linalg.norm(true)), *(float(np.linalg.norm(part)) for part in parts)]
        if max(float(np.linalg.norm(one)) for one in once) > limit * max(sizes):
            same = all(float(np.linalg.norm(one - once[0])) <= limit * max(sizes) for one in once)
            found.setdefault(term, {})[name] = same and len(once) > 1
    if not found:
        return None
    term, of_names = next(iter(found.items()))
    return term, all(of_names.values()), list(of_names)


def _diagnose_neutrally(pattern: Pattern, a: Mapping[str, Array], b: Mapping[str, Array]) -> Diagnosis:
    if pattern.is_resumed:
        detail = "rows, weights and loss agree, the gradients do not"
        return build_diagnosis(FaultName.STATE_NOT_CARRIED, detail)
    wrong = [n for n in b if np.linalg.norm(np.float64(a[n]) - b[n]) > pattern.rounding * max(norm_of([b[n]]), 1e-300)]
    only = (
        f"only {', '.join(wrong[:3])} differ{_describe_zero(a, wrong)}" if 2 * len(wrong) <= len(b) else "they differ"
    )
    pair = {n: a[n] for n in wrong}, {n: b[n] for n in wrong}
    factor = predictions.common_factor(*pair, pattern.rounding) if wrong else None
    if factor is not None and len(wrong) < len(b):
        size = pattern.world_size
        known = " (the number of processes: are they reduced twice, or summed where others are averaged?)"
        known *= abs(factor - size) <= pattern.rounding * size
        some = only if 2 * len(wrong) <= len(b) else f"those of {_describe_group(wrong, b)} differ"
        detail = f"{some}, {factor:.6g} times what they should be{known}, and all others agree"
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    if not pattern.shares:
        known = "what each micro-batch adds was not recorded, so no sum of it could be tried"
    else:
        known = "they are no sum of what the micro-batches add, nor of what is left of it in a lower precision"
    loss = "; no loss was recorded" if pattern.step.loss is None else ""
    loss += "" if pattern.mine.tensors("clipped gradients", pattern.number) else "; a clipping by hand would be in them"
    return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, f"{only}, by no common factor; {known}{loss}")


def _describe_group(names: Sequence[str], every: Collection[str]) -> str:
    """Most parameters in words: by the modules that they alone are in, or by those that are not among them."""
    others = [name for name in every if name not in names]
    inside, outside = (dict.fromkeys(name.partition(".")[0] for name in each) for each in (names, others))
    if not {*inside} & {*outside}:
        return f"{join_names([f'{module}.*' for module in inside], 3)} ({len(names)} of {len(every)})"
    return f"all but {join_names(others, 3)}"


def _describe_zero(gradients: Mapping[str, Array], names: Sequence[str]) -> str:
    return " and are exactly 0" if all(not gradients[name].any() for name in names) else ""
