"""Which rows two runs of a script computed: whether they can be compared, and what may be said where they cannot."""

from __future__ import annotations

from collections import Counter

from unisono.proof.diagnoses import predictions
from unisono.proof.recording.gradient_sample import sample_elements
from unisono.proof.recording.local_gradients import read_local_gradients
from unisono.proof.scripts.judging.gradient_sums import ROUNDING, have_other_weights
from unisono.proof.scripts.judging.self_check import computes_in_parts
from unisono.proof.scripts.recording.rank_facts import (
    RankFacts,
    ScriptTrace,
    describe_parts_of_rows,
    find_conclusive_steps,
    have_same_inputs,
)

OWN_NUMBERS = "every rank numbers the rows of a data set of its own, so sample ids were not compared"
_UNSEEN = "which rows were computed could not be seen (no DataLoader, no tensors among the model's inputs)"

_OTHER_OF_A_NUMBER = (
    "step 1: ranks read rows of the same numbers, which are other inputs on each, and nothing was drawn for them: "
    "every rank has a data set of its own, or changes the same rows in a way of its own"
)


def drop_own_numbers(mine: ScriptTrace, reference: ScriptTrace) -> bool:
    """Forget the sample ids of a run whose ranks each number the rows of a data set of their own; whether they do.

    Row 0 of one rank's part of the data is not row 0 of another's. They do so where the ranks' data sets are shorter
    than that on one process, and add up to about its length, or where the same numbers came with other inputs and these
    are, together, those of one process. If all ranks were given the same inputs, they read the same rows, whatever the
    numbers.
    """
    if len(mine.ranks[0]) == 1 or not any(step.rows for step in mine.facts.steps):
        return False
    pairs = list(zip(mine.ranks, reference.ranks, mine.facts.steps, strict=False))
    given = any(rank.inputs for seen, _, _ in pairs for rank in seen)
    shared = given and all(have_same_inputs(seen) for seen, _, _ in pairs)
    parts = any(_are_parts([rank.sources for rank in seen], one[0].sources, given) for seen, one, _ in pairs)
    whole = given and all(_inputs_of(seen) == _inputs_of(one) for seen, one, _ in pairs)
    same = all(rows == step.by_rank[0] for _, _, step in pairs for rows in step.by_rank)
    if shared or not (parts or (same and whole)):
        return False
    for step in mine.facts.steps:
        step.rows, step.by_rank = [], [[] for _ in step.by_rank]
    return True


def count_shared_rows_once(mine: ScriptTrace, reference: ScriptTrace) -> bool:
    """Give a run whose ranks each compute a part of every row its rows once; whether they do so.

    All ranks draw the rows that one process has. Their models are given another shape than that of one process (a part
    of a sequence), or compute other gradients of the same inputs.
    """
    steps = list(zip(mine.ranks, reference.ranks, mine.facts.steps, reference.facts.steps, strict=False))
    if len(mine.ranks[0]) == 1 or not all(r.rows for _, _, _, r in steps):
        return False
    if any(sorted(rows) != r.rows for _, _, m, r in steps for rows in m.by_rank):
        return False
    other = all(rank.shape not in ("", one[0].shape) for seen, one, _, _ in steps for rank in seen)
    if not other and not computes_in_parts(mine):
        return False
    for seen, _, m, r in steps:
        m.rows, m.by_rank = list(r.rows), [[] for _ in m.by_rank]
        for rank in seen:
            rank.inputs, rank.parted = [], True
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


def explain_other_rows(mine: ScriptTrace, reference: ScriptTrace) -> tuple[str, int]:
    """Why two runs computed other rows, for a reason that need not be a fault, and from which step on.

    The reason is empty if they may be compared. What differs in a step before does so for another reason.
    """
    if not any(rank.inputs for rank in mine.ranks[0]) and not mine.facts.steps[0].rows:
        return _UNSEEN, 1
    for step, (m, r) in enumerate(zip(mine.facts.steps, reference.facts.steps, strict=False)):
        explain = _explain_numbers if m.rows and r.rows else _explain_inputs
        reason = explain(mine, reference, step)
        if reason is not None:
            return reason, step + 1
    return "", 0


def are_weighted_otherwise(mine: ScriptTrace, reference: ScriptTrace, step: int) -> bool:
    """Whether the gradients of a step, from 0, are sums of the same parts of the same rows, with other weights.

    Then the ranks have computed what one process computes of these rows, however they are padded, and only add it up
    otherwise.
    """
    m, r = mine.facts.steps[step], reference.facts.steps[step]
    if not m.rows or m.rows != r.rows or mine.precision != "fp64":
        return False
    own = [one for rank in range(len(m.by_rank)) for one in read_local_gradients(mine, rank, step)]
    ours, theirs = (sample_elements(trace.tensors("raw gradients", step)) for trace in (mine, reference))
    return have_other_weights(own, ours, theirs, mine.precision)


