"""Why many processes compute another loss or gradient than one: a cause is tried on one process, and not guessed.

One process is given the rows of each rank alone, in the first step that differs. Where it computes what that rank has
computed, a rank computes nothing but a function of its rows, and the difference lies in how the rows are parted; where
it does not, a rank's loss has something else in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.proof.cases import Case
from unisono.proof.diagnoses import predictions
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.recording.gradient_sample import add_gradients
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.recording.trace import Array
from unisono.proof.scripts.judging.gradient_sums import ROUNDING
from unisono.proof.scripts.judging.script_comparison import ScriptRuns
from unisono.proof.scripts.recording.rank_facts import ScriptTrace
from unisono.proof.scripts.recording.script_collectives import Exchange
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.replay_plan import plan_replay, reads_numbers
from unisono.proof.verdict import Verdict
from unisono.runtime.fault_names import FaultName

_OPEN = (FaultName.LOSS_BY_LAYOUT, FaultName.GRADIENTS_BY_LAYOUT)
_MOST_RANKS = 4  # whose rows are tried
_LATEST = 11  # the last step, from 0, up to which that is tried


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

    def times(self, factor: float) -> Computed:
        """What it would be if the loss were so many times as large."""
        return replace(self, loss=factor * self.loss, gradient={n: factor * g for n, g in self.gradient.items()})


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
    exchanged = {line: kind for rank in mine.ranks[step] for line, kind in rank.exchanged.items()}
    if (factor := find_factor(ranks, known, limit)) is not None:
        twice = _compute_alone(runs, case, mine, [0, 0], step) if _is_sum(mine, ranks, limit, step) else None
        known, twice = [one.times(factor) for one in known], twice and twice.times(factor)
        judged.diagnosis = explain_parts(ranks, known, whole, twice, limit, factor) or found
    elif any(one.numbers for one in known):
        return
    elif first.quantity == "raw gradients" and exchanged:
        judged.diagnosis = explain_exchange(ranks, whole, exchanged, found, limit)
    elif not exchanged:
        judged.diagnosis = explain_process(ranks, known, limit, step)


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
) -> Diagnosis | None:
    """The fault where every rank computes what one process computes of its rows alone.

    Args:
        ranks: what each of them has computed.
        alone: what one process has computed of the rows of each, times the factor.
        whole: of all rows.
        twice: of the rows of rank 0 two times, times the factor, where gradients are added up over ranks.
        limit: relative difference that is rounding.
        factor: by which the number of processes has changed it.
    """
    if said := "; ".join(line for one in alone for line in one.beside):
        detail = f"what goes into the loss past the model is another for the same rows: {said}"
        by_own = all(one.standardised for one in alone if one.beside)
        return build_diagnosis(FaultName.STATISTIC_OF_PARTS if by_own else FaultName.LOSS_BY_PROCESS, detail)
    if twice is not None and _adds_once(ranks, alone[0], whole, twice, limit):
        detail = (
            f"every process adds the same to its loss, whatever its rows, and it is in the sum {len(ranks)} times: the "
            "rows of rank 0, given to one process once and twice, show the same loss and gradient that is too much"
        )
        fault = build_diagnosis(FaultName.TERM_PER_MICRO_BATCH, detail)
        return replace(fault, remedy="divide it by the number of processes, or average gradients over ranks")
    each = "of each rank's rows alone, one process computes the loss and the gradient of that rank"
    each += "" if factor == 1 else f", which are {factor:.6g} times that by the number of processes"
    losses = [sum(rank.loss for rank in ranks), sum(rank.loss for rank in ranks) / len(ranks)]
    if any(predictions.is_equal(loss, whole.loss, limit) for loss in losses):
        detail = (
            f"{each}; these losses add up to that of all rows, and their gradients do not: a hook, a clamp or a factor "
            "without a gradient takes something of several rows before anything is reduced, or the script adds to "
            "gradients by itself (a decay)"
        )
        return build_diagnosis(FaultName.GRADIENTS_BY_LAYOUT, detail)
    shown = ", ".join(f"{rank.loss:.6g}" for rank in ranks)
    detail = f"{each} ({shown}), and of all rows together {whole.loss:.6g}, which is no sum or mean of these"
    return build_diagnosis(FaultName.STATISTIC_OF_PARTS, detail)


def _adds_once(ranks: Sequence[Computed], alone: Computed, whole: Computed, twice: Computed, limit: float) -> bool:
    """Whether the ranks' sum has one and the same loss and gradient too often: the term that no row has."""
    extra = len(ranks) - 1
    loss = (sum(rank.loss for rank in ranks) - whole.loss) / extra
    term = 2 * alone.loss - twice.loss
    if abs(loss - term) > limit * max(abs(whole.loss), abs(twice.loss)) or not loss:
        return False
    total = add_gradients([rank.gradient for rank in ranks])
    predicted = {
        name: value - extra * (2 * alone.gradient[name] - twice.gradient[name])
        for name, value in total.items()
        if name in alone.gradient and name in twice.gradient
    }
    return predictions.reproduces(predicted, whole.gradient, limit)


