"""Why many processes compute another loss or gradient than one: a cause is tried on one process, and not guessed.

One process is given the rows of each rank alone, in the first step that differs. Where it computes what that rank has
computed, a rank computes nothing but a function of its rows, and the difference lies in how the rows are parted; where
it does not, a rank's loss has something else in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from unisono.proof.cases import Case
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import REMEDIES, Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import add_gradients, norm_of
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import Array
from unisono.proof.scripts.judging.gradient_sums import LEAST_ELEMENTS, ROUNDING
from unisono.proof.scripts.judging.script_comparison import ScriptRuns
from unisono.proof.scripts.recording.rank_facts import ScriptTrace, count_inputs, reduced_moment
from unisono.proof.scripts.recording.script_collectives import Exchange, merge_exchanges
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.replay_plan import plan_replay, reads_numbers
from unisono.proof.verdict import Verdict
from unisono.runtime.fault_names import FaultName

_OPEN = (FaultName.LOSS_BY_LAYOUT, FaultName.GRADIENTS_BY_LAYOUT)
_MOST_RANKS = 4  # whose rows are tried
_LATEST = 11  # the last step, from 0, up to which that is tried
_FITTED = 1e-6  # relative, of what differences of gradients say in fp64
_LOSS = 1e-5  # relative, at most what rounding comes to in a loss, of which fp32 has more digits than of a gradient


@dataclass(frozen=True)
class Computed:
    """What a process has made of rows in the first update.

    Attributes:
        loss: that it has called `backward` on, over all passes.
        gradient: elements of it, before anything is reduced.
        beside: in words, how what goes into the loss past the model is another than one process has for the same rows.
        standardised: whether all of that is what a statistic of these rows makes.
        numbers: whether numbers that follow the rows may have stayed those of other rows.
    """

    loss: float
    gradient: Mapping[str, Array]
    beside: Sequence[str] = ()
    standardised: bool = False
    numbers: bool = False

    def equals(self, other: Computed, limit: float) -> bool:
        """Whether both are the same to rounding."""
        same = predictions.is_equal(self.loss, other.loss, limit)
        return same and predictions.reproduces(self.gradient, other.gradient, limit)

    @property
    def is_finite(self) -> bool:
        """Whether all of it is finite numbers, which others can be compared with."""
        return math.isfinite(self.loss) and all(np.isfinite(one).all() for one in self.gradient.values())

    def times(self, factor: float) -> Computed:
        """What it would be if the loss were so many times as large."""
        return replace(self, loss=factor * self.loss, gradient={n: factor * g for n, g in self.gradient.items()})


def combine(*parts: tuple[float, Computed]) -> Computed:
    """The loss and the gradient of a weighted sum of losses."""
    made = [one.times(weight) for weight, one in parts]
    return Computed(sum(one.loss for one in made), add_gradients([one.gradient for one in made]))


def explain_by_parts(runs: ScriptRuns, case: Case, judged: Verdict, reference: ScriptTrace) -> None:
    """Name the cause of the first difference, which has none yet, if trying its step on one process shows it."""
    first, found = judged.first, judged.diagnosis
    size, mine = case.world_size, runs.traces.get(case.name)
    if first is None or found is None or found.fault not in _OPEN or mine is None or size > _MOST_RANKS:
        return
    step = first.worst.step - 1  # those before it agree
    if not 0 <= step <= _LATEST or first.quantity not in ("loss", "raw gradients"):
        return
    if plan_replay(mine, reference).how != "side by side":
        return
    ranks, whole = [_read(mine, rank, step) for rank in range(size)], _read(reference, 0, step)
    alone = [_compute_alone(runs, case, mine, [rank], step) for rank in range(size)]
    known = [one for one in alone if one is not None]
    if not whole.gradient or len(known) < size or any(not rank.gradient for rank in ranks):
        return
    limit = max(ROUNDING[mine.precision], first.allowed)
    exchanged = merge_exchanges(*(rank.exchanged for rank in mine.ranks[step]))
    alike = _is_reduced_alike(mine, reference, ranks, whole, step)
    likely = found
    if (factor := find_factor(ranks, known, limit)) is not None:
        twice = _compute_alone(runs, case, mine, [0, 0], step)
        known, twice = [one.times(factor) for one in known], twice and twice.times(factor)
        likely = explain_parts(ranks, known, whole, twice, limit, factor, alike)
    elif (rest := find_rest(ranks, known, limit)) is not None:
        likely = explain_rest(ranks, *rest, whole, limit, found, alike)
    elif any(one.numbers for one in known):
        return
    elif first.quantity == "raw gradients" and exchanged:
        likely = explain_exchange(ranks, whole, exchanged, found, limit)
    elif not exchanged:
        likely = explain_process(ranks, known, limit, found, step)
    is_open = found.remedy == REMEDIES[found.fault]  # else the weights say what differs
    judged.diagnosis = likely if is_open or not likely.is_neutral else found


def excuse_counts(runs: ScriptRuns, case: Case, judged: Verdict, replayed: ScriptTrace, plain: ScriptTrace) -> None:
    """Take back a difference that comes of the number of rows, which one process has kept of its own.

    A script may divide by a number that no tensor holds (`len(rows)`, the size of a batch); one process that is given
    the rows of others divides by its own then. So it is where what one process computes of the rows of each rank alone
    is what that rank computes, but for the ratio of these numbers, and what it computes of all of them likewise; and
    so is the gradient of the update.
    """
    first, found, mine = judged.first, judged.diagnosis, runs.traces[case.name]
    if first is None or found is None or not (found.fault in _OPEN or found.is_factor):
        return
    step = first.worst.step - 1
    if not 0 <= step <= _LATEST or first.quantity not in ("loss", "raw gradients") or case.world_size > _MOST_RANKS:
        return
    if step >= len(plain.ranks) or plan_replay(mine, replayed).how != "side by side":
        return
    seen = mine.ranks[step]
    own, given = len(plain.ranks[step][0].inputs), sum(len(rank.inputs) for rank in seen)
    if own == given or not all(rank.inputs for rank in seen):
        return
    limit = max(ROUNDING[mine.precision], first.allowed)
    ranks, whole = [_read(mine, rank, step) for rank in range(len(seen))], _read(replayed, 0, step)
    updates = [trace.tensors(reduced_moment(0), step) for trace in (mine, replayed)]
    if not is_counted_alone(ranks, whole, updates, own / given, limit):
        return
    alone = [_compute_alone(runs, case, mine, [rank], step) for rank in range(len(seen))]
    known = [one.times(own / len(facts.inputs)) for one, facts in zip(alone, seen, strict=True) if one is not None]
    if len(known) < len(ranks) or find_factor(ranks, known, limit) is None:
        return
    why = (
        f"the script divides by a number of rows that it does not read from these ({own}, as it has by itself): one "
        "process that is given the rows of the ranks computes with it, and each rank with its own"
    )
    judged.compared = [replace(one, mark="ABSTAIN", why=why) if one.mark == "FAIL" else one for one in judged.compared]
    judged.diagnosis = None


def is_counted_alone(
    ranks: Sequence[Computed], whole: Computed, updates: Sequence[Mapping[str, Array]], ratio: float, limit: float
) -> bool:
    """Whether the ranks' sum or mean, and the gradient that they reduce it to, are so many times those of one process.

    Args:
        ranks: what each of them has computed.
        whole: what one process has computed of all their rows.
        updates: the reduced gradients of both; empty where ranks hold parts of them, which says nothing then.
        ratio: of the rows of one process by itself to those that it was given.
        limit: relative difference that is rounding.
    """
    ours, theirs = updates
    if ours and not predictions.reproduces({name: ratio * value for name, value in theirs.items()}, ours, limit):
        return False
    sums = (combine(*((weight, one) for one in ranks)) for weight in (1.0, 1 / len(ranks)))
    return any(whole.times(ratio).equals(one, limit) for one in sums)


def find_factor(ranks: Sequence[Computed], alone: Sequence[Computed], limit: float) -> float | None:
    """How many times what one process computes of the rows of each rank alone is what that rank computes.

    1, or what the number of processes makes of a loss that is divided by it or multiplied; None where it is neither.
    """
    pairs = list(zip(ranks, alone, strict=True))
    for factor in (1.0, 1 / len(ranks), float(len(ranks))):
        if all(one.times(factor).equals(rank, limit) for rank, one in pairs):
            return factor
    return None


def explain_parts(
    ranks: Sequence[Computed],
    alone: Sequence[Computed],
    whole: Computed,
    twice: Computed | None,
    limit: float,
    factor: float = 1.0,
    reduced_alike: bool = True,
) -> Diagnosis:
    """The fault where every rank computes what one process computes of its rows alone.

    Args:
        ranks: what each of them has computed.
        alone: what one process has computed of the rows of each, times the factor.
        whole: of all rows.
        twice: of the rows of rank 0 two times, times the factor; None where that could not be computed.
        limit: relative difference that is rounding.
        factor: by which the number of processes has changed it.
        reduced_alike: whether the update is made of the ranks' sum as that of one process is made of the whole.
    """
    if said := "; ".join(line for one in alone for line in one.beside):
        detail = f"what goes into the loss past the model is another for the same rows: {said}"
        by_own = all(one.standardised for one in alone if one.beside)
        return build_diagnosis(FaultName.STATISTIC_OF_PARTS if by_own else FaultName.LOSS_BY_LAYOUT, detail)
    each = "of each rank's rows alone, one process computes the loss and the gradient of that rank"
    each += "" if factor == 1 else f", which are {factor:.6g} times that by the number of processes"
    if twice is not None and _adds_once(ranks, alone[0], whole, twice, limit):
        if reduced_alike:
            return _build_term(
                ranks,
                "the rows of rank 0, given to one process once and twice, show the same loss and gradient that is "
                "too much",
            )
        detail = f"{each}; it has a term that no row has, and gradients are not added up as those of one process are"
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    if _losses_add_up(ranks, whole, limit):
        detail = (
            f"{each}; these losses add up to that of all rows, and their gradients do not: a hook, a clamp or a factor "
            "without a gradient takes something of several rows before anything is reduced, or the script adds to "
            "gradients by itself (a decay)"
        )
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    shown = ", ".join(f"{rank.loss:.6g}" for rank in ranks)
    detail = f"{each} ({shown}), and of all rows together {whole.loss:.6g}, which is no sum or mean of these"
    if (weights := predictions.fit_weights(whole.gradient, [rank.gradient for rank in ranks], limit)) is not None:
        detail += f"; its gradient is that of the ranks, weighted by {', '.join(f'{weight:.4g}' for weight in weights)}"
        return build_diagnosis(FaultName.LOSS_BY_LAYOUT, detail)
    known = twice is not None  # else it may be a term that no row has
    return build_diagnosis(FaultName.STATISTIC_OF_PARTS if known else FaultName.LOSS_BY_LAYOUT, detail)


def _losses_add_up(ranks: Sequence[Computed], whole: Computed, limit: float) -> bool:
    """Whether the sum or the mean of the ranks' losses is the loss of all rows."""
    total = sum(rank.loss for rank in ranks)
    return any(predictions.is_equal(loss, whole.loss, min(limit, _LOSS)) for loss in (total, total / len(ranks)))


