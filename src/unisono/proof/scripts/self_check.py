"""What one run of several processes shows by itself: what every rank had before a reduction against what came of it.

All of it is arithmetic on a trace. The gradient of an update is looked for as a weighted sum of the gradients that the
ranks computed; the weights say what was reduced, and with the same weights the losses of the ranks are the function
that was minimised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unisono.proof import predictions
from unisono.proof.comparison import ComparedQuantity, Difference, relative_distances
from unisono.proof.fault_names import Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import add_gradients
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import Array, StepFacts, Trace
from unisono.proof.scripts.rank_facts import (
    RankFacts,
    all_given_the_same,
    buffers_moment,
    find_telling_steps,
    read_rank_facts,
    reduced_moment,
)
from unisono.proof.scripts.script_remedies import SHARD_THE_ROOT, STEP_LATER
from unisono.runtime.text import join_names

BEGIN = "ranks begin with equal parameters and buffers"
EQUAL = "gradients are equal on all ranks"
REDUCED = "gradients are a weighted sum of those of the ranks"
CLIPPED = "gradients are equal on all ranks when they are clipped"
RATES = "learning rates are equal on all ranks"
BUFFERS = "buffers are equal on all ranks"
DIFFERENT = "ranks were given different rows"
MODES = "ranks compute in the same mode"
APART = "updates of equal gradients begin with equal parameters"
NAMES = {
    BEGIN: "Initialisation depends on the rank",
    EQUAL: "Gradients are not synchronised",
    CLIPPED: "Clipped before synchronisation",
    RATES: "The learning rate differs between ranks",
    BUFFERS: "Buffers are those of one process",
    DIFFERENT: "Every rank reads the same rows",
    MODES: "Evaluation changes the training",
    APART: "Replicas drift apart",
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
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-3}
_SMALL = 1e-3  # of all gradients together: a smaller tensor is measured against those


@dataclass(frozen=True)
class Reduction:
    """How the gradient of an update is made of those of the ranks.

    Attributes:
        weights: of every rank, if it is their weighted sum.
        off: the parameters where it is not, with the relative distance.
    """

    weights: tuple[float, ...] | None
    off: dict[str, float]

    def __str__(self) -> str:
        if self.weights is None:
            return "nothing of the kind"
        first, count = self.weights[0], len(self.weights)
        if max(self.weights) - min(self.weights) > 1e-6 * abs(first):
            return f"sum weighted by {', '.join(f'{weight:.4g}' for weight in self.weights)}"
        known = {1.0: "sum", 1 / count: "mean"}
        return next((name for size, name in known.items() if math.isclose(first, size)), f"sum × {first:.4g}")


def explain_reduction(
    own: Sequence[Mapping[str, Array]], reduced: Mapping[str, Array], precision: str = "fp64"
) -> Reduction:
    """The weights by which the gradients of the ranks add up to the reduced one.

    Args:
        own: gradients of every rank by parameter, before the reduction.
        reduced: after it.
        precision: of the run, `fp64` or `fp32`.

    Example:
        >>> explain_reduction([{"w": np.ones(2)}, {"w": np.full(2, 3.0)}], {"w": np.full(2, 2.0)}).weights
        (0.5, 0.5)
    """
    names = sorted({name for rank in own for name in rank} & {*reduced})
    if not names:
        return Reduction(None, {})
    target = _flatten(reduced, names, reduced)
    columns = np.stack([_flatten(rank, names, reduced) for rank in own], axis=1)
    total = columns.sum(axis=1)
    if not (np.isfinite(columns).all() and np.isfinite(target).all()):
        return Reduction(None, dict.fromkeys(names, math.inf))
    scale = float(total @ target) / max(float(total @ total), 1e-300)
    weights = np.full(len(own), scale)
    off = _distances(columns @ weights, target, names, reduced, precision)
    if off:
        fitted, *_ = np.linalg.lstsq(columns, target, rcond=None)
        if not (other := _distances(columns @ fitted, target, names, reduced, precision)):
            weights, off = fitted, other
    return Reduction(None if off else tuple(float(weight) for weight in weights), off)


def _flatten(values: Mapping[str, Array], names: Sequence[str], like: Mapping[str, Array]) -> NDArray[np.float64]:
    return np.concatenate([np.float64(values[n]).ravel() if n in values else np.zeros(like[n].size) for n in names])


def _distances(
    made: NDArray[np.float64],
    target: NDArray[np.float64],
    names: Sequence[str],
    like: Mapping[str, Array],
    precision: str,
) -> dict[str, float]:
    """The parameters in which two gradients differ by more than rounding."""
    ends = np.cumsum([like[name].size for name in names])[:-1]
    whole, result = float(np.linalg.norm(target)), {}
    for name, a, b in zip(names, np.split(made, ends), np.split(target, ends), strict=True):
        size = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(b)), _SMALL * whole, 1e-300)
        if not size <= _ROUNDING[precision]:
            result[name] = size
    return result


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


def check_run(trace: Trace, precision: str) -> SelfCheck:
    """Check a run against itself; on one process only its losses are told."""
    ranks = read_rank_facts(trace.folder)
    worst: dict[str, Difference] = {}
    losses: list[float | None] = []
    averages = [_average(step, seen) for step, seen in zip(trace.facts.steps, ranks, strict=True)]
    shown, unexplained, remedy, inside, partly, alone, factor = "", "", "", "", False, True, 0.0

    parted = any(rank.parted for seen in ranks for rank in seen) or computes_in_parts(trace, ranks, precision)

    def note(check: str, step: int, what: str) -> None:
        worst.setdefault(check, Difference(math.inf, step + 1, what))

    for step, seen in enumerate(ranks):
        passes = [read_local_gradients(trace, rank, step) for rank in range(len(seen))]
        own = [add_gradients(each) for each in passes]
        reduced = [trace.tensors(reduced_moment(rank), step) for rank in range(len(seen))]
        made = explain_reduction(own, reduced[0], precision)
        clean = trace.facts.steps[step].clean is not False
        if not shown:
            shown, factor = str(made), made.weights[0] if made.weights else 0.0
        unequal = _find_unequal(reduced, precision)
        losses.append(_minimised(made, seen) if clean and not unequal else None)
        if clean and made.off and not unexplained:
            endless = _describe_infinite([*own, *reduced])
            why = (
                endless or f"not those of {join_names(list(made.off), 3)}: the script changes them, or uses some passes"
            )
            unexplained = f"step {step + 1}: {why}"
        if len(seen) == 1:
            continue
        begun = [name for name in seen[0].initial if len({rank.initial.get(name) for rank in seen}) > 1]
        if begun:
            note(BEGIN, step, f"ranks differ in {join_names(begun, 3)}")
        if unequal:
            sharded = {*trace.tensors("raw gradients", step)}  # with those of which every rank has a piece
            everywhere = sharded.union(*reduced) <= {*unequal, *_find_negligible(reduced, precision)}
            what = f"those of {'all parameters' if everywhere else join_names(unequal, 3)} differ"
            if trace.tensors("clipped gradients", step) and all(rank.clipped == seen[0].clipped for rank in seen):
                note(CLIPPED, step, f"when they were clipped, {what}")
            elif not trace.facts.steps[step].replicas:  # nor the optimizer's state
                inside = inside or INSIDE
            elif all(said.startswith("'optimizer/") for said in trace.facts.steps[step].replicas):
                inside = inside or OWN_STATE
            elif _is_undone(ranks, step, inside == TOGETHER):
                inside = TOGETHER
            else:
                if EQUAL not in worst:
                    partly, alone = not everywhere, is_left_alone(passes, reduced, unequal, precision)
                    cut = sharded.difference(*reduced)
                    if cut and not {*unequal} & cut:
                        what, remedy = f"{what}, which no fully_shard was given", SHARD_THE_ROOT
                    elif any(rank.early for rank in seen):
                        what, remedy = f"{what}, and the optimizer steps inside of the backward pass", STEP_LATER
                    if any(not any(name in rank for rank in own) for name in unequal):
                        what += ", and what each rank computes of them by itself could not be seen"
                    elif not alone:
                        what += _describe_changed(reduced, precision)
                note(EQUAL, step, what)
        elif trace.facts.steps[step].replicas and _is_undone(ranks, step, inside == SENT):
            inside = SENT
        elif step and not parted and (apart := _find_apart(seen)):
            note(APART, step, f"ranks differ in {join_names(apart, 3)} when the update begins")
        if len({tuple(rates) for rates in trace.facts.steps[step].lr}) > 1:
            note(RATES, step, f"{trace.facts.steps[step].lr}")
        if buffers := _find_differing_buffers(trace, step, seen, precision):
            note(BUFFERS, step, f"ranks differ in {join_names(buffers, 3)}")
        if modes := _describe_modes(seen):
            note(MODES, step, modes)
    if len(ranks[0]) == 1:
        return SelfCheck([], losses, averages, 1, shown, factor)
    same = [] if parted else _find_steps_alike(ranks)
    left = {}  # what is neither right nor wrong
    if same and same == find_telling_steps(ranks):
        note(DIFFERENT, same[0], f"all ranks computed the same {len(ranks[same[0]][0].inputs)} inputs")
    elif same:
        steps = join_names([f"{step + 1}" for step in same], 3)
        left[DIFFERENT] = (
            f"all ranks were given the same inputs in steps {steps}, and not in others (a search for a rate?)"
        )
    hidden = inside not in ("", SENT)
    if hidden:
        left[EQUAL] = inside
    checks = [BEGIN, EQUAL, RATES]
    checks += [CLIPPED] if any(trace.tensors("clipped gradients", step) for step in range(len(ranks))) else []
    checks += [BUFFERS] if any(rank.buffers for seen in ranks for rank in seen) else []
    checks += [DIFFERENT] if any(rank.inputs for seen in ranks for rank in seen) and not parted else []
    checks += [check for check in (MODES, APART) if check in worst]
    found = [
        ComparedQuantity(c, "FAIL", worst[c])
        if c in worst
        else ComparedQuantity(c, "ABSTAIN" if c in left else "PASS", why=left.get(c, ""))
        for c in checks
    ]
    if not {EQUAL, CLIPPED} & {*worst} and not hidden:
        why = unexplained or "the gradients of single ranks could not be seen (fully_shard, torch.func)"
        known = shown != str(Reduction(None, {})) and not unexplained
        found.insert(2, ComparedQuantity(REDUCED, "PASS") if known else ComparedQuantity(REDUCED, "ABSTAIN", why=why))
        shown = shown if known else ""
    else:
        shown = ""
    failed = min((c for c in found if c.mark == "FAIL"), key=lambda check: check.worst.step, default=None)
    name = NAMES[failed.quantity] if failed else ""
    if failed and failed.quantity == EQUAL and not alone:
        name = "The gradients depend on the layout"
    elif failed and failed.quantity == EQUAL and partly:
        name = "Some parameters are not synchronised"
    likely = build_diagnosis(name, f"step {failed.worst.step}: {failed.worst.name}") if failed else None
    if likely and remedy and failed and failed.quantity == EQUAL:
        likely = replace(likely, remedy=remedy)
    return SelfCheck(
        found, losses, averages, len(ranks[0]), shown, factor, failed, likely, inside * (EQUAL not in worst)
    )


def computes_in_parts(trace: Trace, ranks: Sequence[Sequence[RankFacts]], precision: str) -> bool:
    """Whether ranks that begin alike compute other gradients from the same inputs, without a draw: each its part."""
    seen = ranks[0]
    if len(seen) == 1 or trace.facts.random or not seen[0].inputs or not all_given_the_same(seen):
        return False
    if any(rank.initial != seen[0].initial for rank in seen):
        return False
    own = [add_gradients(read_local_gradients(trace, rank, 0)) for rank in range(len(seen))]
    return any(one.keys() != own[0].keys() for one in own) or bool(_find_unequal(own, precision))


def _find_steps_alike(ranks: Sequence[Sequence[RankFacts]]) -> list[int]:
    """Of these, the steps in which all ranks were given the same inputs."""
    return [step for step in find_telling_steps(ranks) if all_given_the_same(ranks[step])]


def _is_undone(ranks: Sequence[Sequence[RankFacts]], step: int, before: bool) -> bool:
    """Whether ranks have the same parameters again when the next update begins; of the last one, if so `before`."""
    after = ranks[step + 1] if step + 1 < len(ranks) else []
    if not after:
        return before
    return bool(after[0].begun) and all(rank.begun == after[0].begun for rank in after)


def _find_apart(seen: Sequence[RankFacts]) -> list[str]:
    """The parameters that all ranks hold, and not with the same values, when an update begins."""
    shared = set.intersection(*({*rank.begun} for rank in seen))
    return sorted(name for name in shared if len({rank.begun[name] for rank in seen}) > 1)


def _minimised(made: Reduction, seen: Sequence[RankFacts]) -> float | None:
    """The function whose gradient was used: what the ranks called `backward` on, in the same weighted sum."""
    if made.weights is None or not all(rank.losses for rank in seen):
        return None
    return sum(weight * sum(rank.losses) for weight, rank in zip(made.weights, seen, strict=True))


def _average(step: StepFacts, seen: Sequence[RankFacts]) -> float | None:
    """The mean over ranks of what each called `backward` on, weighted by their rows; alike where these are unknown."""
    if not all(rank.losses for rank in seen):
        return None
    counts = [[len(rows) for rows in step.by_rank], [len(rank.inputs) for rank in seen], [1] * len(seen)]
    rows = next(each for each in counts if all(each))
    return sum(count * sum(rank.losses) for count, rank in zip(rows, seen, strict=True)) / sum(rows)


def _describe_infinite(gradients: Sequence[Mapping[str, Array]]) -> str:
    """In words, the parameters of which a gradient is NaN or infinite: no sum can be read from such numbers."""
    names = {name for one in gradients for name, value in one.items() if not np.isfinite(value).all()}
    return f"those of {join_names(sorted(names), 3)} are not all finite numbers" if names else ""


def _find_unequal(reduced: Sequence[Mapping[str, Array]], precision: str) -> list[str]:
    """Parameters whose gradient is not the same on all ranks."""
    result: set[str] = set()
    for rank in reduced[1:]:
        names = sorted({*reduced[0]} & {*rank})
        result |= {*reduced[0]} ^ {*rank}
        if names:
            first, other = _flatten(reduced[0], names, rank), _flatten(rank, names, rank)
            result |= set(_distances(first, other, names, rank, precision))
    return sorted(result)


def _find_negligible(reduced: Sequence[Mapping[str, Array]], precision: str) -> set[str]:
    """Parameters whose gradient is rounding on every rank (a bias before a normalisation): none could differ."""
    whole = math.sqrt(sum(float(np.square(value).sum()) for value in reduced[0].values()))
    limit = _ROUNDING[precision] * _SMALL * whole
    every = {name for rank in reduced for name in rank}
    return {n for n in every if all(n not in rank or float(np.linalg.norm(rank[n])) <= limit for rank in reduced)}


def _describe_changed(reduced: Sequence[Mapping[str, Array]], precision: str) -> str:
    """In words, what differs although no rank has its own gradients; whether it is one factor per rank."""
    factors = [predictions.common_factor(rank, reduced[0], _ROUNDING[precision]) for rank in reduced[1:]]
    known = [f"{factor:.4g}" for factor in factors if factor is not None]
    if len(known) < len(factors):
        return ", and no rank has its own: look at what changes them after the reduction"
    return (
        f": they are {join_names(known, 3)} times those of rank 0, so each rank multiplies or divides the reduced ones "
        "by a number of its own (a count of its own rows?)"
    )


def is_left_alone(
    passes: Sequence[Sequence[Mapping[str, Array]]],
    reduced: Sequence[Mapping[str, Array]],
    names: Sequence[str],
    precision: str,
) -> bool:
    """Whether gradients of a rank are its own, or a sum in which a backward pass of it is without those of the others.

    Args:
        passes: of every rank, the gradients of each backward pass.
        reduced: of every rank, after the reduction.
        names: of the parameters in question.
        precision: of the run, `fp64` or `fp32`.
    """
    limit = _ROUNDING[precision]
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


def _describe_modes(seen: Sequence[RankFacts]) -> str:
    """In words, the modules that are in evaluation mode on some ranks only."""
    apart = {name for rank in seen for name in {*seen[0].evaluating} ^ {*rank.evaluating}}
    ranks = [number for number, rank in enumerate(seen) if apart & {*rank.evaluating}]
    names = [repr(name) for name in sorted(apart)]
    return f"{join_names(names, 3)} in evaluation mode on ranks {ranks} only" if apart else ""


def _find_differing_buffers(trace: Trace, step: int, seen: Sequence[RankFacts], precision: str) -> list[str]:
    """Buffers that differ between ranks by more than rounding, but for known statistics of one process."""
    known, found = {*trace.facts.per_process}, set[str]()
    first = trace.tensors(buffers_moment(0), step)
    for rank, facts in enumerate(seen[1:], 1):
        names = {n for n, digest in facts.buffers.items() if n not in known and digest != seen[0].buffers.get(n)}
        other = trace.tensors(buffers_moment(rank), step) if names else {}
        sizes = relative_distances({n: other[n] for n in names}, {n: first[n] for n in names if n in first})
        found |= {name for name, size in sizes.items() if size > _ROUNDING[precision]}
    return [name for name in seen[0].buffers if name in found]