def are_parts_of(mine: ScriptTrace, reference: ScriptTrace, step: int) -> bool:
    """Whether the gradient of one process in a step, from 0, is a sum of what the ranks compute, with any weights."""
    own = [one for rank in range(len(mine.ranks[step])) for one in read_local_gradients(mine, rank, step)]
    whole = sample_elements(reference.tensors("raw gradients", step))
    return bool(whole) and predictions.fit_weights(whole, own, ROUNDING[mine.precision]) is not None


def _explain_numbers(mine: ScriptTrace, reference: ScriptTrace, step: int) -> str | None:
    """Of a step whose sample ids are known of both runs; None if its rows are the same, empty if that is a fault."""
    m, r = mine.facts.steps[step], reference.facts.steps[step]
    ours, theirs = mine.ranks[step], reference.ranks[step]
    if m.rows == r.rows:
        a, b = _inputs_of(ours), _inputs_of(theirs)
        if a == b or not b or len(a) != len(b) or ours[0].shape != theirs[0].shape:
            return None
        return (
            f"step {step + 1}: rows of the same numbers gave other inputs: other padding, each process's own split, "
            "augmentation or statistics (of the rows that it has), or rows mixed with others of their batch"
        )
    if m.has_equal_ranks and not step and _have_other_rows_of_a_number(mine):
        return _OTHER_OF_A_NUMBER
    if m.has_equal_ranks or step:  # a fault, which the ranks show
        return ""
    if len(m.rows) != len(r.rows):
        return _describe_batches(len(m.rows), len(r.rows), ours)
    return _describe_draws(mine, reference)


def _have_other_rows_of_a_number(mine: ScriptTrace) -> bool:
    """Whether no rank was given an input of another in any step, although nothing was drawn after the first.

    A `DataLoader` draws when an epoch begins. What is drawn later augments rows, which may be the same on all ranks.
    """
    for step, seen in enumerate(mine.ranks):
        every = [{*rank.inputs} for rank in seen]
        if not all(every) or len(set[str]().union(*every)) < sum(map(len, every)):
            return False
        if step and any(rank.drawn for rank in seen):
            return False
    return len(mine.ranks) > 1


def _explain_inputs(mine: ScriptTrace, reference: ScriptTrace, step: int) -> str | None:
    """The same of a step whose rows are known by what the model was given."""
    at, ours = f"step {step + 1}", mine.ranks[step]
    a, b = _inputs_of(ours), _inputs_of(reference.ranks[step])
    if a == b:  # none, where it is the second optimizer of a step
        return None
    if not (a and b):
        return _UNSEEN
    if len(ours) > 1 and have_same_inputs(ours):
        own = ours[0].inputs
        if sorted(own) == b:  # each computes a part of the model, or the same as the others
            return None
        if step in find_conclusive_steps(mine.ranks):
            return ""
        return f"{at}: all ranks are given the same {len(own)} inputs in every step, one process others"
    if step == 0 and len(a) != len(b):
        if parts := describe_parts_of_rows(ours, reference.ranks[step][0]):
            return f"{at}: {parts}"
        return _describe_batches(len(a), len(b), ours)
    for fewer, more, less, full in ((a, b, "many", "one process"), (b, a, "one process", "many")):
        if step and not Counter(fewer) - Counter(more):  # the steps before had the same rows
            left = len(more) - len(fewer)
            message = f"{at}: the model is given {len(more)} rows on {full}, and all but {left} of them on {less}"
            return f"{message}; the steps before agree"
    common = (Counter(a) & Counter(b)).total()
    some = f", but for {common} of {len(b)} rows" if common else ""
    dealt = "dealt out otherwise, or " if common else ""
    return (
        f"{at}: other inputs than on one process{some}; that is no fault if every process draws its own, and one if "
        f"rows are {dealt}scaled by statistics of a rank's part of the data, or mixed with others of their batch"
    )


def _describe_draws(mine: ScriptTrace, reference: ScriptTrace) -> str:
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
    message = "step 1: other rows than on one process; that is no fault if "
    if len({*rows}) < len(rows):
        return message + "every process draws its own"
    return message + (
        "the sampler only shuffles otherwise there (to compare, take a DistributedSampler, or in Accelerate "
        "DataLoaderConfiguration(use_seedable_sampler=True))"
    )


def _describe_batches(mine: int, reference: int, seen: list[RankFacts]) -> str:
    message = f"step 1: {mine} rows, and {reference} on one process, so the global batch is another; "
    if any(rank.cleared for rank in seen):
        return message + "gradients of other passes were cleared before the update (zero_grad between micro-batches?)"
    return message + "let an argument depend on the world, e.g. --batch-size '{16/world}'"
