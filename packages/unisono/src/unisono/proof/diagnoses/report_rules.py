"""What it means that a metric or an evaluation is the first to differ: everything that is trained agrees."""

from __future__ import annotations

import math
from dataclasses import replace

from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.loss_rules import find_unsummed
from unisono.proof.diagnoses.pattern import Pattern
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.runtime.fault_names import FaultName


def diagnose_metrics(pattern: Pattern) -> Diagnosis:
    """Of metrics, where everything before them agrees."""
    ours, theirs = pattern.step.metrics, pattern.reference_step.metrics
    if any(values != ours[0] for values in ours):
        return build_diagnosis(FaultName.METRIC_NOT_SUMMED, "ranks report different values of it")
    if ours and theirs:
        observed = {
            f"metric/{name}": value
            for name, value in ours[0].items()
            if not predictions.is_equal(value, theirs[0].get(name, math.inf), pattern.rounding)
        }
        ways = [*predictions.of_some(pattern.parts), *predictions.means(pattern.parts)]
        if found := predictions.find_reduction(pattern.parts, observed, ways, pattern.rounding):
            return build_diagnosis(FaultName.METRIC_NOT_SUMMED, f"'{pattern.worst.name}' is {found.words}")
    if not pattern.parts and (why := find_unsummed(pattern, "metric", pattern.worst.name)):
        remedy = "return its sum and its count over rows; what is neither, compute once from all rows (predictions)"
        return replace(build_diagnosis(FaultName.STATISTIC_OF_PARTS, why), remedy=remedy)
    return build_diagnosis(
        FaultName.METRIC_BY_LAYOUT,
        f"loss, gradients and weights agree, and no sum of a rank explains '{pattern.worst.name}'",
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
    rows = ", and so do the held-out samples of every rank" if theirs else "; which rows were evaluated is not known"
    return build_diagnosis(FaultName.EVALUATION_BY_LAYOUT, f"the training agrees{rows}")
