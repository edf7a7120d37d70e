"""What a pattern of differences says: the likely fault, in words, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.proof.compare import Compared, first_failed
from unisono.proof.trace import Array, Trace


@dataclass(frozen=True)
class Diagnosis:
    """The likely fault.

    Attributes:
        fault: a short name for it.
        because: the pattern that says so.
        remedy: what to do.
    """

    fault: str
    because: str
    remedy: str


_CLOSE = 1e-3


def diagnose(mine: Trace, reference: Trace, compared: Sequence[Compared], world_size: int) -> Diagnosis | None:
    """The likely fault behind the first quantity that failed, or None if nothing did."""
    if mine.facts.fault:
        return of_error(mine.facts.fault)
    first = first_failed(compared)
    if first is None:
        return None
    step = first.worst.step
    failed = {c.quantity: c for c in compared if c.mark == "FAIL" and c.worst.step == step}  # what comes later follows
    rule = _RULES.get(first.quantity)
    if rule:
        return rule(mine, reference, failed, world_size)
    fault, remedy = _INVARIANTS.get(first.quantity, ("unknown", "compare the two runs at the step that is named"))
    return Diagnosis(fault, first.worst.name, remedy)


def of_error(text: str) -> Diagnosis:
    """What the error means that ended a run."""
    for word, fault, remedy in (
        ("initial weights of rank", "initialisation depends on the rank", "draw from the seeded generator in build()"),
        ("replicas differ", "gradients were not synchronised", "let the forward pass go through the wrapper"),
        (
            "optimizer does not hold",
            "optimizer built before wrapping",
            "build the optimizer after the model is wrapped",
        ),
        ("update changed none", "optimizer on stale parameters", "build the optimizer after the model is wrapped"),
        ("master weights", "wrong master dtype", "keep parameters in the dtype in which they are updated"),
        ("left parameters out", "a pass leaves parameters out", "set layout.find_unused_parameters=true"),
        ("not finite", "numbers that are not finite", "look at the rows that are named"),
    ):
        if word in text:
            return Diagnosis(fault, text, remedy)
    return Diagnosis("the run ended with an error", text, "mend it first")


# one rule per quantity: what it means that this is the first to differ ------------------------------------------------

Failed = dict[str, Compared]
Rule = Callable[[Trace, Trace, Failed, int], Diagnosis]


def _sample_ids(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    number = failed["sample ids"].worst.step - 1
    if number >= min(len(mine.facts.steps), len(reference.facts.steps)):
        return Diagnosis(
            "the last batch is dropped", f"{len(mine.facts.steps)} steps instead of {len(reference.facts.steps)}",
            "do not drop a last batch that does not divide; give its rows to the ranks that it has rows for",
        )  # fmt: skip
    m, r = mine.facts.steps[number], reference.facts.steps[number]
    if len(m.by_rank) > 1 and all(rank == m.by_rank[0] for rank in m.by_rank):
        return Diagnosis(
            "every rank reads the same rows", f"step {number + 1}: all ranks computed rows {m.by_rank[0][:6]}",
            "give each rank its own slice of the global batch (a DistributedSampler, or Order)",
        )  # fmt: skip
    if len(m.rows) < len(r.rows):
        return Diagnosis(
            "rows are dropped", f"step {number + 1} has {len(m.rows)} rows instead of {len(r.rows)}",
            "do not drop the last batch; give it to the ranks that it has rows for",
        )  # fmt: skip
    if len(m.rows) > len(r.rows):
        return Diagnosis(
            "rows are repeated to fill the batch", f"step {number + 1} computed {len(m.rows)} rows, "
            f"{len(set(m.rows))} of them different", "count padding rows with weight zero, or do not pad",
        )  # fmt: skip
    if _period(mine) and not _period(reference):
        return Diagnosis(
            "every epoch has the same order", f"the order of samples repeats after {_period(mine)} rows",
            "tell the sampler its epoch (set_epoch), or key the order by it",
        )  # fmt: skip
    if number and m.rows in (mine.facts.steps[number - 1].rows, mine.facts.steps[0].rows):
        return Diagnosis(
            "data are replayed", f"step {number + 1} computed rows that earlier steps had computed already",
            "keep the position in the order with the checkpoint, or set the epoch of the sampler",
        )  # fmt: skip
    if sorted(m.rows) == sorted(r.rows):
        return Diagnosis(
            "the order inside the global batch depends on the world size", "same rows, other places",
            "slice the global batch into contiguous stretches",
        )  # fmt: skip
    return Diagnosis(
        "the order of samples depends on the world size", f"step {number + 1} computed other rows",
        "make the order a function of seed and position alone",
    )  # fmt: skip


def _period(trace: Trace) -> int | None:
    """After how many rows the order of samples begins again, if it does."""
    rows = [row for step in trace.facts.steps for row in step.rows]
    again = next((n for n, row in enumerate(rows) if n and row == rows[0]), None)
    return again if again and rows[again:] == rows[: len(rows) - again] else None


def _samples(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "augmentation depends on rank or worker", f"same rows, other samples in {failed['samples'].worst.name}",
        "draw from a generator that is keyed by seed, epoch and row",
    )  # fmt: skip


def _initial(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    a, b = mine.tensors("initial parameters"), reference.tensors("initial parameters")
    if a.keys() != b.keys():
        extra = sorted({*a} ^ {*b})
        return Diagnosis(
            "tied weights were untied", f"on one side only: {', '.join(extra[:3])}", "tie them after wrapping"
        )
    return Diagnosis(
        "initialisation depends on the layout", f"'{failed['initial parameters'].worst.name}' begins with other values",
        "initialise from a seed that no rank changes, before the model is sharded",
    )  # fmt: skip


def _loss(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    worst = failed["loss"].worst
    if worst.step > 1 and mine.facts.random:
        return Diagnosis(
            "the state was not carried on", f"steps before step {worst.step} agree, and its rows and weights too",
            "save and load every buffer and random state",
        )  # fmt: skip
    if "raw gradients" not in failed:
        return Diagnosis(
            "the loss is not summed over ranks", "the gradients agree, the reported loss does not",
            "reduce sums and counts over ranks before dividing",
        )  # fmt: skip
    if ratio := _ratio(worst.mine, worst.reference, world_size):
        return Diagnosis(
            f"the loss is scaled by {ratio}", f"{worst.mine:.6g} instead of {worst.reference:.6g}",
            "divide the summed loss once, by the count over all ranks",
        )  # fmt: skip
    if mine.facts.random:
        return Diagnosis(
            "randomness depends on the rank", "rows and weights agree, the loss does not, and the model draws",
            "key every draw by seed, step and global micro-batch; without draws it would be a mean of means",
        )  # fmt: skip
    return Diagnosis(
        "a mean of means", "rows and weights agree, the loss does not: parts with different counts were averaged",
        "return sums, and counts that depend on the batch alone",
    )  # fmt: skip


def _gradients(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    number = failed["raw gradients"].worst.step - 1
    if not mine.facts.steps[number].clean:
        return Diagnosis(
            "gradients of the step before are added", f"step {number + 1} began with gradients",
            "clear gradients after every update",
        )  # fmt: skip
    a, b = mine.tensors("raw gradients", number), reference.tensors("raw gradients", number)
    if missing := sorted({*b} - {*a}):
        return Diagnosis("parameters without gradient", f"no gradient for {', '.join(missing[:3])}", "wrap all of them")
    scales = [scale for name in b if (scale := _scale(a[name], b[name])) is not None]
    alike = len(scales) > len(b) // 2 and max(scales) - min(scales) < _CLOSE * abs(max(scales))
    if alike and abs(scales[0] - 1) > _CLOSE:
        ratio = _ratio(scales[0], 1.0, world_size) or f"{scales[0]:.4g}"
        return Diagnosis(
            f"all gradients are scaled by {ratio}", f"every tensor is {scales[0]:.6g} times what it should be",
            "sum gradients over ranks and divide once: DDP and FSDP divide by the number of processes themselves",
        )  # fmt: skip
    wrong = [name for name in b if np.linalg.norm(np.float64(a[name]) - b[name]) > _CLOSE * np.linalg.norm(b[name])]
    if wrong and len(wrong) <= len(b) // 2:
        return Diagnosis(
            "some parameters are not synchronised", f"only {', '.join(wrong[:3])} differ",
            "do not let the wrapper ignore parameters, and use all of them through it",
        )  # fmt: skip
    limit = _size(reference.tensors("clipped gradients", number))
    if _size(a) <= limit * (1 + 1e-6) < _size(b):
        return Diagnosis(
            "clipped before synchronisation", f"the raw gradient is no longer than the limit of {limit:.4g} already",
            "clip once, after all gradients are reduced",
        )  # fmt: skip
    size = failed["raw gradients"].worst.size
    if size < 1e-1 and "loss" not in failed:
        return Diagnosis(
            "gradients are reduced in a lower precision", f"all differ a little ({size:.0e}), the loss does not",
            "reduce gradients in fp32 or wider",
        )  # fmt: skip
    return Diagnosis(
        "gradients are those of a part of the batch", "they differ in direction, tensor by tensor",
        "synchronise with the last micro-batch, not the first; call the wrapper, not the module inside",
    )  # fmt: skip


def _norm(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    worst = failed["gradient norm"].worst
    if worst.size < _CLOSE:
        return Diagnosis(
            "the norm is added up in too low a precision", f"{worst.mine:.9g} instead of {worst.reference:.9g}",
            "add up squares in fp64, or in the same pieces on every layout",
        )  # fmt: skip
    return Diagnosis(
        "the norm is that of a part of the gradient", f"{worst.mine:.6g} instead of {worst.reference:.6g}, and the "
        "gradients agree", "add up squared norms over the ranks that hold shards, once",
    )  # fmt: skip


def _clipped(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "clipping by a local norm, or before synchronisation", "gradients and norm agree before clipping, not after",
        "clip once, after all gradients are reduced, by the norm of the whole gradient",
    )  # fmt: skip


def _lr(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    worst = failed["learning rate"].worst
    rates = mine.facts.steps[worst.step - 1].lr
    if any(rank != rates[0] for rank in rates):
        return Diagnosis(
            "the learning rate differs between ranks", f"rank {worst.ranks[0]} has {worst.mine:.4g}",
            "compute it from the step, on every rank",
        )  # fmt: skip
    return Diagnosis(
        "the schedule is stepped once per process", f"{worst.mine:.4g} instead of {worst.reference:.4g} in step "
        f"{worst.step}", "make the learning rate a function of the update, not of calls",
    )  # fmt: skip


def _optimizer(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "the optimizer's state was lost", f"'{failed['optimizer state'].worst.name}' differs, and all gradients agree",
        "save and load the whole state of the optimizer",
    )  # fmt: skip


def _parameters(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    worst = failed["parameters"].worst
    if worst.name in mine.facts.frozen:
        return Diagnosis("a frozen parameter is trained", worst.name, "leave it out of the optimizer")
    return Diagnosis(
        "the update is not that of the gradients", f"'{worst.name}' differs, and all gradients agree",
        "let nothing but the optimizer change parameters",
    )  # fmt: skip


def _buffers(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "statistics are those of one process", f"buffer '{failed['buffers'].worst.name}' differs, parameters agree",
        "synchronise batch statistics over ranks, or use a norm without them",
    )  # fmt: skip


def _metrics(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "a metric of one rank, or a mean of means", "everything before it agrees",
        "report sums and counts, reduced over ranks",
    )  # fmt: skip


def _replicas(mine: Trace, reference: Trace, failed: Failed, world_size: int) -> Diagnosis:
    return Diagnosis(
        "replicas drift apart", f"copies of {failed['replicas'].worst.name} differ, and rank 0's are right",
        "let all ranks make the same update",
    )  # fmt: skip


_RULES: dict[str, Rule] = {
    "sample ids": _sample_ids,
    "samples": _samples,
    "replicas": _replicas,
    "initial parameters": _initial,
    "loss": _loss,
    "raw gradients": _gradients,
    "gradient norm": _norm,
    "clipped gradients": _clipped,
    "learning rate": _lr,
    "optimizer state": _optimizer,
    "parameters": _parameters,
    "buffers": _buffers,
    "metrics": _metrics,
    "evaluation": _metrics,
}

_INVARIANTS = {
    "the loss moved": ("nothing is learnt", "look at the learning rate, and at what the optimizer holds"),
    "there is a gradient": ("no gradient", "let the loss depend on the model"),
    "steps begin without gradients": ("gradients of the step before are added", "clear gradients after every update"),
    "evaluation repeats": ("evaluation draws at random", "switch to evaluation mode, and key what it draws"),
    "evaluation leaves things as they were": (
        "evaluation changes the training",
        "restore modes, buffers and generators",
    ),
    "ranks computed different rows": ("every rank reads the same rows", "give each rank its own slice"),
    "trained parameters moved": ("parameters do not train", "give the optimizer the parameters that the model uses"),
    "frozen parameters did not move": ("a frozen parameter is trained", "leave it out of the optimizer"),
}


def _size(tensors: Mapping[str, Array]) -> float:
    return math.sqrt(sum(float(np.square(value, dtype=np.float64).sum()) for value in tensors.values()))


def _scale(a: Array, b: Array) -> float | None:
    """The factor between two tensors, if they are parallel."""
    x, y = np.float64(a).ravel(), np.float64(b).ravel()
    if not y.any() or not x.any():
        return None
    factor = float(x @ y / (y @ y))
    return factor if np.linalg.norm(x - factor * y) < _CLOSE * np.linalg.norm(x) else None


def _ratio(a: float, b: float, world_size: int) -> str | None:
    """How two numbers are related, if it is by the number of processes."""
    if not b or not math.isfinite(a / b):
        return None
    if abs(a / b - world_size) < _CLOSE * world_size:
        return f"{world_size}, the number of processes"
    return f"1/{world_size}, the number of processes" if abs(a / b - 1 / world_size) < _CLOSE else None