def _build_term(ranks: Sequence[Computed], shown: str) -> Diagnosis:
    detail = (
        f"every process adds the same to its loss, whatever its rows, and it is in the sum {len(ranks)} times: {shown}"
    )
    fault = build_diagnosis(FaultName.TERM_PER_MICRO_BATCH, detail)
    return replace(fault, remedy="divide it by the number of processes, or average gradients over ranks")


def _adds_once(ranks: Sequence[Computed], alone: Computed, whole: Computed, twice: Computed, limit: float) -> bool:
    """Whether the ranks' sum has one and the same loss and gradient too often: the term that no row has."""
    return _is_too_often(ranks, combine((2.0, alone), (-1.0, twice)), whole, limit)


def _is_too_often(ranks: Sequence[Computed], term: Computed, whole: Computed, limit: float) -> bool:
    """Whether the ranks' sum is what one process computes of all rows, and this term once more for each further one."""
    predicted = combine(*((1.0, rank) for rank in ranks), (1.0 - len(ranks), term))
    near = abs(predicted.loss - whole.loss) <= limit * max(abs(whole.loss), abs(sum(rank.loss for rank in ranks)))
    is_there = abs(term.loss) > limit * abs(whole.loss)
    return near and is_there and predictions.reproduces(predicted.gradient, whole.gradient, limit)


