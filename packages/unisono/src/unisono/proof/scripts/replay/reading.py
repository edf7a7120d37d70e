"""How a run has read its rows, rank by rank: what is known when the script has ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ReadingFacts:
    """What is known of how one rank has read.

    Attributes:
        has_batches: whether by a `DataLoader`.
        numbers: whether the script has read numbers of tensors that may be counts of rows.
        reason: why rows could not be kept, or given; empty if all were.
        unseeded: generators that were drawn from without a seed of the script's own.
        lower: parameters of a lower precision than float64.
        next_epoch: the update that is the first of the second epoch; 0 where that is not known.
        ended: whether the script came to its own end.
        wholes: of every data set that is a part (`Subset`) of another, how many rows that has, by whose numbers its
            rows are known; 0 of others, -1 where that is not known.
        evaluated: the rows of the first evaluation, by their numbers.
        evaluated_of: how many rows its data set has; -1 where that is not known.
        evaluated_after: how many updates.
        numbers_of_it: that the script has read after it, and after the last exchange between ranks.
        scaled: in words, how the rows of the ranks are those that this run reads, scaled; empty if they are not.
        beside: in words, how what ranks give to the loss past the model is another than this run has for the same rows.
        standardised: whether all of that is what a statistic of the rows of one rank makes.
    """

    has_batches: bool
    numbers: bool
    reason: str
    unseeded: list[str] = field(default_factory=list)
    lower: list[str] = field(default_factory=list)
    next_epoch: int = 0
    ended: bool = False
    wholes: list[int] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    evaluated_of: int = -1
    evaluated_after: int = 0
    numbers_of_it: list[float] = field(default_factory=list)
    scaled: str = ""
    beside: list[str] = field(default_factory=list)
    standardised: bool = False


def write_reading(folder: Path, rank: int, facts: ReadingFacts, epochs: Sequence[NDArray[np.int64]]) -> None:
    """Write the facts, and the rows of an epoch of every data set."""
    _facts_file(folder, rank).write_text(json.dumps(asdict(facts)), encoding="utf-8")
    np.savez(_epochs_file(folder, rank), *epochs)


def read_reading(folder: Path, rank: int) -> ReadingFacts | None:
    """What `write_reading` has written; None of a script that records itself."""
    file = _facts_file(folder, rank)
    return ReadingFacts(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def read_epochs(folder: Path, rank: int) -> list[NDArray[np.int64]]:
    """The rows of an epoch of every data set; none of those without numbers."""
    file = _epochs_file(folder, rank)
    if not file.exists():
        return []
    with np.load(file) as arrays:
        return [arrays[f"arr_{number}"] for number in range(len(arrays.files))]


def _facts_file(folder: Path, rank: int) -> Path:
    return folder / f"reading-{rank}.json"


def _epochs_file(folder: Path, rank: int) -> Path:
    return folder / f"epochs-{rank}.npz"
