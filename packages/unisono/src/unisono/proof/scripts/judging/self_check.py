"""What one run of several processes shows by itself: what every rank had before a reduction against what came of it.

The gradient of an update is looked for as a weighted sum of those of the ranks (`gradient_sums`). With the same weights
the losses of the ranks are the function that was minimised.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.invariants import EQUAL_BUFFERS
from unisono.proof.recording.gradient_sample import add_gradients, norm_of
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import AVERAGE, Array
from unisono.proof.scripts.judging.gradient_sums import (
    ROUNDING,
    describe_changed,
    explain_reduction,
    find_differing,
    find_infinite,
    find_unequal,
    is_left_alone,
)
from unisono.proof.scripts.judging.script_remedies import REDUCE_THE_METRIC, SHARD_THE_ROOT, STEP_LATER
from unisono.proof.scripts.recording.rank_facts import (
    RankFacts,
    ScriptTrace,
    buffers_moment,
    find_conclusive_steps,
    have_same_inputs,
    reduced_moment,
)
from unisono.runtime.fault_names import FaultName
from unisono.runtime.text import join_names

BEGIN = "ranks begin with equal parameters and buffers"
EQUAL = "gradients are equal on all ranks"
REDUCED = "gradients are a weighted sum of those of the ranks"
CLIPPED = "gradients are equal on all ranks when they are clipped"
RATES = "learning rates are equal on all ranks"
WATCHED = "ReduceLROnPlateau is given equal numbers on all ranks"
BUFFERS = EQUAL_BUFFERS
DIFFERENT = "ranks were given different rows"
MODES = "ranks compute in the same mode"
APART = "updates of equal gradients begin with equal parameters"
NAMES = {
    BEGIN: FaultName.INITIALISATION_BY_RANK,
    EQUAL: FaultName.NOT_SYNCHRONISED,
    CLIPPED: FaultName.CLIPPED_TOO_EARLY,
    RATES: FaultName.RATE_BY_RANK,
    WATCHED: FaultName.RATE_BY_RANK,
    BUFFERS: FaultName.LOCAL_BUFFERS,
    DIFFERENT: FaultName.EQUAL_ROWS,
    MODES: FaultName.EVALUATION_CHANGES_TRAINING,
    APART: FaultName.REPLICA_DRIFT,
}
INSIDE = (
    "gradients differ between ranks before the optimizer's step, and parameters agree after it, so it reduces them "
    "inside, where they cannot be seen"
)
OWN_STATE = (
    "gradients and the optimizer's state differ between ranks, and parameters agree after the update, so the optimizer "
    "reduces something inside of its step (gradients, signs, updates), which cannot be seen"
)
TOGETHER = (
    "gradients differ between ranks, and so do parameters after the update, but not before the next one: the script "
    "brings them together by itself (averages them, sends those of one rank), which cannot be seen"
)
SENT = (
    "after an update of equal gradients, parameters differ between ranks, but not before the next one: the script "
    "sends them to other ranks by itself (each updates a part of them), which cannot be seen"
)
_DROPPED = 1e-9  # of the largest weight: a gradient that is left out has none
_NEGLIGIBLE = 1e-3  # of all gradients together, times rounding: what a gradient that is 0 may come to


@dataclass(frozen=True)
class SelfCheck:
    """What was found of one run.

    Attributes:
        found: check by check.
        losses: of every step, the function whose gradient was used; None where that is not known.
        averages: of every step, the mean of the ranks' own losses, weighted by their rows.
        world_size: processes of the run.
        reduction: in words, as of the first step; empty where it is not known.
        factor: the weight of rank 0 in it, then.
        dropped: by step, from 0, the ranks whose gradients are not in the update.
        failed: the first check that did.
        diagnosis: of it.
        inside: why a reduction was not seen, of gradients or of parameters; empty if it was.
    """

    found: list[ComparedQuantity]
    losses: list[float | None]
    averages: list[float | None]
    world_size: int
    reduction: str
    factor: float = 0.0
    failed: ComparedQuantity | None = None
    diagnosis: Diagnosis | None = None
    inside: str = ""
    dropped: Mapping[int, list[int]] = field(default_factory=dict)


class _Step:
    """A step of a run, from 0, with its gradients."""

    def __init__(self, trace: ScriptTrace, number: int) -> None:
        self.trace, self.number = trace, number
        self.facts, self.seen = trace.facts.steps[number], trace.ranks[number]
        ranks = range(len(self.seen))
        self.passes = [read_local_gradients(trace, rank, number) for rank in ranks]
        self.reduced = [trace.tensors(reduced_moment(rank), number) for rank in ranks]
        self.made = explain_reduction([add_gradients(each) for each in self.passes], self.reduced[0], trace.precision)
        self.unequal = find_unequal(self.reduced, trace.precision)  # between ranks

    def tensors(self, moment: str) -> dict[str, Array]:
        return self.trace.tensors(moment, self.number)

    @cached_property
    def sharded(self) -> set[str]:
        """Parameters of whose gradient every rank has a piece."""
        return {*self.tensors("raw gradients")}.difference(*self.reduced)

    @cached_property
    def all_unequal(self) -> bool:
        """Whether no gradient is equal, but for those that are rounding everywhere (a bias before a normalisation)."""
        whole = norm_of(value for value in self.reduced[0].values() if np.isfinite(value).all())
        limit = ROUNDING[self.trace.precision] * _NEGLIGIBLE * whole
        large = {n for rank in self.reduced for n, value in rank.items() if not np.linalg.norm(value) <= limit}
        return {*self.unequal} >= large | self.sharded

    @cached_property
    def dropped(self) -> list[int]:
        """The ranks whose backward passes made a gradient that is not in the update, and is no rounding."""
        weights = self.made.weights
        if weights is None:
            return []
        sizes = [norm_of(add_gradients(each).values()) for each in self.passes]
        least = ROUNDING[self.trace.precision] * max(*sizes, 0.0)
        largest = max(map(abs, weights))
        return [n for n, weight in enumerate(weights) if sizes[n] > least and abs(weight) <= _DROPPED * largest]

    @property
    def loss(self) -> float | None:
        """The function whose gradient was used: what the ranks called `backward` on, in the same weighted sum."""
        weights = self.made.weights
        if weights is None or self.unequal or self.facts.clean is False or not all(rank.losses for rank in self.seen):
            return None
        if self.dropped:  # of which nothing was minimised, although it has a loss
            return None
        return sum(weight * sum(rank.losses) for weight, rank in zip(weights, self.seen, strict=True))

    @property
    def average(self) -> float | None:
        """The mean over ranks of what each called `backward` on, by their rows; alike where these are unknown."""
        if not all(rank.losses for rank in self.seen):
            return None
        inputs = [len(rank.inputs) for rank in self.seen]
        counts = [[len(rows) for rows in self.facts.by_rank], inputs, [1] * len(inputs)]
        rows = next(each for each in counts if all(each))
        return sum(count * sum(rank.losses) for count, rank in zip(rows, self.seen, strict=True)) / sum(rows)


_Failure = tuple[ComparedQuantity, Diagnosis]


def _fail(check: str, step: int, what: str, fault: FaultName | None = None, remedy: str = "") -> _Failure:
    """A check that fails in a step, from 0, and what that is called, if not as usual."""
    likely = build_diagnosis(fault or NAMES[check], f"step {step + 1}: {what}")
    failed = ComparedQuantity(check, "FAIL", Difference(math.inf, step + 1, what))
    return failed, replace(likely, remedy=remedy) if remedy else likely


def check_run(trace: ScriptTrace) -> SelfCheck:
    """Check a run against itself; on one process only its losses are told."""
    steps = [_Step(trace, number) for number in range(len(trace.ranks))]
    seen = [rank for step in steps for rank in step.seen]
    losses, averages, size = [step.loss for step in steps], [step.average for step in steps], len(steps[0].seen)
    made = steps[0].made
    factor = made.weights[0] if made.weights else 0.0
    dropped = {step.number: step.dropped for step in steps}
    if size == 1:
        return SelfCheck([], losses, averages, 1, str(made), factor, dropped=dropped)
    parted = any(rank.parted for rank in seen) or computes_in_parts(trace)
    failures, inside = _follow_gradients(steps, parted)
    for check, describe in _BY_STEP.items():
        if first := next(((step.number, message) for step in steps if (message := describe(step))), None):
            failures[check] = _fail(check, *first, remedy=REDUCE_THE_METRIC if check == WATCHED else "")
    left = {}  # what is neither right nor wrong
    conclusive = [] if parted else find_conclusive_steps(trace.ranks)
    alike = [step for step in conclusive if have_same_inputs(trace.ranks[step])]
    if alike and alike == conclusive:
        message = f"all ranks computed the same {len(trace.ranks[alike[0]][0].inputs)} inputs"
        failures[DIFFERENT] = _fail(DIFFERENT, alike[0], message)
    elif alike:
        numbers = join_names([f"{step + 1}" for step in alike], 3)
        left[DIFFERENT] = (
            f"all ranks were given the same inputs in steps {numbers}, and not in others (a search for a rate?)"
        )
    if inside not in ("", SENT):
        left[EQUAL] = inside
    if unknown := _explain_unknown(steps):
        left[REDUCED] = unknown
    reduces = not {EQUAL, CLIPPED} & {*failures, *left}
    checks = {  # whether there is anything to check
        BEGIN: True,
        EQUAL: True,
        REDUCED: reduces,
        RATES: True,
        WATCHED: any(rank.watched for rank in seen),
        CLIPPED: any(step.tensors("clipped gradients") for step in steps),
        BUFFERS: any(rank.buffers for rank in seen),
        DIFFERENT: any(rank.inputs for rank in seen) and not parted,
        MODES: MODES in failures,
        APART: APART in failures,
    }
    found = [
        failures[check][0]
        if check in failures
        else ComparedQuantity(check, "ABSTAIN" if check in left else "PASS", why=left.get(check, ""))
        for check, there in checks.items()
        if there
    ]
    failed = min((c for c in found if c.mark == "FAIL"), key=lambda c: c.worst.step, default=None)
    diagnosis = failures[failed.quantity][1] if failed else None
    reduction = str(made) if reduces and not unknown else ""
    inside = "" if EQUAL in failures else inside
    return SelfCheck(found, losses, averages, size, reduction, factor, failed, diagnosis, inside, dropped)


def computes_in_parts(trace: ScriptTrace) -> bool:
    """Whether ranks that begin alike compute other gradients from the same inputs, without a draw: each its part."""
    seen = trace.ranks[0]
    if len(seen) == 1 or trace.facts.random or not seen[0].inputs or not have_same_inputs(seen):
        return False
    if any(rank.initial != seen[0].initial for rank in seen):
        return False
    own = [add_gradients(read_local_gradients(trace, rank, 0)) for rank in range(len(seen))]
    return bool(find_unequal(own, trace.precision))


def _explain_unknown(steps: Sequence[_Step]) -> str:
    """Why it is not known how the gradient of an update is made; empty if it is a weighted sum."""
    for step in steps:
        if step.made.off and step.facts.clean is not False:
            gradients = (*(one for passes in step.passes for one in passes), *step.reduced)
            if infinite := find_infinite(gradients):  # no sum can be read from such numbers
                return f"step {step.number + 1}: those of {join_names(sorted(infinite), 3)} are not all finite numbers"
            names = join_names(step.made.off, 3)
            return f"step {step.number + 1}: not those of {names}: the script changes them, or uses some passes"
    if steps[0].made.weights is None:
        return "the gradients of single ranks could not be seen (fully_shard, torch.func)"
    return ""


# gradients, from the reduction to the next update ---------------------------------------------------------------------


def _follow_gradients(steps: Sequence[_Step], parted: bool) -> tuple[dict[str, _Failure], str]:
    """What fails of `EQUAL`, `CLIPPED` and `APART`, and why a reduction was not seen."""
    failures: dict[str, _Failure] = {}
    inside = ""
    for step in steps:
        replicas = [said for said in step.facts.replicas if not said.startswith(AVERAGE)]  # no parameter
        if not step.unequal:
            if replicas and _is_undone(step, inside == SENT):
                inside = SENT
            elif step.number and not parted and (apart := find_apart(step.seen)):
                message = f"ranks differ in {join_names(apart, 3)} when the update begins"
                failures.setdefault(APART, _fail(APART, step.number, message))
        elif _is_united_by_clipping(step):
            message = f"when they were clipped, {_describe_unequal(step)}"
            failures.setdefault(CLIPPED, _fail(CLIPPED, step.number, message))
        elif not replicas:  # nor the optimizer's state
            inside = inside or INSIDE
        elif all(said.startswith("'optimizer/") for said in replicas):
            inside = inside or OWN_STATE
        elif _is_undone(step, inside == TOGETHER):
            inside = TOGETHER
        elif EQUAL not in failures:
            failures[EQUAL] = _explain_unequal(step)
    return failures, inside


def _is_united_by_clipping(step: _Step) -> bool:
    """Whether ranks have other gradients before they are clipped and the same after; an overflow has none."""
    if not step.tensors("clipped gradients") or {*step.unequal} <= find_infinite(step.reduced):
        return False
    return all(rank.clipped == step.seen[0].clipped for rank in step.seen)


def _is_undone(step: _Step, before: bool) -> bool:
    """Whether ranks have the same parameters again when the next update begins; of the last one, if so `before`."""
    if step.number + 1 == len(step.trace.ranks):
        return before
    after = step.trace.ranks[step.number + 1]
    return bool(after[0].begun) and all(rank.begun == after[0].begun for rank in after)


def find_apart(seen: Sequence[RankFacts]) -> list[str]:
    """The parameters that all ranks hold, and not with the same values, when an update begins."""
    shared = set.intersection(*({*rank.begun} for rank in seen))
    return sorted(name for name in shared if len({rank.begun[name] for rank in seen}) > 1)


def _describe_unequal(step: _Step) -> str:
    return f"those of {'all parameters' if step.all_unequal else join_names(step.unequal, 3)} differ"


def _explain_unequal(step: _Step) -> _Failure:
    """Why the gradients of an update are not the same on all ranks, and stay so."""
    what, remedy = _describe_unequal(step), ""
    if step.sharded and not step.sharded & {*step.unequal}:
        what, remedy = f"{what}, which no fully_shard was given", SHARD_THE_ROOT
    elif any(rank.early for rank in step.seen):
        what, remedy = f"{what}, and the optimizer steps inside of the backward pass", STEP_LATER
    alone = is_left_alone(step.passes, step.reduced, step.unequal, step.trace.precision)
    if not {*step.unequal} <= {name for passes in step.passes for one in passes for name in one}:
        what += ", and what each rank computes of them by itself could not be seen"
    elif not alone:
        what += describe_changed(step.reduced, step.trace.precision)
    fault = None if step.all_unequal else FaultName.PARTLY_SYNCHRONISED
    if not alone:
        fault = FaultName.GRADIENTS_BY_LAYOUT
    return _fail(EQUAL, step.number, what, fault, remedy)


# what ranks have beside gradients -------------------------------------------------------------------------------------


def _describe_beginnings(step: _Step) -> str:
    names = [name for name in step.seen[0].initial if len({rank.initial.get(name) for rank in step.seen}) > 1]
    return f"ranks differ in {join_names(names, 3)}" if names else ""


def _describe_rates(step: _Step) -> str:
    rates, groups = step.facts.lr, step.facts.groups
    if len({tuple(of_rank) for of_rank in rates}) > 1:
        return f"{rates}"
    for rank, held in enumerate(groups[1:], 1):
        common = (name for name in held if name in groups[0])
        other = [name for name in common if rates[rank][held[name]] != rates[0][groups[0][name]]]
        if other:
            return (
                f"rank {rank} holds {join_names(other, 3)} in another group of parameters, at another rate, than rank 0"
            )
    return ""


def _describe_watched(step: _Step) -> str:
    """Numbers that decide about the rate, where every rank has one: they part the rates in some update to come."""
    for numbers in zip(*(rank.watched for rank in step.seen), strict=False):
        if not np.allclose(numbers, numbers[0], ROUNDING[step.trace.precision], 0.0, equal_nan=True):
            shown = ", ".join(f"{number:.6g}" for number in numbers)
            return f"before it, ReduceLROnPlateau was given {shown}, rank by rank"
    return ""


def _describe_buffers(step: _Step) -> str:
    """Buffers that differ by more than rounding, but for known statistics of one process."""
    known, found = {*step.trace.facts.per_process}, set[str]()
    first = step.tensors(buffers_moment(0))
    for rank, facts in enumerate(step.seen[1:], 1):
        names = {n for n, digest in facts.buffers.items() if n not in known and digest != step.seen[0].buffers.get(n)}
        other = step.tensors(buffers_moment(rank)) if names else {}
        mine, reference = ({name: each[name] for name in names & {*each}} for each in (other, first))
        unknown = names - {*other, *first}  # how far they differ
        found |= unknown.union(find_differing(mine, reference, step.trace.precision))
    names_in_order = [name for name in step.seen[0].buffers if name in found]
    return f"ranks differ in {join_names(names_in_order, 3)}" if names_in_order else ""


def _describe_modes(step: _Step) -> str:
    evaluating = [{*rank.evaluating} for rank in step.seen]
    apart = {name for names in evaluating for name in names ^ evaluating[0]}
    ranks = [number for number, names in enumerate(evaluating) if apart & names]
    shown = join_names([repr(name) for name in sorted(apart)], 3)
    return f"{shown} in evaluation mode on ranks {ranks} only" if apart else ""


_BY_STEP: dict[str, Callable[[_Step], str]] = {  # what differs between ranks in a step, in words; empty for nothing
    BEGIN: _describe_beginnings,
    RATES: _describe_rates,
    WATCHED: _describe_watched,
    BUFFERS: _describe_buffers,
    MODES: _describe_modes,
}
