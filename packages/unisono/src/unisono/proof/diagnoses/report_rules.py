"""What it means that a metric or an evaluation is the first to differ: everything that is trained agrees."""

from __future__ import annotations

import math
from dataclasses import replace

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.loss_rules import find_unsummed
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.runtime.fault_names import FaultName

_SUMS_AND_COUNTS = "return its sum and its count over rows; what is neither, compute once from all rows (predictions)"


def diagnose_metrics(pattern: Pattern) -> Diagnosis:
    """Of metrics, where everything before them agrees."""
    ours, theirs = pattern.step.metrics, pattern.reference_step.metrics
    if any(values != ours[0] for values in ours):
        return build_diagnosis(FaultName.METRIC_NOT_SUMMED, "ranks report different values of it")
    if ours and theirs and (words := _find_reduction(pattern)):
        return build_diagnosis(FaultName.METRIC_NOT_SUMMED, f"'{pattern.worst.name}' is {words}")
    if not pattern.parts and (unsummed := find_unsummed(pattern.root.unsummed, "metric", pattern.worst.name)):
        if unsummed.is_neutral:
            unsummed = build_diagnosis(FaultName.METRIC_BY_LAYOUT, unsummed.because)
        return replace(unsummed, remedy=_SUMS_AND_COUNTS)
    detail = f"loss, gradients and weights agree, and no sum of a rank explains '{pattern.worst.name}'"
    if ranks := _find_other_ranks(pattern):
        detail += f"; of the same rows, it has other sums or counts on ranks {ranks} than on one process"
    return build_diagnosis(FaultName.METRIC_BY_LAYOUT, detail)


def _find_reduction(pattern: Pattern) -> str:
    """In words, the wrong way of reducing that reproduces what differs, in this step and in the later ones.

    Counts are small numbers, which another way may come to by chance in one step.
    """
    theirs = pattern.reference_step.metrics[0]
    names = [
        name
        for name, value in pattern.step.metrics[0].items()
        if not predictions.is_equal(value, theirs.get(name, math.inf), pattern.rounding)
    ]
    failed = (c.worst.step for c in pattern.compared if c.mark == "FAIL" and c.quantity != "metrics")
    last = min(filter(None, failed), default=len(pattern.mine.facts.steps))  # what differs later has other sums
    words: list[str] | None = None
    for number in range(pattern.worst.step, last + 1):
        one = replace(pattern, first=replace(pattern.first, worst=replace(pattern.worst, step=number)))
        if one.parts and one.step.metrics:
            observed = {f"metric/{name}": one.step.metrics[0].get(name, math.nan) for name in names}
            ways = [*predictions.of_some(one.parts), *predictions.means(one.parts)]
            right = (way for way in ways if predictions.find_reduction(one.parts, observed, [way], pattern.rounding))
            found = [way.words for way in right]
            words = found if words is None else [one for one in words if one in found]
    return words[0] if words else ""


def _find_other_ranks(pattern: Pattern) -> list[int]:
    """The ranks on which the metric has other sums or counts, of the same rows, than on one process."""
    name = f"metric/{pattern.worst.name}"
    return sorted(
        {
            mine.rank
            for mine, true in zip(pattern.step.parts, pattern.parts, strict=False)
            for a, b in ((mine.sums, true.sums), (mine.counts, true.counts))
            if not predictions.is_equal(a.get(name, math.nan), b.get(name, math.nan), pattern.rounding)
        }
    )


def diagnose_repeated_evaluation(pattern: Pattern) -> Diagnosis:
    """Of an evaluation that another one of the same weights and rows does not equal."""
    facts = pattern.root
    why = facts.evaluation_draws or facts.unstable_evaluation
    because = f"made twice of the same weights and rows, it gives two results; {why}".removesuffix("; ")
    drawn = facts.evaluation_draws or why.startswith("it draws from ")
    return build_diagnosis(FaultName.RANDOM_EVALUATION if drawn else FaultName.EVALUATION_BY_CALL, because)


def diagnose_evaluation(pattern: Pattern) -> Diagnosis:
    """Of an evaluation, where the training agrees."""
    if pattern.root.unstable_evaluation:
        return diagnose_repeated_evaluation(pattern)
    ours = pattern.mine.facts.evaluation
    if any(values != ours[0] for values in ours):
        return build_diagnosis(FaultName.METRIC_NOT_SUMMED, "ranks report different values of it")
    if why := pattern.root.unstable_forward:
        return build_diagnosis(FaultName.FORWARD_BY_CALL, why)
    theirs = pattern.reference.facts.held_out
    if any(theirs.get(rows, digest) != digest for rows, digest in pattern.mine.facts.held_out.items()):
        detail = "the held-out rows came out as other samples than on one process"
        return build_diagnosis(FaultName.EVALUATION_BY_LAYOUT, detail)
    if why := pattern.root.evaluation_draws:
        return build_diagnosis(FaultName.RANDOM_EVALUATION, why)
    if unsummed := _find_unsummed_evaluated(pattern):
        return unsummed
    rows = ", and so do the held-out samples of every rank" if theirs else "; which rows were evaluated is not known"
    return build_diagnosis(FaultName.EVALUATION_BY_LAYOUT, f"the training agrees{rows}")


def _find_unsummed_evaluated(pattern: Pattern) -> Diagnosis | None:
    """What an evaluated number is that is no sum over rows, where other held-out rows are together."""
    if pattern.mine.facts.held_out.keys() == pattern.reference.facts.held_out.keys():
        return None
    name, numbers = pattern.worst.name.removeprefix("ema/"), pattern.root.unsummed_evaluated
    of_loss = name == "loss" or name.startswith("loss/")
    found = find_unsummed(numbers, *(("loss", name.removeprefix("loss").lstrip("/")) if of_loss else ("metric", name)))
    if found is None:
        return None
    if found.is_neutral:
        found = build_diagnosis(FaultName.EVALUATION_BY_LAYOUT, found.because)
    because = f"in the evaluation {found.because}, and other held-out rows are together"
    return replace(found, because=because, remedy=_SUMS_AND_COUNTS)