def explain_exchange(
    ranks: Sequence[Computed], whole: Computed, exchanged: Mapping[str, str], found: Diagnosis, limit: float
) -> Diagnosis:
    """The fault where ranks exchange values while they compute, and only gradients are wrong; else what was found."""
    total = sum(rank.loss for rank in ranks)
    without = [line for line, kind in exchanged.items() if kind == Exchange.ROWS]
    if not without or not any(predictions.is_equal(loss, whole.loss, limit) for loss in (total, total / len(ranks))):
        return found
    detail = (
        f"{found.because.partition(';')[0]}; the ranks' losses add up to that of one process, and one process that is "
        "given the rows of a rank alone computes another: they have values of other ranks in them, and no gradient of "
        f"these. {without[0]} has no backward pass"
    )
    diagnosis = build_diagnosis(FaultName.CROSS_SAMPLE_GRADIENTS, detail)
    return replace(diagnosis, remedy="exchange them with a backward pass (torch.distributed.nn.functional), no detach")


def explain_process(ranks: Sequence[Computed], alone: Sequence[Computed], limit: float, step: int = 0) -> Diagnosis:
    """The name where one process computes another loss of the rows of a rank, and no exchange was seen."""
    off = [n for n, (rank, one) in enumerate(zip(ranks, alone, strict=True)) if not one.equals(rank, limit)]
    shown = "; ".join(f"{ranks[n].loss:.6g} on rank {n} and {alone[n].loss:.6g} on one process" for n in off[:2])
    read = "as the rank, a count or a statistic of the rank's part of the data, or a state"
    if step:
        read = f"and the steps up to {step} agree: look first at what a rank keeps of its own rows from step to step"
    detail = (
        f"one process that is given the rows of a rank alone computes another loss or gradient than it ({shown}), and "
        f"no exchange between ranks was seen within a pass (of those that are watched): it reads what is not in these "
        f"rows, {read}"
    )
    return build_diagnosis(FaultName.LOSS_BY_PROCESS, detail)


def _is_sum(mine: ScriptTrace, ranks: Sequence[Computed], limit: float, step: int) -> bool:
    total = add_gradients([rank.gradient for rank in ranks])
    reduced = mine.tensors("reduced gradients of rank 0", step)
    return predictions.reproduces(total, reduced, limit)


def _read(trace: ScriptTrace, rank: int, step: int) -> Computed:
    seen = trace.ranks[step][rank]
    return Computed(sum(seen.losses), add_gradients(read_local_gradients(trace, rank, step)))


def _compute_alone(runs: ScriptRuns, case: Case, mine: ScriptTrace, ranks: list[int], step: int) -> Computed | None:
    """What one process computes of the rows of these ranks, after steps of all; None where it was not given them."""
    name = f"1 process, on the rows of rank {' and '.join(map(str, ranks))} of {case.world_size}"
    runs.changes[name] = {
        "rows_of": mine.folder.name, "ranks": ranks, "steps": step + 1, "next_epoch": False,
        "since": step, "all_ranks": case.world_size,
    }  # fmt: skip
    trace = runs.record(Case(name, 1, {}, case.precision))
    runs.ended.pop(name, None)
    if trace is None:
        return None
    if len(trace.ranks) <= step:
        return None
    wanted = Counter(row for rank in ranks for row in mine.ranks[step][rank].inputs)
    reading = read_reading(trace.folder, 0)
    if not wanted or wanted != Counter(trace.ranks[step][0].inputs) or reading is None or reading.reason:
        return None
    made = _read(trace, 0, step)
    return replace(made, beside=reading.beside, standardised=reading.standardised, numbers=reads_numbers(trace))
