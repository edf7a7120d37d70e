"""How the rows of several ranks can be given to one process, and whether it was given them."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.proof.scripts.judging.gradient_sums import find_differing
from unisono.proof.scripts.recording.rank_facts import ScriptTrace, count_inputs, describe_parts_of_rows
from unisono.proof.scripts.replay.reading import read_reading
from unisono.proof.scripts.replay.row_exchange import How
from unisono.runtime.text import join_names

NUMBERS = (
    "the script has no DataLoader and reads numbers of tensors (counts of rows or tokens?), which were not those of "
    "the ranks' rows"
)
_PLACES = (
    "step 1: of the same rows in another order, one process computes another gradient, so places in the batch have a "
    "meaning there, which rows of several ranks, put together, would not have"
)


@dataclass(frozen=True)
class ReplayPlan:
    """How rows are given to one process.

    Attributes:
        how: the ranks' batches are put together; None if it is not known.
        why: then, the reason.
    """

    how: How | None
    why: str = ""


def plan_replay(mine: ScriptTrace, reference: ScriptTrace) -> ReplayPlan:
    """Compare how many passes an update is made of: as many on one process as on each rank, or as on all together."""
    for rank in range(len(mine.ranks[0])):
        facts = read_reading(mine.folder, rank)
        if facts is None or facts.reason:
            return ReplayPlan(None, facts.reason if facts else "the script records itself")
    steps = zip(mine.ranks, reference.ranks, strict=False)
    parts = [describe_parts_of_rows(seen, one[0]) for seen, one in steps]
    if parts and all(parts):  # batches that are padded to their longest row may look so in one step
        return ReplayPlan(None, f"step 1: {parts[0]}")
    found: set[How] = set()
    for step, (seen, one) in enumerate(zip(mine.ranks, reference.ranks, strict=False), 1):
        several, alone = [len(rank.losses) for rank in seen], len(one[0].losses)
        if not alone or not all(several):
            return ReplayPlan(None, f"step {step}: backward() was called on no number, so passes are not told apart")
        if len({*several, alone}) == 1:
            found.add("side by side")
        elif len({*several}) == 1 and sum(several) == alone:
            found.add("in turn")
        else:
            counts = join_names([str(count) for count in several])
            counted = f"step {step}: one process makes {alone} backward passes, and the ranks make {counts}"
            return ReplayPlan(None, f"{counted}: neither as many as each, nor as all together")
    if len(found) > 1:
        return ReplayPlan(None, "passes per update change from step to step")
    return ReplayPlan(*found)


def explain_failure(mine: ScriptTrace, replayed: ScriptTrace, plain: ScriptTrace) -> str:
    """Why the run on one process has not computed the ranks' rows as a batch of its own; empty if it has.

    Args:
        mine: of several processes.
        replayed: of one, on their rows.
        plain: of one, on its own.
    """
    facts = read_reading(replayed.folder, 0)
    if facts is not None and facts.reason:
        return facts.reason
    if len(replayed.ranks) < len(mine.ranks):
        return f"one process made {len(replayed.ranks)} updates of them, and not {len(mine.ranks)}"
    seen = False
    for step, (ranks, one) in enumerate(zip(mine.ranks, replayed.ranks, strict=False), 1):
        wanted, given = count_inputs(ranks), count_inputs(one)
        seen |= bool(wanted)
        if wanted != given:
            left = (wanted - given).total()
            return (
                f"step {step}: {left} of {wanted.total()} rows reach the model otherwise than on the ranks (they are "
                "drawn, scaled or mixed between the DataLoader and the model, or an evaluation has read some)"
            )
    if not seen:
        return "which rows were computed could not be seen"
    return _PLACES if _depends_on_places(replayed, plain) else ""


def _depends_on_places(replayed: ScriptTrace, plain: ScriptTrace) -> bool:
    """Whether the same rows, in the first pass of both runs, gave another gradient in another order, without a draw.

    A script may take a batch apart by its places (true rows, then made ones), where those of ranks stand mixed.
    """
    mine, own = replayed.ranks[0][0], plain.ranks[0][0]
    if replayed.facts.random or plain.facts.random or len(mine.losses) != 1 or len(own.losses) != 1:
        return False  # draws, or other micro-batches, may make the difference
    if count_inputs([mine]) != count_inputs([own]):
        return False
    given, alone = (trace.tensors("raw gradients", 0) for trace in (replayed, plain))
    return bool(find_differing(given, alone, plain.precision))


def reads_numbers(replayed: ScriptTrace) -> bool:
    """Whether numbers that follow the rows may have stayed those of other rows."""
    facts = read_reading(replayed.folder, 0)
    return facts is not None and facts.numbers and not facts.has_batches
