"""Do many processes read what one reads? Answered apart from what they compute, with what is known of an epoch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses.remedies import Diagnosis, build_diagnosis
from unisono.proof.scripts.recording.rank_facts import ScriptTrace, count_inputs
from unisono.proof.scripts.recording.rows_seen import source_of
from unisono.proof.scripts.replay.reading import read_epochs, read_reading
from unisono.runtime.fault_names import FaultName

ROWS = "many processes read what one reads"
PER_DEVICE = "the size of a batch is per process"
_COUNT_ALL = "count and save how far all ranks together have read, and go on from there"
_BY_CHANCE = 1e6  # ways to choose rows, of which a shuffle takes one


def judge_reading(
    mine: ScriptTrace, reference: ScriptTrace, reason: str, own_numbers: bool = False, scaled: str = ""
) -> tuple[ComparedQuantity, Diagnosis | None]:
    """The answer for runs whose rows differ: PASS with what is no fault, FAIL, or ABSTAIN.

    Args:
        mine: of several processes.
        reference: of one, on its own rows.
        reason: why these are others.
        own_numbers: whether ranks number the rows of data sets of their own.
        scaled: in words, how the rows of the ranks are those of one process, scaled; empty if they are not.
    """
    ranks = range(len(mine.ranks[0]))
    epochs = [read_epochs(mine.folder, rank) for rank in ranks]
    update = max(
        sum(max(len(rank.inputs), len(rows)) for rank, rows in zip(seen, step.by_rank, strict=True))
        for seen, step in zip(mine.ranks, mine.facts.steps, strict=True)
    )
    unseen = ""
    for number, one in enumerate(read_epochs(reference.folder, 0)):
        each = [rows[number] for rows in epochs if number < len(rows)]
        if not len(one) or len(each) < len(epochs) or not all(map(len, each)):
            continue
        if own_numbers and not _are_parts_of_one(mine, reference, number):
            continue
        likely, said = describe_epoch(each, one, update)
        if likely is not None:
            return _fail(likely)
        unseen = unseen or said
    for describe, fault, remedy in (
        (describe_repeated_order, FaultName.SAME_ORDER_EVERY_EPOCH, ""),
        (describe_left_out, FaultName.DROPPED_ROWS, ""),
        (describe_read_again, FaultName.ROWS_TWICE, _COUNT_ALL),
        (describe_other_order, FaultName.ROWS_TWICE, ""),
    ):
        if said := describe(mine, reference):
            likely = build_diagnosis(fault, said)
            return _fail(replace(likely, remedy=remedy or likely.remedy))
    size = describe_size(mine, reference)
    numbered = bool(mine.facts.steps[0].rows and reference.facts.steps[0].rows)
    ours, theirs = _inputs_by_number(mine), _inputs_by_number(reference)
    common = [number for number in ours if number in theirs]
    if any(ours[number] != theirs[number] for number in common):  # scaled by a part of the data, perhaps
        size = unseen = ""
    elif size and not (numbered and unseen):
        unseen = "which rows of an epoch each reads could not be seen"
    if size or (numbered and unseen):
        seen = "" if common or not numbered else "no row was read by both, so what it holds is not compared"
        return ComparedQuantity(ROWS, "PASS", why="; ".join(filter(None, [size, unseen, seen]))), None
    if _draw_by_rank(mine):
        said = "every process draws for itself what it reads, by a generator that has another state on each"
        return ComparedQuantity(ROWS, "PASS", why=f"{said}, so that is not compared"), None
    if scaled:
        said = f"the ranks' rows are those of one process, scaled (by statistics of a rank's part of them?): {scaled}"
        remedy = "take what rows are scaled by of all rows, alike on every rank"
        return _fail(replace(build_diagnosis(FaultName.SAMPLES_BY_PROCESS, said), remedy=remedy))
    return ComparedQuantity(ROWS, "ABSTAIN", why=reason), None


def _fail(likely: Diagnosis) -> tuple[ComparedQuantity, Diagnosis]:
    return ComparedQuantity(ROWS, "FAIL", Difference(math.inf, 1, likely.because)), likely


def describe_left_out(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """In words, that ranks are given rows of one process and no others, and not all of them, in every update.

    Empty where they are not, and where gradients of some rows were cleared before the update.
    """
    lost = []
    for seen, one in zip(mine.ranks, reference.ranks, strict=False):
        ours, theirs = count_inputs(seen), count_inputs(one)
        if not ours or ours - theirs or ours == theirs or any(rank.cleared for rank in seen):
            return ""
        lost.append((ours.total(), theirs.total()))
    if len(lost) < 2:  # batches of another size may begin with the same rows
        return ""
    given, whole = lost[0]
    return (
        f"of the {whole} rows of update 1 on one process, {whole - given} reach no rank, nor do all rows of a later "
        "update: parts of ranks that are cut to the same length, or a last batch that is left out"
    )


def describe_repeated_order(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """In words, that ranks read the rows of their first epoch again, update by update, where one process shuffles anew.

    Empty where they do not, where one process has not come to its second epoch, and where chance may have done it.
    """
    ours, theirs = ([sorted(step.rows) for step in trace.facts.steps] for trace in (mine, reference))
    begins = _find_period(ours)
    if not begins or not all(ours) or not all(theirs) or not _shuffles_anew(reference):
        return ""
    seen = {row for rows in ours for row in rows}
    if math.comb(len(seen), len({*ours[0]})) ** (len(ours) - begins) < _BY_CHANCE:
        return ""
    return f"update {begins + 1} begins another epoch, and reads the rows of update 1 again; one process shuffles anew"


def describe_read_again(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """In words, that ranks are given rows again where one process goes on to new ones; empty where they are not.

    Until then they are given those of one process, as many in each update. That never reads one twice; so no new epoch
    has begun, and chance does not draw most rows of an update again. Rows are known by what the model is given.
    """
    pairs = [(count_inputs(seen), count_inputs(one)) for seen, one in zip(mine.ranks, reference.ranks, strict=False)]
    apart = next((step for step, (ours, theirs) in enumerate(pairs) if ours != theirs), 0)
    alone = sum((theirs for _, theirs in pairs), Counter[str]())
    before = {row for ours, _ in pairs[:apart] for row in ours}
    ours, theirs = pairs[apart]
    again = sum(count for row, count in ours.items() if row in before)
    if max(alone.values(), default=2) > 1 or ours.total() != theirs.total() or 2 * again <= ours.total():
        return ""
    return (
        f"of the {ours.total()} rows of update {apart + 1}, {again} are those of updates before it; one process, which "
        "read the same rows until then, goes on to new ones (a place in a stream that is counted by each rank alone?)"
    )


def describe_other_order(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """In words, that a rank takes its part of another order than the rest; empty where none does.

    The others have a part of what one process reads, update by update, so they take parts of one order. A rank that
    draws what it reads has such a part in the first update at most. Rows are known by what the model is given.
    """
    pairs = list(zip(mine.ranks, reference.ranks, strict=False))
    each = [[count_inputs([rank]) for rank in seen] for seen, _ in pairs]
    alone = [count_inputs(one) for _, one in pairs]
    read = sum((count_inputs(seen) for seen, _ in pairs), Counter[str]())
    whole = sum(alone, Counter[str]())
    apart = [
        number
        for number, updates in enumerate(zip(*each, strict=True))
        if any(own - theirs for own, theirs in zip(updates, alone, strict=True))
    ]
    own = sum((seen[number] for seen in each for number in apart), Counter[str]())
    known = sum(count for row, count in own.items() if row in whole)
    if len(pairs) < 2 or not apart or len(apart) == len(each[0]) or not all(alone) or read.total() != whole.total():
        return ""
    if max(whole.values()) > 1 or 2 * known <= own.total():  # drawn with replacement, or rows that no other has
        return ""
    twice = read.total() - len(read)
    if not twice:  # each shuffles what is its own
        return ""
    return (
        f"rank {apart[0]} takes its part of another order: in {len(pairs)} updates, {twice} of {whole.total()} rows "
        "are read twice; what the others read is a part of what one process reads, update by update"
    )


def _shuffles_anew(trace: ScriptTrace) -> bool:
    """Whether one process has come to the second epoch of a data set, in which rows stand in another order.

    Updates show no order that stays: they go on over the end of an epoch, or take rows of several data sets, whose
    epochs end apart. Where an update is made again as it was, batches stay, and chance may well put one first again.
    """
    updates = {tuple(sorted(step.rows)) for step in trace.facts.steps}
    sets: dict[int, list[list[int]]] = {}
    for step in trace.facts.steps:
        for row in step.by_rank[0]:
            sets.setdefault(source_of(row), []).append([row])
    anew = [rows for rows in sets.values() if len({row for (row,) in rows}) < len(rows) and not _find_period(rows)]
    return bool(anew) and len(updates) == len(trace.facts.steps)


def _find_period(steps: Sequence[Sequence[int]]) -> int:
    """After how many steps the rows are those of the first ones again, to the end; 0 if they never are."""
    for begins in range(1, len(steps)):
        if all(mine == first for mine, first in zip(steps[begins:], steps, strict=False)):
            return begins
    return 0


def _are_parts_of_one(mine: ScriptTrace, reference: ScriptTrace, number: int) -> bool:
    """Whether a data set is a part of one that every rank and one process have alike, by whose numbers rows are known.

    A rank may split what is its own, too: that is shorter than what one process splits, if it splits anything.
    """
    runs = [*((mine, rank) for rank in range(len(mine.ranks[0]))), (reference, 0)]
    readings = [read_reading(trace.folder, rank) for trace, rank in runs]
    *ours, theirs = (one.wholes[number] if one is not None and number < len(one.wholes) else 0 for one in readings)
    return len({*ours}) == 1 and ours[0] != 0 and theirs in (0, ours[0])


def _inputs_by_number(trace: ScriptTrace) -> dict[int, str]:
    result: dict[int, str] = {}
    for seen, step in zip(trace.ranks, trace.facts.steps, strict=True):
        for rank, rows in zip(seen, step.by_rank, strict=True):
            if len(rows) == len(rank.inputs):
                result |= dict(zip(rows, rank.inputs, strict=True))
    return result


def describe_epoch(
    ranks: Sequence[NDArray[np.int64]], one: NDArray[np.int64], update: int
) -> tuple[Diagnosis | None, str]:
    """The fault in how an epoch is dealt out, if there is one, and what is to be said of it.

    What deals out equally many rows to all ranks repeats or leaves out less than an update has.

    Args:
        ranks: the rows of an epoch of each.
        one: of one process.
        update: rows of an update of all ranks.
    """
    wanted, every = {*one.tolist()}, [{*rows.tolist()} for rows in ranks]
    once = len(wanted) == len(one) and all(len(rows) == len(own) for rows, own in zip(ranks, every, strict=True))
    if once and all(own == wanted for own in every):
        return None, f"every process reads all {len(one)} rows in an epoch, in an order of its own"
    joined = np.concatenate([*ranks])
    union = {*joined.tolist()}
    twice, never, new = len(joined) - len(union), len(wanted - union), len(union - wanted)
    if len(wanted) < len(one):  # drawn with replacement
        return None, ""
    counts = f"of {len(one)} rows in an epoch, {twice} are read twice and {never} never"
    if new > update or (new and twice > update):
        shown = f"; {new} more are read, which one process does not train on"
        return build_diagnosis(FaultName.SPLIT_BY_RANK, counts + shown), counts + shown
    if max(twice, never) >= max(update, 1):
        return build_diagnosis(FaultName.ROWS_TWICE if twice else FaultName.DROPPED_ROWS, counts), counts
    if twice or never:
        return None, f"another order of the same epoch; to deal out equally many, {counts.removeprefix('of ')}"
    return None, f"another order of the same {len(one)} rows of an epoch, each read once"


def describe_rates(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """What the learning rate does where an update has other rows than on one process."""
    pairs = [
        (step.lr[0], one.lr[0]) for step, one in zip(mine.facts.steps, reference.facts.steps, strict=False) if step.lr
    ]
    ratios = [a / b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=False) if b]
    if not ratios or all(math.isclose(ratio, 1.0, rel_tol=1e-9) for ratio in ratios):
        return "the learning rate is that of one process"
    if all(math.isclose(ratio, ratios[0], rel_tol=1e-9) for ratio in ratios):
        return f"the learning rate is {ratios[0]:.4g} times that of one process"
    step, ours, theirs = next(
        (number, a[0], b[0])
        for number, (a, b) in enumerate(pairs, 1)
        if a and b and not math.isclose(a[0], b[0], rel_tol=1e-9)
    )
    return f"the schedule is another: {ours:.4g} in step {step}, and {theirs:.4g} on one process"


def describe_size(mine: ScriptTrace, reference: ScriptTrace) -> str:
    """That an update has as many times the rows of one process as there are ranks; empty if it has not."""
    counts = []
    for seen, step, one, theirs in zip(
        mine.ranks, mine.facts.steps, reference.ranks, reference.facts.steps, strict=False
    ):
        ours = len(step.rows) or sum(len(rank.inputs) for rank in seen)
        counts.append((ours, len(theirs.rows) or len(one[0].inputs)))
    size = len(mine.ranks[0])
    ours, alone = counts[0]
    if not alone or ours != size * alone:
        return ""
    return f"{PER_DEVICE}: {ours} rows in an update, and {alone} on one process; {describe_rates(mine, reference)}"


def _draw_by_rank(mine: ScriptTrace) -> bool:
    """Whether every rank has drawn outside of forward passes, from a generator that no other rank has alike."""
    for step in mine.ranks:
        for name in set.intersection(*({*rank.drawn} for rank in step)):
            if len({rank.drawn[name] for rank in step}) == len(step):
                return True
    return False