def find_rest(
    ranks: Sequence[Computed], alone: Sequence[Computed], limit: float
) -> tuple[float, Computed | None] | None:
    """How each rank computes so many times what one process computes of its rows alone, and one and the same more.

    The factor follows from the differences between ranks, in which the rest is not; tensor by tensor it has to be the
    same, and so has the rest of each rank. None where they are not; the rest is None where there is none.
    """
    ours, theirs = (combine((1.0, each[0]), (-1.0, each[1])) for each in (ranks, alone))
    if sum(value.size for value in ours.gradient.values()) < LEAST_ELEMENTS:
        return None
    fitting = max(_FITTED, limit)
    factor = predictions.common_factor(ours.gradient, theirs.gradient, fitting)
    if factor is None or abs(ours.loss - factor * theirs.loss) > fitting * max(abs(rank.loss) for rank in ranks):
        return None
    rests = [combine((1.0, rank), (-factor, one)) for rank, one in zip(ranks, alone, strict=True)]
    sizes = [norm_of(rank.gradient.values()) for rank in ranks]
    if all(norm_of(rest.gradient.values()) <= fitting * size for rest, size in zip(rests, sizes, strict=True)):
        return factor, None
    return (factor, rests[0]) if all(rests[0].equals(rest, fitting) for rest in rests[1:]) else None


