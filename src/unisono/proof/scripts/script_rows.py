"""Which rows two runs of a script computed: whether they can be compared, and what may be said where they cannot."""

from __future__ import annotations

from collections import Counter

from unisono.proof.recording.trace import Trace
from unisono.proof.scripts.rank_facts import (
    RankFacts,
    all_given_the_same,
    find_telling_steps,
    read_rank_facts,
    write_rank_facts,
)
from unisono.proof.scripts.self_check import computes_in_parts

OWN_NUMBERS = "every rank numbers the rows of a data set of its own, so sample ids were not compared"


def drop_own_numbers(mine: Trace, reference: Trace) -> bool:
    """Forget the sample ids of a run whose ranks each number the rows of a data set of their own; whether they do.

    Row 0 of one rank's part of the data is not row 0 of another's. They do so where the ranks' data sets are shorter
    than that on one process, and add up to about its length, or where the same numbers came with other inputs and these
    are, together, those of one process. If all ranks were given the same inputs, they read the same rows, whatever the
    numbers.
    """
    ours, theirs = read_rank_facts(mine.folder), read_rank_facts(reference.folder)
    if len(ours[0]) == 1 or not any(step.rows for step in mine.facts.steps):
        return False
    pairs = list(zip(ours, theirs, mine.facts.steps, strict=False))
    given = any(rank.inputs for seen, _, _ in pairs for rank in seen)
    shared = given and all(all_given_the_same(seen) for seen, _, _ in pairs)
    parts = any(_are_parts([rank.sources for rank in seen], one[0].sources, given) for seen, one, _ in pairs)
    whole = given and all(_inputs_of(seen) == _inputs_of(one) for seen, one, _ in pairs)
    same = all(rows == step.by_rank[0] for _, _, step in pairs for rows in step.by_rank)
    if shared or not (parts or (same and whole)):
        return False
    for step in mine.facts.steps:
        step.rows, step.by_rank = [], [[] for _ in step.by_rank]
    return True


def count_shared_rows_once(mine: Trace, reference: Trace, precision: str) -> bool:
    """Give a run whose ranks each compute a part of every row its rows once; whether they do so.

    All ranks draw the rows that one process has. Their models are given another shape than that of one process (a part
    of a sequence), or compute other gradients of the same inputs.
    """
    ours, theirs = read_rank_facts(mine.folder), read_rank_facts(reference.folder)
    steps = list(zip(ours, theirs, mine.facts.steps, reference.facts.steps, strict=False))
    if len(ours[0]) == 1 or not all(r.rows for _, _, _, r in steps):
        return False
    if any(sorted(rows) != r.rows for _, _, m, r in steps for rows in m.by_rank):
        return False
    other = all(rank.shape not in ("", one[0].shape) for seen, one, _, _ in steps for rank in seen)
    if not other and not computes_in_parts(mine, ours, precision):
        return False
    for seen, _, m, r in steps:
        m.rows, m.by_rank = list(r.rows), [[] for _ in m.by_rank]
        for rank in seen:
            rank.inputs, rank.parted = [], True
    write_rank_facts(mine.folder, ours)
    return True


def _are_parts(ranks: list[list[int]], whole: list[int], given: bool) -> bool:
    """Whether a data set has been dealt out to ranks, with a row more or less on each.

    Where inputs are seen to differ, by a hash of the rows, perhaps: nearer to one data set than to one for each rank.
    """
    each = [(length, own) for length, own in zip(whole, zip(*ranks, strict=False), strict=False) if max(own) < length]
    most = [len(ranks) * length - sum(own) if given else len(ranks) for length, own in each]
    return any(abs(sum(own) - length) <= limit for (length, own), limit in zip(each, most, strict=True))


def _inputs_of(seen: list[RankFacts]) -> list[str]:
    return sorted(row for rank in seen for row in rank.inputs)


