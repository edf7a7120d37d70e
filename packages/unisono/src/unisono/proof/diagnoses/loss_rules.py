"""What it means that the loss is the first to differ.

A name is given where a prediction reproduces what was observed (`predictions`); otherwise a neutral one, which says
what the loss depends on, what was excluded, and what to look at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.predictions import Reduction
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.trace import Part, Trace
from unisono.runtime.fault_names import FaultName

_EXACT = 1e-13  # whole numbers are equal, and sums of weights in fp64 closer than this


def diagnose_loss(pattern: Pattern) -> Diagnosis:
    """Of a loss that is the first to differ: rows and weights agree, and outputs where they were compared."""
    worst = pattern.worst
    from_outputs = pattern.agrees("outputs")  # then the forward pass is right, and its state and its draws with it
    if pattern.is_resumed and not from_outputs:
        return build_diagnosis(
            FaultName.STATE_NOT_CARRIED, f"rows and weights of step {worst.step} agree, its loss does not"
        )
    if not from_outputs and (why := pattern.root.unstable_forward):
        return build_diagnosis(FaultName.FORWARD_BY_CALL, why)
    if twice := _reduced_before(pattern):
        return replace(build_diagnosis(FaultName.SCALED_LOSS, twice), remedy=_OF_OWN_ROWS)
    if pattern.agrees("raw gradients"):
        if why := pattern.root.unstable_loss:
            return build_diagnosis(FaultName.LOSS_BY_CALL, why)
        if pattern.parts:
            return _diagnose_report(pattern)
    if pattern.failed("replicas") and not pattern.parts and (average := pattern.step.average_apart):
        detail = f"{average}, and their weights are; the loss, which differs, may read the average"
        return build_diagnosis(FaultName.EMA_DRIFT, detail)
    if pattern.failed("replicas") and not pattern.parts:
        return build_diagnosis(
            FaultName.REPLICA_DRIFT, "the loss differs, and replicas too: the weights of a rank changed"
        )
    uneven = _uneven_counts(pattern)  # a factor between other micro-batches may be that of their counts
    if not uneven and (number := _scaled_by(pattern)) is not None:
        if passes := pattern.explain_factor_by_passes(worst.mine / worst.reference):
            shared = pattern.shares_passes
            return build_diagnosis(FaultName.SCALED_LOSS if shared else FaultName.LOSS_BY_LAYOUT, passes)
        detail = f"{worst.mine:.6g} instead of {worst.reference:.6g}: by the number of processes, {number}"
        return build_diagnosis(FaultName.SCALED_LOSS, detail)
    if scaled := _scaled_terms(pattern):
        return build_diagnosis(FaultName.SCALED_LOSS, scaled)
    if pattern.root.reseeded and not pattern.parts:
        detail = (
            "a forward pass draws the same whatever it was seeded with: something in it seeds torch's generator anew "
            "(torch.manual_seed), so that what a row is given depends on its place in the micro-batch"
        )
        return build_diagnosis(FaultName.LOSS_BY_MICRO_BATCH, detail)
    if means := find_means(pattern):
        return build_diagnosis(FaultName.MEAN_OF_MEANS, means)
    crosses = pattern.mine.facts.crosses and not pattern.is_resumed  # of a resume, the uninterrupted run has all rows
    if crosses and (terms := _differing_terms(pattern)):
        detail = f"outputs agree, and so does what rows have alone; {terms} does not, and the loss crosses samples"
        return build_diagnosis(FaultName.CROSS_SAMPLE_LOSS, detail)
    if why := pattern.root.unstable_loss:
        return build_diagnosis(FaultName.LOSS_BY_CALL, why)
    if not pattern.parts and (why := pattern.root.collated):
        return build_diagnosis(FaultName.SAMPLE_BY_NEIGHBOURS, why)
    if not pattern.parts and (why := pattern.root.padding):
        return build_diagnosis(FaultName.PADDING_IN_LOSS, why)
    if uneven:
        return replace(build_diagnosis(FaultName.LOSS_BY_MICRO_BATCH, uneven), remedy=_COUNTS_ADD_UP)
    if kind := _diagnose_kind(pattern, "constant", "averaged", "statistic"):
        return kind
    if not from_outputs and (detail := pattern.other_draws):
        return build_diagnosis(FaultName.RANDOMNESS_BY_RANK, f"rows and weights agree, the loss does not; {detail}")
    if pattern.is_resumed:
        return build_diagnosis(
            FaultName.STATE_NOT_CARRIED, f"rows, weights and outputs of step {worst.step} agree, its loss does not"
        )
    return diagnose_neutrally(pattern)


_COUNTS_ADD_UP = "return counts that add up over rows, as whole numbers or in fp64"
_OF_OWN_ROWS = "return the sum over the rows of this micro-batch alone: sums are added up over ranks anyway"


def _reduced_before(pattern: Pattern) -> str:
    """In words, that every micro-batch has the sum over those which all ranks compute at the same time."""
    if not pattern.parts or pattern.world_size == 1 or not (names := list(_differing(pattern))):
        return ""
    of_rank: dict[int, list[tuple[Part, Part]]] = {}
    for mine, true in zip(pattern.step.parts, pattern.parts, strict=True):
        of_rank.setdefault(mine.rank, []).append((mine, true))
    for together in itertools.zip_longest(*of_rank.values()):
        pairs = [pair for pair in together if pair is not None]
        for name in names:
            whole = math.fsum(true.sums.get(name, math.nan) for _, true in pairs)
            if not all(
                predictions.is_equal(mine.sums.get(name, math.nan), whole, pattern.rounding) for mine, _ in pairs
            ):
                return ""
    shown = ", ".join(map(repr, names))
    return f"{shown} of every micro-batch is the sum over those of all ranks, and is added up over ranks once more"


_REFUSED = {
    FaultName.MEAN_OF_MEANS: "of the rows of other micro-batches it was refused as a mean",
    FaultName.LOSS_BY_MICRO_BATCH: "of the rows of other micro-batches it was refused as no sum",
    FaultName.NOT_FINITE: "of the rows of other micro-batches it is not finite, as a deviation of one row",
}


def explain_refusal(mine: Trace, tried: Trace) -> Diagnosis | None:
    """What a loss is that was refused of some rows, and not of those that were tried; None where the refusal says it.

    A mean is refused of any rows: what is refused of some alone is a statistic of them, or clamped, or the like. So is
    a term that is finite of the same rows in other company.
    """
    by_other_names = mine.facts.called == FaultName.LOSS_BY_MICRO_BATCH and "given twice" not in mine.facts.fault
    if by_other_names or mine.facts.called not in _REFUSED or not tried.facts.probed or tried.facts.fault:
        return None
    kinds = {kind: name for name, kind in tried.facts.additivity.items() if kind not in ("mean", "averaged")}
    refused = _REFUSED[FaultName(mine.facts.called)]
    of_mean = mine.facts.called != FaultName.NOT_FINITE
    for kind, (fault, said) in _KINDS.items():
        if kind in kinds and (of_mean or f"term '{kinds[kind]}'" in mine.facts.fault):
            return build_diagnosis(fault, f"'{kinds[kind]}' {said}; {refused}")
    if tried.facts.additivity or not of_mean:
        return None
    return build_diagnosis(FaultName.LOSS_BY_MICRO_BATCH, f"{refused}, and of those that were tried it was not")


def find_means(pattern: Pattern) -> str:
    """In words, the mean of means that reproduces what was observed; empty where none does.

    It has to reproduce the loss, where it differs and its sums and counts were recorded, and the gradient, where that
    of every micro-batch was. On one process with other micro-batches, it is the loss on some rows that says so.
    """
    if means := _own_means(pattern):
        return means
    ways, gradients = predictions.means(pattern.parts), pattern.part_gradients
    loss = _differing(pattern)
    if gradients is not None:
        observed, rounding = pattern.gradient, pattern.rounding
        right = (way for way in ways if predictions.reproduces(gradients.predict(way.weigh), observed, rounding))
        if (found := next(right, None)) is None:
            return ""
        shown = _shown_loss(pattern, found, loss)
        return f"{found.words} reproduces the gradient to rounding{shown}; {_counts(pattern.parts)}"
    if loss and (found := predictions.find_reduction(pattern.parts, loss, ways, pattern.rounding)):
        return f"{found.words} reproduces the loss to rounding; {_counts(pattern.parts)}"
    return _equal_weights(pattern)


def _shown_loss(pattern: Pattern, way: Reduction, loss: dict[str, float]) -> str:
    one = [way, *predictions.by_count_of_one(pattern.parts)]
    found = predictions.find_reduction(pattern.parts, loss, one, pattern.rounding)
    return "" if found is None else ", and the loss" if found is way else f"; the loss is {found.words}"


def _equal_weights(pattern: Pattern) -> str:
    """Whether local gradients, recorded before the reduction, were averaged although they have different weights."""
    local = [gradient for _, gradient in pattern.local_gradients]
    ours = predictions.fit_weights(pattern.gradient, local, pattern.fitting)
    theirs = predictions.fit_weights(pattern.true_gradient, local, pattern.fitting)
    if ours is None or theirs is None or min(theirs) <= 0:
        return ""
    ours_equal, theirs_equal = (max(each) - min(each) <= 1e-6 * max(each) for each in (ours, theirs))
    if not ours_equal or theirs_equal or not predictions.is_equal(sum(ours), sum(theirs), 1e-6):
        return ""
    shown = ", ".join(f"{weight / sum(theirs):.3g}" for weight in theirs[:6])
    return (
        f"the gradient is the plain mean of {len(local)} local ones, and that of one process the mean of the same with "
        f"weights {shown}{', …' if len(theirs) > 6 else ''}, both to rounding"
    )


def _own_means(pattern: Pattern) -> str:
    """Whether a term that differs divides by itself, as the loss on some rows of a micro-batch showed."""
    if pattern.parts:  # of the same micro-batches such a term is the same
        return ""
    kinds = {pattern.root.additivity.get(name, "") for name in _differing(pattern)}
    if kinds != {"mean"}:
        return ""
    return (
        "on any rows of a micro-batch the loss is the mean of what these rows have alone, with weights of its own, and "
        "counts() does not count them"
    )


# By what the loss on some rows showed of a term (`RunFacts.additivity`): the fault, and what is said of the term.
_KINDS = {
    "constant": (
        FaultName.TERM_PER_MICRO_BATCH,
        "of any rows is the sum of what each of them adds, and once more the same number",
    ),
    "averaged": (  # also where it shall be added once, whatever the rows
        FaultName.LOSS_BY_MICRO_BATCH,
        "of any rows is not the sum of what these have alone, but the mean, and is divided by their count once more: "
        "return the sum over rows",
    ),
    "statistic": (
        FaultName.STATISTIC_OF_PARTS,
        "of several rows is neither the sum nor a mean of what they have alone, and the same each time",
    ),
    "places": (
        FaultName.LOSS_BY_MICRO_BATCH,
        "of the same rows in another order is another: rows count by their places in a micro-batch, by the rows next "
        "to them, by weights, or by noise from a key or seed that is always the same",
    ),
    "number": (
        FaultName.LOSS_BY_MICRO_BATCH,
        "of some of the first rows is the sum of what they have alone, times what their number decides",
    ),
    "largest": (
        FaultName.LOSS_BY_MICRO_BATCH,
        "of some of the first rows adds up where a certain row is among them, and not otherwise: are they cut or "
        "padded to the longest without a mask, divided by the largest, or is what they come to clamped?",
    ),
}


def _diagnose_kind(pattern: Pattern, *kinds: str) -> Diagnosis | None:
    """Of terms that differ where other rows are together, if the loss on some rows showed one of these kinds of all."""
    names = list(_differing(pattern))
    found = {pattern.root.additivity.get(name, "") for name in names}
    if pattern.parts or len(found) != 1 or not found <= {*kinds}:
        return None
    (kind,) = found
    fault, said = _KINDS[kind]
    detail = f"{', '.join(map(repr, names))} {said}"
    if kind in ("statistic", "number") and (name := pattern.root.by_number):
        detail += f"; what outputs() computes, {name}, is another for the same rows where more are in the batch"
        fault = FaultName.LOSS_BY_MICRO_BATCH  # which may be right in what it makes of that
    return build_diagnosis(fault, detail)


def diagnose_later(pattern: Pattern) -> Diagnosis:
    """Of terms that are sums over rows in all steps of the runs, and not where passes are told of a later one."""
    name, kind = next(iter(pattern.root.later_terms.items()))
    fault, said = _KINDS.get(kind, (FaultName.MEAN_OF_MEANS, "of any rows is the mean of what these have alone"))
    return build_diagnosis(fault, f"in step {pattern.root.later_step}, and not in those compared, '{name}' {said}")


def _scaled_by(pattern: Pattern) -> int | None:
    """The number of processes, if every term, and the loss, is off by it."""
    if pattern.worst.mine is None or not pattern.worst.reference or pattern.world_size == 1:
        return None
    ours, theirs = pattern.step.terms, pattern.reference_step.terms
    pairs = [(pattern.worst.mine, pattern.worst.reference), *((ours.get(n, math.nan), v) for n, v in theirs.items())]
    ratios = [a / b for a, b in pairs if b]
    same = all(predictions.is_equal(ratio, ratios[0], pattern.rounding) for ratio in ratios)
    return predictions.find_number(ratios[0], [pattern.world_size], pattern.rounding) if same else None


def _scaled_terms(pattern: Pattern) -> str:
    """In words, the terms of which every micro-batch has N times, or an N-th of, what it has on one process."""
    names = list(_differing(pattern))
    pairs = [(mine.sums, true.sums) for mine, true in zip(pattern.step.parts, pattern.parts, strict=False)]
    ratios = [a.get(name, math.nan) / b[name] for name in names for a, b in pairs if b.get(name)]
    if not ratios or pattern.world_size == 1 or len(names) == len(pattern.reference_step.terms):
        return ""
    if not all(predictions.is_equal(ratio, ratios[0], pattern.rounding) for ratio in ratios):
        return ""
    if (number := predictions.find_number(ratios[0], [pattern.world_size], pattern.rounding)) is None:
        return ""
    shown = ", ".join(f"'{name}'" for name in names)
    return (
        f"{shown} of every micro-batch is {ratios[0]:.6g} times what the same rows have on one process: by the number "
        f"of processes, {number}; all other terms agree"
    )


def _uneven_counts(pattern: Pattern) -> str:
    """In words, how counts of the same rows depend on which of them are together."""
    sides = pattern.step.parts, pattern.reference_step.parts
    if pattern.parts or not all(sides):
        return ""
    for name in _differing(pattern):
        mine, true = (math.fsum(part.counts.get(name, math.nan) for part in side) for side in sides)
        if not predictions.is_equal(mine, true, _EXACT):
            off = abs(mine - true) / max(abs(mine), abs(true))
            how = ": they are added up in single precision" if off < 1e-6 else ""
            said = f"counts() of '{name}' come to {mine:.12g} of all rows, and to {true:.12g} where others are together"
            return said + how
    return ""


def _differing(pattern: Pattern) -> dict[str, float]:
    """Terms of the loss that are not those of the reference, as this run reported them."""
    theirs = pattern.reference_step.terms
    return {
        name: value
        for name, value in pattern.step.terms.items()
        if not predictions.is_equal(value, theirs.get(name, math.inf), pattern.rounding)
    }


def _differing_terms(pattern: Pattern) -> str:
    """The terms that differ, if there is only one, or another agrees: a wrong mean would not spare any."""
    other, theirs = _differing(pattern), pattern.reference_step.terms
    return ", ".join(f"'{name}'" for name in other) if len(other) < max(2, len(theirs)) else ""


def _counts(parts: list[Part]) -> str:
    terms = [name for name in parts[0].counts if not name.startswith("metric/")]
    shown = {name: [part.counts[name] for part in parts] for name in terms}
    uneven = next((name for name in terms if len(set(shown[name])) > 1), terms[0])
    return f"counts of '{uneven}' by micro-batch: {', '.join(f'{n:g}' for n in shown[uneven][:8])}"


# where no prediction holds --------------------------------------------------------------------------------------------


def diagnose_neutrally(pattern: Pattern) -> Diagnosis:
    """What is known of a loss that no prediction reproduces."""
    excluded = "no mean of means, no factor and no missing part of the recorded sums gives this loss"
    if pattern.number and pattern.abstains("parameters"):
        detail = (
            "the steps before agree as far as they were seen, and parameters were not compared after them: look at "
            "them on every rank, and on one process, before this step"
        )
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    if not pattern.step.parts:
        detail = "rows and weights agree, the loss does not; what each micro-batch adds to it was not recorded"
        if pattern.local_gradients:
            detail += ", and gradients do not say it: "
            detail += (
                "the steps before agree, so look first at what the loss keeps from step to step"
                if pattern.number
                else "look first at what a rank takes of its own rows (counts, statistics), and at terms that all add"
            )
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    if not pattern.parts and (unsummed := find_unsummed(pattern.root.unsummed, "total")):
        return replace(unsummed, remedy="return sums over rows from totals()")
    # A set of rows may have been given what another had left, where the task keeps something.
    if not pattern.root.kept_by_task and (kind := _diagnose_kind(pattern, "places", "number", "largest")):
        return kind
    if not pattern.parts and pattern.world_size > 1:
        detail = "rows and weights agree, and other rows are together, on other processes; no loss of rows says why"
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    if not pattern.parts:
        return build_diagnosis(
            FaultName.LOSS_BY_MICRO_BATCH,
            "rows and weights agree, and other rows are together; no loss of some of the first rows says why",
        )
    wrong = _wrong_parts(pattern)
    if not wrong:
        return build_diagnosis(
            FaultName.LOSS_BY_LAYOUT, f"every micro-batch has the sums that it has on one process; {excluded}"
        )
    ranks = sorted({part.rank for part in wrong})
    if len(ranks) < pattern.world_size and pattern.failed("replicas"):
        return build_diagnosis(FaultName.REPLICA_DRIFT, f"the loss differs on ranks {ranks}, and so do replicas")
    where = f"micro-batches {[p.number for p in wrong][:8]}, on ranks {ranks},"
    if len(ranks) < pattern.world_size:
        agree = sorted({part.rank for part in pattern.parts} - {*ranks})
        return build_diagnosis(
            FaultName.LOSS_BY_PROCESS,
            f"{where} have other sums or counts than the same rows have on one process; ranks {agree} agree",
        )
    return build_diagnosis(
        FaultName.LOSS_BY_LAYOUT,
        f"{where} have other sums or counts than the same rows have on one process; {excluded}",
    )


def _wrong_parts(pattern: Pattern) -> list[Part]:
    """Micro-batches whose own sums or counts are not those that the reference has for the same rows."""
    names = [*pattern.step.terms]
    return [
        mine
        for mine, true in zip(pattern.step.parts, pattern.parts, strict=True)
        if not all(
            predictions.is_equal(a.get(name, math.nan), b.get(name, math.nan), pattern.rounding)
            for name in names
            for a, b in ((mine.sums, true.sums), (mine.counts, true.counts))
        )
    ]


# what is only reported ------------------------------------------------------------------------------------------------


def _diagnose_report(pattern: Pattern) -> Diagnosis:
    if wrong := _wrong_parts(pattern):
        detail = (
            f"the gradients agree, and micro-batches {[p.number for p in wrong][:8]} have other sums or counts than "
            "the same rows have on one process: what differs has no gradient"
        )
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    observed = _differing(pattern)
    ways = [*predictions.of_some(pattern.parts), *predictions.means(pattern.parts)]
    if found := predictions.find_reduction(pattern.parts, observed, ways, pattern.rounding):
        return build_diagnosis(FaultName.LOSS_NOT_SUMMED, f"the gradients agree; the loss is {found.words}")
    return build_diagnosis(
        FaultName.REPORTED_LOSS_BY_LAYOUT, "the gradients agree, and so does the training; the report does not"
    )


def find_unsummed(unsummed: Mapping[str, Sequence[str]], kind: str, name: str = "") -> Diagnosis | None:
    """What a metric, a term, or any of the totals, is that is no sum over rows; None if it is one, or nobody looked."""
    found: dict[str, list[str]] = {}
    for number, (how, said) in unsummed.items():
        rest = number.partition("/")[2]
        part = next((one for one in ("sum", "count") if rest.endswith(f" {one}")), "")
        label = rest.removesuffix(f" {part}")
        if number.startswith(f"{kind}/") and name in ("", label):
            found.setdefault(how, []).append(f"{f'the {part}' if part else 'totals()'} of '{label}' {said}")
    for how, fault in _UNSUMMED.items():
        if how in found:
            return build_diagnosis(fault, "; ".join(found[how]))
    return None


_UNSUMMED = {
    "statistic": FaultName.STATISTIC_OF_PARTS,
    "constant": FaultName.TERM_PER_MICRO_BATCH,
    "places": FaultName.LOSS_BY_MICRO_BATCH,
}
