"""Small traces with differences in them, for tests of what these are called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from unisono.proof.comparison import ComparedQuantity, Difference
from unisono.proof.diagnoses import diagnosis
from unisono.proof.diagnoses.remedies import Diagnosis
from unisono.proof.recording.trace import Part, RunFacts, StepFacts, Trace, write_facts, write_tensors


def trace(folder: Path, counts: list[list[int]], gradient: Any = None, loss: float | None = 1.0, **facts: Any) -> Trace:
    """Steps in which ranks computed so many rows; of no row twice."""
    folder.mkdir()
    steps, row = [], 0
    for number, of_ranks in enumerate(counts):
        by_rank = []
        for count in of_ranks:
            by_rank.append(list(range(row, row + count)))
            row += count
        rows = [row for rank in by_rank for row in rank]
        steps.append(StepFacts(rows, by_rank, loss, {}, 1.0, [[0.1]] * len(of_ranks), [{}] * len(of_ranks)))
        write_tensors(folder, "raw gradients", number, gradient or {"a": np.ones(3), "b": np.arange(3.0)})
        write_tensors(folder, "clipped gradients", number, gradient or {"a": np.ones(3), "b": np.arange(3.0)})
    write_facts(folder, RunFacts(["a", "b"], ["frozen"], steps=steps, **facts))
    return Trace(folder)


def known(found: tuple[Trace, Trace], counts: list[float], gradient: bool = True) -> None:
    """Write down, in both traces, what two ranks with one micro-batch each add: to the loss, and to the gradient."""
    mine, reference = found
    for trace in found:
        for step in trace.facts.steps:
            step.parts = [
                Part(n, n if trace is mine else 0, 4, {"next": total}, {"next": count}, {"next": 1.0})
                for n, (total, count) in enumerate(zip(SUMS, counts, strict=True))
            ]
            step.terms = {"next": sum(SUMS) / sum(counts)}
            step.loss = step.terms["next"]
    for number in range(len(reference.facts.steps) if gradient else 0):
        values = {f"next/{n}/{name}": value for n, part in enumerate(TERMS) for name, value in part.items()}
        write_tensors(reference.folder, "term gradients", number, values)
        for moment in ("raw gradients", "clipped gradients"):
            write_tensors(reference.folder, moment, number, summed([1 / sum(counts)] * 2))


def summed(weights: list[float]) -> dict[str, Any]:
    return {name: sum(w * part[name] for w, part in zip(weights, TERMS, strict=True)) for name in ("a", "b")}


def pair(folder: Path, observed: Any, counts: Any = (2.0, 6.0), **facts: Any) -> tuple[Trace, Trace]:
    """A run on two ranks with this gradient, and its reference; what micro-batches add is known."""
    folder.mkdir(exist_ok=True)
    result = trace(folder / "mine", EVEN, observed, **facts), trace(folder / "one", [[8], [8]])
    known(result, list(counts))
    return result


def diagnose(
    found: tuple[Trace, Trace], *compared: ComparedQuantity, world_size: int = 2, starts: Any = ()
) -> Diagnosis:
    """Of what differs first."""
    told = diagnosis.diagnose(*found, compared, world_size, starts)
    assert told is not None
    return told


def name(found: tuple[Trace, Trace], *compared: ComparedQuantity, world_size: int = 2) -> str:
    return diagnose(found, *compared, world_size=world_size).fault


SUMS = [7.0, 30.0]
RNG = np.random.default_rng(5)
TERMS = [{"a": RNG.normal(size=6), "b": RNG.normal(size=8)} for _ in range(2)]  # gradients of the micro-batches' sums
OTHER = {"a": np.array([1.0, -2.0, 1.0]), "b": np.array([2.0, 1.0, 0.0])}  # of another direction
EVEN, UNEVEN = [[4, 4], [4, 4]], [[4, 4], [4, 2]]


def told(
    folder: Path, first: ComparedQuantity, *more: ComparedQuantity, counts: Any = EVEN, starts: Any = (), **facts: Any
) -> Diagnosis:
    folder.mkdir(exist_ok=True)
    mine = trace(folder / "mine", counts, **facts)
    reference = trace(folder / "one", [[sum(step)] for step in counts])
    return diagnose((mine, reference), first, *more, starts=starts)


def failed(
    quantity: str, step: int, name: str = "a", size: float = 0.5, mine: Any = None, reference: Any = None
) -> ComparedQuantity:
    return ComparedQuantity(quantity, "FAIL", Difference(size, step, name, mine, reference))


def passed(quantity: str) -> ComparedQuantity:
    return ComparedQuantity(quantity, "PASS")


def reported(found: tuple[Trace, Trace], value: float) -> ComparedQuantity:
    """A loss that is the first to differ, in step 1."""
    step, one = found[0].facts.steps[0], found[1].facts.steps[0].loss
    step.terms, step.loss = {"next": value}, value
    return failed("loss", 1, "loss", size=0.3, mine=value, reference=one)