def explain_other_rows(mine: Trace, reference: Trace) -> tuple[str, int]:
    """Why two runs computed other rows, for a reason that need not be a fault, and from which step on.

    The reason is empty if they may be compared. What differs in a step before does so for another reason.
    """
    unseen = "which rows were computed could not be seen (no DataLoader, no tensors among the model's inputs)"
    theirs, ours = read_rank_facts(reference.folder), read_rank_facts(mine.folder)
    if not any(rank.inputs for rank in ours[0]) and not mine.facts.steps[0].rows:
        return unseen, 0
    for step, (m, r) in enumerate(zip(mine.facts.steps, reference.facts.steps, strict=False)):
        at = f"step {step + 1}"
        a, b = ([row for rank in seen[step] for row in rank.inputs] for seen in (ours, theirs))
        if m.rows and r.rows:
            if m.rows == r.rows:
                same_shape = ours[step][0].shape == theirs[step][0].shape
                if a and b and same_shape and len(a) == len(b) and sorted(a) != sorted(b):
                    return (
                        f"{at}: rows of the same numbers gave other inputs: other padding, each process's own split, "
                        "augmentation or statistics (of the rows that it has), or rows mixed with others of their batch"
                    ), step + 1
                continue
            if len(m.by_rank) > 1 and all(rank == m.by_rank[0] for rank in m.by_rank):
                return "", 0  # a fault, which the ranks show
            if step == 0 and len(m.rows) != len(r.rows):
                return _describe_batches(len(m.rows), len(r.rows), ours[0]), 1
            return (_describe_draws(mine, reference) if step == 0 else ""), 1
        if not a and not b:  # the second optimizer of a step
            continue
        if not (a and b):
            return unseen, step + 1
        if len(ours[step]) > 1 and all_given_the_same(ours[step]) and sorted(ours[step][0].inputs) == sorted(b):
            continue  # every rank has all rows, whether it computes a part of the model or the same as the others
        if sorted(a) != sorted(b):
            if len(ours[step]) > 1 and all_given_the_same(ours[step]):
                if step in find_telling_steps(ours):
                    return "", 0
                each = len(ours[step][0].inputs)
                return f"{at}: all ranks are given the same {each} inputs in every step, one process others", step + 1
            if step == 0 and len(a) != len(b):
                return _describe_batches(len(a), len(b), ours[0]), 1
            for fewer, more, less, full in ((a, b, "many", "one process"), (b, a, "one process", "many")):
                if step and not Counter(fewer) - Counter(more):  # the steps before had the same rows
                    left = len(more) - len(fewer)
                    told = f"{at}: the model is given {len(more)} rows on {full}, and all but {left} of them on {less}"
                    return f"{told}; the steps before agree", step + 1
            shared = (Counter(a) & Counter(b)).total()
            some = f", but for {shared} of {len(b)} rows" if shared else ""
            dealt = "dealt out otherwise, or " if shared else ""
            return (
                f"{at}: other inputs than on one process{some}; that is no fault if every process draws its own, "
                f"and one if rows are {dealt}scaled by statistics of a rank's part of the data, or mixed with others "
                "of their batch"
            ), step + 1
    return "", 0


def _describe_draws(mine: Trace, reference: Trace) -> str:
    """Why other rows need be no fault; empty if they are one.

    A rank that takes its stride of a draw has a part of the same global batch in every step. If another rank has not,
    it takes its stride of another draw. Where each rank draws for itself, none has such a part but in the first step.
    """
    pairs = list(zip(mine.facts.steps, reference.facts.steps, strict=False))
    ranks = range(len(mine.facts.steps[0].by_rank))
    parts = [all(not Counter(m.by_rank[rank]) - Counter(r.rows) for m, r in pairs) for rank in ranks]
    if len(pairs) > 1 and any(parts) and not all(parts):
        return ""
    rows = mine.facts.steps[0].rows
    told = "step 1: other rows than on one process; that is no fault if "
    if len({*rows}) < len(rows):
        return told + "every process draws its own"
    return told + (
        "the sampler only shuffles otherwise there (to compare, take a DistributedSampler, or in Accelerate "
        "DataLoaderConfiguration(use_seedable_sampler=True))"
    )


def _describe_batches(mine: int, reference: int, seen: list[RankFacts]) -> str:
    told = f"step 1: {mine} rows, and {reference} on one process, so the global batch is another; "
    if any(rank.cleared for rank in seen):
        return told + "gradients of other passes were cleared before the update (zero_grad between micro-batches?)"
    return told + "let an argument depend on the world, e.g. --batch-size '{16/world}'"
