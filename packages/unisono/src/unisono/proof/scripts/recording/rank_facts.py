"""What each process of a script alone saw of a step, which no other process needs to have seen alike."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from unisono.proof.recording.trace import Trace

_RANKS_FILE = "ranks.json"  # in the folder of a trace


@dataclass
class RankFacts:
    """What one process alone saw of a step.

    Attributes:
        losses: the scalars that it called `backward` on, in order.
        inputs: a digest of every row that its model was given.
        shape: of the inputs, without their number of rows.
        clipped: digests of the gradients of the update, by parameter.
        buffers: digests, by buffer.
        initial: digests of the parameters and buffers with which it began, by name; of the first step.
        sizes: elements of the parameters with which it began, by name.
        begun: digests of the parameters as the update found them.
        cleared: whether gradients of backward passes before its own were cleared without an update.
        evaluating: the modules in evaluation mode during a backward pass that compute otherwise there.
        early: whether the update is made inside of the backward pass.
        parted: whether its model computes with pieces of parameters (tensor parallel), so that ranks share their rows.
        sources: how many rows each data set of a `DataLoader` has; -1 where that is not known.
        drawn: by generator that has drawn outside of forward passes since the update before, a digest of its state.
        settings: the numbers that its optimizer computes with beside learning rates, group by group and by name.
        exchanged: by collective inside of passes, with the line that has called it, what kind of exchange it is.
        line: the user's, of its last backward pass; known of several processes.
        watched: the numbers that its `ReduceLROnPlateau` was given since the update before.
    """

    losses: list[float] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    shape: str = ""
    clipped: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    initial: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)
    cleared: bool = False
    evaluating: list[str] = field(default_factory=list)
    early: bool = False
    parted: bool = False
    sources: list[int] = field(default_factory=list)
    drawn: dict[str, int] = field(default_factory=dict)
    settings: list[dict[str, list[float]]] = field(default_factory=list)
    exchanged: dict[str, str] = field(default_factory=dict)
    line: str = ""
    watched: list[float] = field(default_factory=list)


class ScriptTrace(Trace):
    """A trace of a script, with what each process alone saw.

    Args:
        folder: where it lies.
        precision: of the run, `fp64` or `fp32`.

    Attributes:
        is_cut: whether updates that were made are left out.
    """

    def __init__(self, folder: Path, precision: str) -> None:
        super().__init__(folder)
        self.precision, self.is_cut = precision, False

    def leave_out_from(self, step: int) -> None:
        """Leave out an update, by its number from 1, and those behind it."""
        del self.facts.steps[step - 1 :], self.ranks[step - 1 :]
        self.is_cut = True

    @cached_property
    def ranks(self) -> list[list[RankFacts]]:
        """Step by step and rank by rank; changed where some of it is found to mean something else."""
        values = json.loads((self.folder / _RANKS_FILE).read_text(encoding="utf-8"))
        return [[RankFacts(**rank) for rank in step] for step in values]


def write_rank_facts(folder: Path, ranks: Sequence[Sequence[RankFacts]]) -> None:
    """Write what the processes of a trace saw, step by step and rank by rank."""
    kept = [[asdict(rank) for rank in step] for step in ranks]
    (folder / _RANKS_FILE).write_text(json.dumps(kept), encoding="utf-8")


def fill_reports(everyone: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """What ranks report; what only some of them do (`rank_zero_only`) is taken of the first of these."""
    known: dict[str, float] = {}
    for values in everyone:
        known = {**values, **known}
    return [{**known, **values} for values in everyone if values]


def count_inputs(seen: Sequence[RankFacts]) -> Counter[str]:
    """How often the model was given each row in a step, on these ranks together."""
    return Counter(row for rank in seen for row in rank.inputs)


def have_same_inputs(seen: Sequence[RankFacts]) -> bool:
    """Whether the model was given the same inputs on every rank of a step."""
    return all(rank.inputs == seen[0].inputs for rank in seen[1:])


def describe_parts_of_rows(seen: Sequence[RankFacts], one: RankFacts) -> str:
    """In words, that ranks seem to share every row, a part of a sequence each; empty where they do not.

    Args:
        seen: what ranks saw of a step.
        one: what one process saw of it.
    """
    shapes = [rank.shape for rank in seen]
    if len(seen) == 1 or not one.inputs or one.shape in shapes:
        return ""
    if any(len(rank.inputs) != len(one.inputs) for rank in seen):
        return ""
    if sum(map(_count_elements, shapes)) != _count_elements(one.shape):
        return ""
    return (
        f"every rank is given {len(one.inputs)} rows of the shape {shapes[0]}, and one process as many of {one.shape}; "
        "where ranks share every row, a part of a sequence each, only the numbers of a DataLoader's rows tell that "
        "they are the same rows"
    )


def _count_elements(shape: str) -> int:
    """Of a row, by what `RankFacts.shape` says of its tensors."""
    sizes = re.findall(r"\(([^)]*)\)", shape)
    return sum(math.prod(int(size) for size in one.split(",") if size.strip()) for one in sizes)


def find_conclusive_steps(ranks: Sequence[Sequence[RankFacts]]) -> list[int]:
    """The steps in which ranks might have been given other rows: not where all inputs are constants."""
    if len(ranks) > 1 and len({tuple(seen[0].inputs) for seen in ranks}) == 1:
        return []
    return [step for step, seen in enumerate(ranks) if len({*seen[0].inputs}) > 1]


def reduced_moment(rank: int) -> str:
    """The moment of a trace that holds elements of the reduced gradients as one process has them."""
    return f"reduced gradients of rank {rank}"


def begun_moment(rank: int) -> str:
    """The moment of a trace that holds elements of what the script has changed since the update before."""
    return f"parameters changed on rank {rank}"


def buffers_moment(rank: int) -> str:
    """The moment of a trace that holds elements of the buffers as one process has them."""
    return f"buffers of rank {rank}"
