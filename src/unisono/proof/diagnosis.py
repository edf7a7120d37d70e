"""What a pattern of differences says: the likely fault behind the first quantity that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.proof.comparison import Compared, Difference, first_failed
from unisono.proof.fault_names import REMEDIES, Diagnosis, named
from unisono.proof.recording.trace import Array, StepFacts, Trace

_CLOSE = 1e-3
_ROUNDED = 1e-2  # more than a tensor differs when it was rounded to bf16
_ROUNDING = 1e-13  # a smaller difference fails only where every bit of an fp64 run has to be equal


@dataclass(frozen=True)
class Pattern:
    """What there is to judge by.

    Attributes:
        mine: the run in question.
        reference: the run that it must equal.
        compared: everything that was compared.
        first: the first that failed.
        world_size: processes of the run.
        starts: updates after which the run was started again.
    """

    mine: Trace
    reference: Trace
    compared: Sequence[Compared]
    first: Compared
    world_size: int
    starts: Sequence[int]

    @property
    def worst(self) -> Difference:
        """Of the first quantity that failed."""
        return self.first.worst

    @property
    def number(self) -> int:
        """The step of it, from 0."""
        return self.worst.step - 1

    @property
    def step(self) -> StepFacts:
        """The facts of that step."""
        return self.mine.facts.steps[self.number]

    @property
    def resumed(self) -> bool:
        """Whether steps before were made by another start of the run."""
        return any(start < self.worst.step for start in self.starts)

    def failed(self, quantity: str) -> bool:
        """Whether it differs in the same step; what differs later may follow from this."""
        return any(step == self.worst.step for step in self._steps(quantity))

    def agrees(self, quantity: str) -> bool:
        """Whether it was recorded, which it need not be, and is the same up to this step."""
        return any(step > self.worst.step for step in self._steps(quantity))

    def _steps(self, quantity: str) -> list[float]:
        """The first step in which it differs, infinite where it never does; none where it was not compared."""
        return [
            c.worst.step if c.mark == "FAIL" else math.inf
            for c in self.compared
            if c.quantity == quantity and c.mark != "ABSTAIN"
        ]


def diagnose(
    mine: Trace, reference: Trace, compared: Sequence[Compared], world_size: int, starts: Sequence[int] = ()
) -> Diagnosis | None:
    """The likely fault behind the first quantity that failed, or None if nothing did.

    Args:
        mine: the run in question.
        reference: the run that it must equal.
        compared: quantities and invariants, as `compare` and `invariants` return them.
        world_size: processes of the run.
        starts: updates after which it was started again.
    """
    if mine.facts.fault:
        return of_error(mine.facts.called)
    first = first_failed(compared)
    if first is None:
        return None
    found = Pattern(mine, reference, compared, first, world_size, starts)
    if first.quantity in _INVARIANTS:
        return named(_INVARIANTS[first.quantity], first.worst.name)
    if first.quantity not in _RULES:
        return None
    if 0 < first.worst.size < _ROUNDING and first.quantity not in ("initial parameters", "learning rate"):
        return named("Sums are added in another order", "the difference is one of rounding")
    told = _RULES[first.quantity](found)
    if len(starts) > 1 and first.worst.step > starts[1]:
        agree = f"all steps up to {starts[1]}, after the first resume too, agree"
        because = f"{agree}; step {first.worst.step}, after the second, does not; by itself it would be '{told.fault}'"
        return named("A second resume drifts", because)
    return told


def of_error(called: str) -> Diagnosis:
    """What the error means that ended a run, which may have told its name."""
    return named(called if called in REMEDIES else "The run ended with an error", "the error says so")


# one rule per quantity: what it means that this is the first to differ ------------------------------------------------


def _sample_ids(found: Pattern) -> Diagnosis:
    ours, theirs, number = found.mine.facts.steps, found.reference.facts.steps, found.number
    if number >= min(len(ours), len(theirs)):
        return named("Rows are dropped", f"{len(ours)} steps instead of {len(theirs)}: the last batch is not there")
    m, r, at = ours[number], theirs[number], f"step {number + 1}"
    if _all_alike(m):
        return named("Every rank reads the same rows", f"{at}: all ranks computed rows {m.by_rank[0][:6]}")
    if len(m.rows) < len(r.rows):
        return named("Rows are dropped", f"{at} has {len(m.rows)} rows instead of {len(r.rows)}")
    if len(m.rows) > len(r.rows):
        different = f"{len(m.rows)} rows, {len(set(m.rows))} of them different"
        return named("Rows are repeated to fill the batch", f"{at} computed {different}")
    if (period := _period(found.mine)) and not _period(found.reference):
        return named("Every epoch has the same order", f"the order of samples repeats after {period} rows")
    if number and m.rows in (ours[number - 1].rows, ours[0].rows):
        return named("Data are replayed", f"{at} computed rows that earlier steps had computed already")
    if sorted(m.rows) == sorted(r.rows):
        return named("The order inside the global batch depends on the world size", "same rows, other places")
    return named("The order of samples depends on the world size", f"{at} computed other rows")


def _all_alike(step: StepFacts) -> bool:
    return len(step.by_rank) > 1 and all(rank == step.by_rank[0] for rank in step.by_rank)


def _period(trace: Trace) -> int | None:
    """After how many rows the order of samples begins again, if it does."""
    rows = [row for step in trace.facts.steps for row in step.rows]
    again = next((n for n, row in enumerate(rows) if n and row == rows[0]), None)
    return again if again and rows[again:] == rows[: len(rows) - again] else None


def _samples(found: Pattern) -> Diagnosis:
    return named("Augmentation depends on rank or worker", f"same rows, other samples in {found.worst.name}")


def _initial(found: Pattern) -> Diagnosis:
    a, b = (trace.tensors("initial parameters") for trace in (found.mine, found.reference))
    if a.keys() != b.keys():
        return named("Tied weights were untied", f"on one side only: {', '.join(sorted({*a} ^ {*b})[:3])}")
    return named("Initialisation depends on the layout", f"'{found.worst.name}' begins with other values")


def _outputs(found: Pattern) -> Diagnosis:
    if found.resumed:
        return named("The state was not carried on", f"rows and weights of step {found.worst.step} agree")
    if found.failed("replicas"):
        return named("Replicas drift apart", "outputs differ, and replicas too: the weights of a rank changed")
    if found.mine.facts.random:
        return named("Randomness depends on the rank", "rows and weights agree, outputs do not, and the model draws")
    return named("The forward pass depends on the layout", "rows and weights agree, outputs do not")


def _loss(found: Pattern) -> Diagnosis:
    worst = found.worst
    from_outputs = found.agrees("outputs")  # then the forward pass is right, and its state and its draws with it
    if found.resumed and not from_outputs:
        return named("The state was not carried on", f"rows and weights of step {worst.step} agree, its loss does not")
    if found.agrees("raw gradients"):
        return named("The loss is not summed over ranks", "the gradients agree, the reported loss does not")
    if found.failed("replicas"):
        return named("Replicas drift apart", "the loss differs, and replicas too: the weights of a rank changed")
    if _is_ratio(worst.mine, worst.reference, found.world_size):
        told = f"{worst.mine:.6g} instead of {worst.reference:.6g}: by the number of processes"
        return named("The loss is scaled by N", told)
    if counts := _uneven(found):
        return named("A mean of means", f"steps with equally many rows on every rank agree, the one with {counts} not")
    if found.mine.facts.crosses and (terms := _other_terms(found)):
        told = f"outputs agree, and so does what rows have alone; {terms} does not, and the loss crosses samples"
        return named("Pairs across processes are missing", told)
    if found.mine.facts.random and not from_outputs:
        return named(
            "Randomness depends on the rank",
            "rows and weights agree, the loss does not, and the model draws; without draws it would be a mean of means",
        )
    return named("A mean of means", "rows and weights agree, the loss does not: parts of other counts were averaged")


def _other_terms(found: Pattern) -> str:
    """The terms that differ, if there is only one, or another agrees: a wrong mean would not spare any."""
    ours, theirs = found.step.terms, found.reference.facts.steps[found.number].terms
    other = [name for name, value in theirs.items() if abs(ours.get(name, math.inf) - value) > _CLOSE * abs(value)]
    return ", ".join(f"'{name}'" for name in other) if len(other) < max(2, len(theirs)) else ""


def _uneven(found: Pattern) -> list[int]:
    """How many rows each rank computed, if this is the first step in which they are not equally many."""
    counts = [{len(rank) for rank in step.by_rank} for step in found.mine.facts.steps[: found.worst.step] if step.rows]
    begins = len(counts) > 1 and len(counts[-1]) > 1 and all(len(before) == 1 for before in counts[:-1])
    return [len(rank) for rank in found.step.by_rank] if begins else []


def _gradients(found: Pattern) -> Diagnosis:
    step, number = found.worst.step, found.number
    if found.step.clean is False:
        return named("Gradients of the step before are added", f"step {step} began with gradients")
    a, b = (trace.tensors("raw gradients", number) for trace in (found.mine, found.reference))
    if missing := sorted({*b} - {*a}):
        return named("Parameters are left out", f"no gradient for {', '.join(missing[:3])}")
    there = [name for name in b if a[name].any() or b[name].any()]  # an adapter's second matrix has none at step 1
    scales = [scale for name in there if (scale := _scale(a[name], b[name])) is not None]
    alike = len(scales) > len(there) // 2 and max(scales) - min(scales) < _CLOSE * abs(max(scales))
    if alike and abs(scales[0] - 1) > _CLOSE:
        by = ": by the number of processes" if _is_ratio(scales[0], 1.0, found.world_size) else ""
        return named("All gradients are scaled by N", f"every tensor is {scales[0]:.6g} times what it should be{by}")
    wrong = [name for name in there if np.linalg.norm(np.float64(a[name]) - b[name]) > _CLOSE * np.linalg.norm(b[name])]
    if wrong and len(wrong) <= len(there) // 2:
        return named("Some parameters are not synchronised", f"only {', '.join(wrong[:3])} differ")
    limit = _size(found.reference.tensors("clipped gradients", number))
    if _size(a) <= limit * (1 + 1e-6) < _size(b):
        told = f"the raw gradient is no longer than the limit of {limit:.4g} already"
        return named("Clipped before synchronisation", told)
    if found.failed("replicas"):
        return named("Gradients are not synchronised", "all differ in direction, and after the update replicas do too")
    if counts := _uneven(found):
        return named("A mean of means", f"steps with equally many rows on every rank agree, the one with {counts} not")
    if found.mine.facts.crosses == "rows" and found.worst.size > _ROUNDED and not found.failed("loss"):
        told = "the loss crosses samples and agrees, the gradients differ in direction, tensor by tensor"
        return named("Gathered rows carry no gradient", told)
    if found.worst.size < 1e-1 and not found.failed("loss"):
        told = f"all differ a little ({found.worst.size:.0e}), the loss does not"
        return named("Gradients are reduced in a lower precision", told)
    told = "they differ in direction, tensor by tensor"
    if found.step.loss is None:
        told += "; no loss was recorded, and without it a mean of means looks the same"
    return named("Gradients are those of a part of the batch", told)


def _norm(found: Pattern) -> Diagnosis:
    worst = found.worst
    if worst.size < _CLOSE:
        told = f"{worst.mine:.9g} instead of {worst.reference:.9g}"
        return named("The norm is added up in too low a precision", told)
    told = f"{worst.mine:.6g} instead of {worst.reference:.6g}, and the gradients agree"
    return named("The norm is that of a part of the gradient", told)


def _clipped(found: Pattern) -> Diagnosis:
    return named("Clipped by a local norm", "gradients and norm agree before clipping, not after")


def _lr(found: Pattern) -> Diagnosis:
    worst, rates = found.worst, found.step.lr
    if any(rank != rates[0] for rank in rates):
        return named("The learning rate differs between ranks", f"rank {worst.ranks[0]} has {worst.mine:.4g}")
    told = f"{worst.mine:.4g} instead of {worst.reference:.4g} in step {worst.step}"
    return named("The state was not carried on" if found.resumed else "The schedule is stepped once per process", told)


def _update(found: Pattern) -> Diagnosis:
    if found.worst.name in found.mine.facts.frozen:
        return named("A frozen parameter is trained", found.worst.name)
    told = f"'{found.worst.name}' differs, and gradients and learning rate agree"
    return named("The state of the optimizer was lost" if found.resumed else "The update is computed otherwise", told)


def _parameters(found: Pattern) -> Diagnosis:
    name = found.worst.name
    if name in found.mine.facts.frozen:
        return named("A frozen parameter is trained", name)
    if any(c.quantity == "update" and c.mark == "FAIL" for c in found.compared):
        return named("The update is computed otherwise", f"'{name}' differs, after an update from equal gradients too")
    return named("The update is not that of the gradients", f"'{name}' differs, and all gradients agree")


def _replicas(found: Pattern) -> Diagnosis:
    if found.step.replicas and all(told.startswith("'ema/") for told in found.step.replicas):
        return named("The moving average drifts", f"{found.step.replicas[0]}, and their weights are")
    return named("Replicas drift apart", "rank 0's parameters are those of one process, and others are not")


def _buffers(found: Pattern) -> Diagnosis:
    return named("Buffers are those of one process", f"buffer '{found.worst.name}' differs, parameters agree")


def _average(found: Pattern) -> Diagnosis:
    told = f"the average of '{found.worst.name}' differs, parameters agree"
    return named("The moving average was lost" if found.resumed else "The moving average drifts", told)


def _metrics(found: Pattern) -> Diagnosis:
    return named("A metric is not summed over ranks", "everything before it agrees")


def _evaluation(found: Pattern) -> Diagnosis:
    if found.agrees("metrics"):  # then sums and counts are reduced as they should be
        told = "the metrics of the training agree, those of the same held-out rows do not"
        return named("Held-out rows are augmented", told)
    return _metrics(found)


_RULES: dict[str, Callable[[Pattern], Diagnosis]] = {
    "initial parameters": _initial,
    "sample ids": _sample_ids,
    "samples": _samples,
    "outputs": _outputs,
    "loss": _loss,
    "raw gradients": _gradients,
    "gradient norm": _norm,
    "clipped gradients": _clipped,
    "learning rate": _lr,
    "update": _update,
    "optimizer state": _update,
    "parameters": _parameters,
    "replicas": _replicas,
    "buffers": _buffers,
    "EMA": _average,
    "metrics": _metrics,
    "evaluation": _evaluation,
}

_INVARIANTS = {
    "the loss moved": "Nothing is learnt",
    "there is a gradient": "There is no gradient",
    "steps begin without gradients": "Gradients of the step before are added",
    "evaluation repeats": "Evaluation draws at random",
    "evaluation leaves things as they were": "Evaluation changes the training",
    "ranks computed different rows": "Every rank reads the same rows",
    "trained parameters moved": "Parameters do not train",
    "frozen parameters did not move": "A frozen parameter is trained",
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


def _is_ratio(a: float | None, b: float | None, world_size: int) -> bool:
    """Whether two numbers differ by the number of processes."""
    if not a or not b or world_size == 1:
        return False
    return any(abs(a / b - n) < _CLOSE * n for n in (world_size, 1 / world_size))