def explain_rest(
    ranks: Sequence[Computed],
    factor: float,
    rest: Computed | None,
    whole: Computed,
    limit: float,
    found: Diagnosis,
    reduced_alike: bool,
) -> Diagnosis:
    """The fault where ranks compute a factor of what one process computes of their rows, and the same more on each."""
    times = f"{factor:.6g} times " if not predictions.is_equal(factor, 1.0, _FITTED) else ""
    each = f"each rank computes {times}what one process computes of its rows alone"
    if rest is None:
        return replace(
            found, because=f"{each}: look for a count of rows, or of processes, in what the loss is divided by"
        )
    if times and reduced_alike:
        term = combine((1 / (1 - factor), rest))  # of which the factor is none
        if _is_too_often(ranks, term, whole, max(_FITTED, limit)):
            shown = f"{each.replace('computes', 'has', 1)}, and a loss of {term.loss * (1 - factor):.6g} more on each"
            return _build_term(ranks, shown)
    detail = (
        f"{each} and the same loss more on each, {rest.loss:.6g}, whatever its rows: look for a term that no row has"
    )
    return replace(found, because=f"{detail} (a penalty, a decay), and for the number of processes in it")


def explain_exchange(
    ranks: Sequence[Computed], whole: Computed, exchanged: Mapping[str, str], found: Diagnosis, limit: float
) -> Diagnosis:
    """The fault where ranks exchange values while they compute, and only gradients are wrong; else what was found."""
    without = [line for line, kind in exchanged.items() if kind == Exchange.ROWS]
    if not without or not _losses_add_up(ranks, whole, limit):
        return found
    detail = (
        f"{found.because.partition(';')[0]}; the ranks' losses add up to that of one process, and one process that is "
        "given the rows of a rank alone computes another: they have values of other ranks in them, and no gradient of "
        f"these. {without[0]} has no backward pass"
    )
    diagnosis = build_diagnosis(FaultName.CROSS_SAMPLE_GRADIENTS, detail)
    return replace(diagnosis, remedy="exchange them with a backward pass (torch.distributed.nn.functional), no detach")


def explain_process(
    ranks: Sequence[Computed], alone: Sequence[Computed], limit: float, found: Diagnosis, step: int = 0
) -> Diagnosis:
    """What was found, with what one process computes of the rows of a rank, where that is another loss or gradient."""
    off = [n for n, (rank, one) in enumerate(zip(ranks, alone, strict=True)) if not one.equals(rank, limit)]
    shown = "; ".join(f"{ranks[n].loss:.6g} on rank {n} and {alone[n].loss:.6g} on one process" for n in off[:2])
    read = "the rank, a count or a statistic of the rank's part of the data, a state"
    if step:
        read = f"the steps up to {step} agree: look first at what a rank keeps of its own rows from step to step"
    detail = (
        f"one process that is given the rows of a rank alone computes another loss or gradient than it ({shown}), and "
        f"no exchange between ranks was seen within a pass (of those that are watched); not found why: {read}"
    )
    return replace(found, because=detail)


def _is_reduced_alike(
    mine: ScriptTrace, reference: ScriptTrace, ranks: Sequence[Computed], whole: Computed, step: int
) -> bool:
    """Whether the update is as many times the sum over ranks as that of one process is of what it computes."""
    moment = reduced_moment(0)
    ours = predictions.common_factor(
        mine.tensors(moment, step), add_gradients([rank.gradient for rank in ranks]), _FITTED
    )
    theirs = predictions.common_factor(reference.tensors(moment, step), whole.gradient, _FITTED)
    return ours is not None and theirs is not None and predictions.is_equal(ours, theirs, _FITTED)


def _read(trace: ScriptTrace, rank: int, step: int) -> Computed:
    seen = trace.ranks[step][rank]
    return Computed(sum(seen.losses), add_gradients(read_local_gradients(trace, rank, step)))


def _compute_alone(runs: ScriptRuns, case: Case, mine: ScriptTrace, ranks: list[int], step: int) -> Computed | None:
    """What one process computes of the rows of these ranks, after steps of all; None where it was not given them."""
    name = f"1 process, on the rows of rank {' and '.join(map(str, ranks))} of {case.world_size}"
    runs.changes[name] = {
        "rows_of": mine.folder.name, "ranks": ranks, "steps": step + 1, "further": False,
        "since": step, "all_ranks": case.world_size,
    }  # fmt: skip
    trace = runs.record(Case(name, 1, {}, case.precision))
    runs.ended.pop(name, None)
    if trace is None:
        return None
    if len(trace.ranks) <= step:
        return None
    wanted = count_inputs([mine.ranks[step][rank] for rank in ranks])
    reading = read_reading(trace.folder, 0)
    if not wanted or wanted != count_inputs(trace.ranks[step]) or reading is None or reading.reason:
        return None
    made = _read(trace, 0, step)
    if not made.is_finite:  # of fewer rows, the mean of none
        return None
    return replace(made, beside=reading.beside, standardised=reading.standardised, numbers=reads_numbers(trace))
