"""What must hold of a single run, because two runs can agree on nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.recording.gradient_sample import norm_of
from unisono.proof.recording.trace import RunFacts, Trace
from unisono.runtime.text import join_names

_ROUNDING = 1e-7  # a gradient so much smaller than all of them together may be rounding, and move nothing
# What has to be the same, for the same arguments.
REPEATED = (
    "the model is built alike",
    "samples repeat",
    "the forward pass repeats",
    "the loss repeats",
    "the gradient repeats",
)
NEIGHBOURS = "rows are computed by themselves"
DOCUMENTS = "documents of a packed row are computed by themselves"
PADDING = "padding changes nothing"
COLLATED = "rows are collated by themselves"
INITIALISED = "parameters are initialised"
BY_NEIGHBOURS = (NEIGHBOURS, DOCUMENTS, PADDING, COLLATED)
SWITCHED = "an evaluation is computed in evaluation mode"
EQUAL_BUFFERS = "buffers are equal on all ranks"
GRADIENT = "there is a gradient"
ADDED = "the loss is a sum of rows in later steps"


def check_invariants(trace: Trace) -> list[ComparedQuantity]:
    """Every check of a run by itself."""
    facts = trace.facts
    steps = [step for step in facts.steps if step.computed]
    losses = [step.loss for step in steps if step.loss is not None]
    unstable = (
        facts.unstable_build,
        facts.unstable_samples,
        facts.unstable_forward,
        facts.unstable_loss,
        facts.unstable_gradient,
    )
    result = [_build_invariant(name, False, why) for name, why in zip(REPEATED, unstable, strict=True) if why]
    if facts.later_terms:
        shown = f"{join_names(map(repr, facts.later_terms))} in step {facts.later_step}"
        result.append(_build_invariant(ADDED, False, shown))
    if facts.uninitialised:
        result.append(_build_invariant(INITIALISED, False, join_names(facts.uninitialised, 3)))
    if len(losses) > 1:  # one step, of a run that another began, has no other loss to differ from
        result.append(_check_loss(facts, losses))
    result += _check_gradient(facts)
    if any(step.clean is not None for step in steps):
        clean = all(step.clean is not False for step in steps)
        result.append(_build_invariant("steps begin without gradients", clean, "gradients of the step before"))
    if facts.evaluation_again:
        shown = f"{facts.evaluation[:1]} and then {facts.evaluation_again[:1]}"
        result.append(_build_invariant("evaluation repeats", facts.evaluation == facts.evaluation_again, shown))
    if facts.evaluation_left is not None:
        left = ", ".join(filter(None, [*facts.evaluation_left, facts.evaluation_remembered]))
        result.append(_build_invariant("evaluation leaves things as they were", not left, left))
    if facts.callbacks:
        why = f"a proof does not call {join_names(facts.callbacks)}; a callback must not change what a run computes"
        result.append(ComparedQuantity("callbacks change nothing", "ABSTAIN", why=why))
    if facts.evaluation_draws:
        why = f"{facts.evaluation_draws}; if it means to, set draws_in_evaluation = True in the task"
        result.append(ComparedQuantity("evaluation draws nothing", "ABSTAIN", why=why))
    if facts.evaluation_switched:
        result.append(_build_invariant(SWITCHED, False, facts.evaluation_switched))
    if facts.mixed:
        result.append(_build_invariant("rows keep their places", False, facts.mixed))
    result += _check_neighbours(facts)
    if any(len(step.by_rank) > 1 and any(step.by_rank) for step in steps):
        shared = next((step for step in steps if step.has_equal_ranks), None)
        shown = f"{shared.by_rank}" if shared else ""
        result.append(_build_invariant("ranks computed different rows", shared is None, shown))
    return [*result, *_check_movement(trace)]


def _check_neighbours(facts: RunFacts) -> list[ComparedQuantity]:
    """A row that sees others is another computation on every layout, unless that is what the user means."""
    if "neighbours" in facts.accepted:
        return []
    found = facts.dependent, facts.packed, facts.padding, facts.collated
    result = [_build_invariant(name, False, why) for name, why in zip(BY_NEIGHBOURS, found, strict=True) if why]
    if facts.normalised:
        why = (
            f"{facts.normalised} normalises each micro-batch by its own statistics, so that 2 processes with 16 rows "
            "each are another computation than 1 with 32; set layout.sync_batch_norm=true, or declare that it is "
            "meant: accept=[neighbours]"
        )
        result.append(ComparedQuantity(NEIGHBOURS, "ABSTAIN", why=why))
    return result


def _check_loss(facts: RunFacts, losses: Sequence[float]) -> ComparedQuantity:
    """A surrogate whose gradient alone is meant (a ratio of probabilities) may have the same value in every step."""
    if len(set(losses)) == 1 and facts.optimizer and all(step.grad_norm for step in facts.steps):
        why = f"the loss is {losses[0]:.6g} in every step, and has a gradient; layouts cannot differ in its value"
        return ComparedQuantity("the loss moved", "ABSTAIN", why=why)
    return _build_invariant("the loss moved", len(set(losses)) > 1, f"losses {losses}")


def _check_gradient(facts: RunFacts) -> list[ComparedQuantity]:
    """A step without a gradient may be meant: rows without a loss, or an update that is skipped by zeros."""
    norms = {n: step.grad_norm for n, step in enumerate(facts.steps, 1) if step.computed and step.grad_norm is not None}
    without = [n for n, norm in norms.items() if norm == 0]
    if without and len(without) < len(norms):
        shown = f"step{'s' * (len(without) > 1)} {join_names([str(n) for n in without])}"
        return [ComparedQuantity(GRADIENT, "ABSTAIN", why=f"its norm is 0 in {shown}; layouts cannot differ there")]
    return [_build_invariant(GRADIENT, not without, "its norm is 0 in every step")] if norms else []


def _check_movement(trace: Trace) -> Iterator[ComparedQuantity]:
    facts = trace.facts
    begun = trace.tensors("initial parameters")
    after = [trace.tensors("parameters", step) for step in range(len(facts.steps))]
    if not begun or not after or not after[-1]:
        return
    with_gradient: set[str] = set()
    for step in range(len(facts.steps)):
        gradients = trace.tensors("raw gradients", step)
        whole = norm_of(gradients.values())
        with_gradient |= {n for n, value in gradients.items() if norm_of([value]) > _ROUNDING * whole}
    silent = [name for name in facts.trainable if name not in with_gradient]
    name = "every trainable parameter got a gradient"
    if silent:
        yield ComparedQuantity(
            name, "ABSTAIN", why=f"no gradient in these steps: {join_names(silent)}; layouts cannot differ there"
        )
    else:
        yield ComparedQuantity(name, "PASS")
    # in any step: updates of a fixed size (by the sign) may end where they began
    moved = {n for n in begun if any(n in each and not np.array_equal(begun[n], each[n]) for each in after)}
    still = [n for n in facts.trainable if n in with_gradient and n in begun and n not in moved]
    if (meant := [n for n in still if n in facts.untrained]) and meant == still:
        why = f"no optimizer changes {join_names(meant)}; if that is meant, they need no gradient (requires_grad=False)"
        yield ComparedQuantity("trained parameters moved", "ABSTAIN", why=why)
    elif still and not any(rate for step in facts.steps for rates in step.lr for rate in rates):
        why = "the learning rate is 0 in all of these steps (a warm-up?); give more of them (steps=…)"
        yield ComparedQuantity("trained parameters moved", "ABSTAIN", why=why)
    else:
        yield _build_invariant("trained parameters moved", not still, f"did not: {join_names(still)}")
    thawed = [n for n in facts.frozen if n in moved]
    yield _build_invariant("frozen parameters did not move", not thawed, f"did: {join_names(thawed)}")


def _build_invariant(name: str, holds: bool, otherwise: str) -> ComparedQuantity:
    if holds:
        return ComparedQuantity(name, "PASS")
    return ComparedQuantity(name, "FAIL", Difference(math.inf, name=otherwise))
