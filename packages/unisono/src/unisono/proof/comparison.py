"""Two runs that have to be the same, compared quantity by quantity in causal order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from unisono.proof.recording.gradient_sample import norm_of
from unisono.proof.recording.output_digest import sketch_distance
from unisono.proof.recording.trace import INITIAL_BUFFERS, QUANTITIES, Array, StepFacts, Trace
from unisono.runtime.text import join_names

Mark = Literal["PASS", "FAIL", "ABSTAIN"]
_MAX_FLOOR = 1e-3  # of gradients: where rounding seems to come to more, it says nothing about zeros
_SMALL_TENSOR = 1e-3  # a tensor much smaller than all of them together is measured against those
MARGIN = 8.0  # a perturbed run is one draw of what rounding can do
_MAX_TOLERANCE = 0.5  # where rounding alone may come to this, agreement says nothing


@dataclass(frozen=True)
class Difference:
    """Where two runs differ most in a quantity.

    Attributes:
        size: relative; infinite where something is there on one side only.
        step: from 1; 0 for what has no step.
        name: of the tensor or scalar.
        mine: the value, or the norm of the tensor.
        reference: the same on the other side.
        ranks: that report it, where not all do.
    """

    size: float
    step: int = 0
    name: str = ""
    mine: Any = None
    reference: Any = None
    ranks: tuple[int, ...] = ()


@dataclass
class ComparedQuantity:
    """What was found for one quantity.

    Attributes:
        quantity: one of `QUANTITIES`.
        mark: PASS, FAIL or ABSTAIN.
        worst: the largest difference; for FAIL the first that is too large, at the earliest step.
        allowed: the largest relative difference that passes.
        why: the reason of an ABSTAIN.
        left_out: tensors, and numbers of elements of tensors, whose true gradient is zero, where an adaptive optimizer
            makes steps of their rounding.
    """

    quantity: str
    mark: Mark
    worst: Difference = field(default_factory=lambda: Difference(0.0))
    allowed: float = 0.0
    why: str = ""
    left_out: tuple[str, ...] = ()


def compare_traces(
    mine: Trace,
    reference: Trace,
    tolerance: Mapping[str, float],
    adaptive: bool,
    by_step: Mapping[tuple[str, int], float] | None = None,
) -> list[ComparedQuantity]:
    """Compare two traces.

    Args:
        mine: of the run in question.
        reference: of the run that it must equal.
        tolerance: the largest relative difference of each quantity; 0 for equality in every bit.
        adaptive: whether the optimizer divides by the size of gradients.
        by_step: what more is allowed of a quantity in a step; steps count from 1, and 0 is what is of no step.
    """
    result = []
    floor = min(tolerance["raw gradients"] or 1e-12, _MAX_FLOOR)
    left_out = find_left_out(mine, reference, floor) if adaptive else LeftOut()
    for quantity in QUANTITIES:
        moved = quantity in ("optimizer state", "parameters", "EMA")
        found = list(_differences(quantity, mine, reference, left_out if moved else LeftOut()))
        if not found:
            result.append(ComparedQuantity(quantity, "ABSTAIN", why="there is none"))
            continue
        limits = {d.step: max(tolerance[quantity], (by_step or {}).get((quantity, d.step), 0.0)) for d in found}
        over = [difference for difference in found if not difference.size <= limits[difference.step]]
        allowed = max(limits.values())
        first = min((difference.step for difference in over), default=0)
        earliest = [difference for difference in over if difference.step == first]
        worst = max(earliest or found, key=lambda difference: difference.size)
        why = _explain_local_statistics(quantity, over, mine, reference)
        if not over and allowed > _MAX_TOLERANCE:
            why = (
                f"rounding alone comes to a relative difference of {allowed:.1g}: so far apart are two "
                "runs on one process whose initial weights differ in their last bit"
            )
        mark: Mark = "ABSTAIN" if why else "FAIL" if over else "PASS"
        shown = left_out.shown if moved and not why else ()
        result.append(ComparedQuantity(quantity, mark, worst, allowed, why, shown))
    return result


def measure_distances(mine: Trace, reference: Trace) -> dict[tuple[str, int], float]:
    """The largest difference of every quantity in every step; steps count from 1, and 0 is what is of no step."""
    result: dict[tuple[str, int], float] = {}
    for quantity in QUANTITIES:
        for one in _differences(quantity, mine, reference, LeftOut()):
            result[quantity, one.step] = max(result.get((quantity, one.step), 0.0), one.size)
    return result


def first_failure(compared: Sequence[ComparedQuantity]) -> ComparedQuantity | None:
    """The fault that comes first: at the earliest step, and there in causal order; what has no step comes last."""
    failed = [c for c in compared if c.mark == "FAIL"]
    order = {quantity: number for number, quantity in enumerate(QUANTITIES)}

    def place(one: ComparedQuantity) -> tuple[float, int]:
        begins = one.quantity == "initial parameters"
        return (0 if begins else one.worst.step or math.inf, order.get(one.quantity, len(order)))

    return min(failed, key=place, default=None)


def _explain_local_statistics(quantity: str, over: list[Difference], mine: Trace, reference: Trace) -> str:
    """Why a difference says nothing: statistics that each process keeps of its own rows, and what is made with them."""
    names = {*mine.facts.per_process, *reference.facts.per_process}
    if not over or not names:
        return ""
    if quantity == "evaluation" or (quantity == "buffers" and all(d.name in names for d in over)):
        return f"statistics of one process: {join_names(sorted(names))}"
    return ""


@dataclass(frozen=True)
class LeftOut:
    """What an adaptive optimizer moves by rounding alone.

    Attributes:
        names: parameters whose true gradient is zero in all steps (a key bias in attention).
        parts: the same inside of tensors, as the key's third of one bias for query, key and value: elements by tensor,
            without those that are simply zero on both sides.
    """

    names: frozenset[str] = frozenset()
    parts: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)

    @property
    def shown(self) -> tuple[str, ...]:
        """In words."""
        parts = (f"{name} ({part.sum()} of {part.size} elements)" for name, part in self.parts.items())
        return (*sorted(self.names), *parts)


def find_left_out(mine: Trace, reference: Trace, floor: float) -> LeftOut:
    """What has gradients that are rounding beside those of all, or of their tensor.

    Args:
        mine: of the run in question.
        reference: of the run that it must equal.
        floor: relative size below which a gradient is rounding.
    """
    steps = range(len(reference.facts.steps))
    silent, seen = set(reference.facts.trainable), set[str]()
    small: dict[str, NDArray[np.bool_]] = {}
    some: dict[str, NDArray[np.bool_]] = {}
    for step, trace in ((step, trace) for step in steps for trace in (reference, mine)):
        if trace is mine and mine.shares(reference, "raw gradients", step):
            continue
        gradients = trace.tensors("raw gradients", step)
        if trace is reference:
            whole = norm_of(gradients.values())
            silent -= {name for name, value in gradients.items() if norm_of([value]) > 0.1 * floor * whole}
            seen |= set(gradients)  # where two optimizers take turns, no step has them all
        for name, value in gradients.items():
            typical = norm_of([value]) / math.sqrt(max(1, value.size))
            if name in small and small[name].shape != value.shape:
                continue  # which is a difference of its own
            small[name] = small.get(name, np.ones(value.shape, bool)) & (np.abs(value) <= 0.1 * floor * typical)
            some[name] = some.get(name, np.zeros(value.shape, bool)) | (value != 0)
    names = frozenset(silent & seen if seen else silent)
    parts = {name: small[name] & some[name] for name in sorted(small) if name not in names}
    return LeftOut(names, {name: part for name, part in parts.items() if part.any()})


def relative_distances(
    mine: Mapping[str, Array], reference: Mapping[str, Array], least: Mapping[str, float] | None = None
) -> dict[str, float]:
    """‖a − b‖ / max(‖b‖, 10⁻³ ‖all b‖, least) per tensor; infinite where it is on one side or of another shape."""
    whole = norm_of(reference.values())
    result = {}
    for name in sorted({*mine, *reference}):
        a, b = mine.get(name), reference.get(name)
        if a is None or b is None or a.shape != b.shape:
            result[name] = math.inf
        elif np.array_equal(a, b):
            result[name] = 0.0
        else:
            size = max(norm_of([b]), _SMALL_TENSOR * whole, (least or {}).get(name, 0.0))
            distance = norm_of([np.subtract(a, b, dtype=np.float64)]) / size if size else math.inf
            result[name] = distance if math.isfinite(distance) else math.inf
    return result


def _differences(quantity: str, mine: Trace, reference: Trace, left_out: LeftOut) -> Iterator[Difference]:
    """Differences of one quantity, step by step; those of the steps before a checkpoint was taken over are left out."""
    pairs = [
        (number, m, r)
        for number, (m, r) in enumerate(zip(mine.facts.steps, reference.facts.steps, strict=False))
        if m.computed and r.computed
    ]
    match quantity:
        case "initial parameters":
            yield from _moment_differences(mine, reference, quantity, None)
            own = LeftOut(frozenset((*mine.facts.per_process, *reference.facts.per_process)))
            yield from _moment_differences(mine, reference, INITIAL_BUFFERS, None, own)
            for name in mine.facts.initial_buffers:
                yield Difference(math.inf, 0, name)
        case "evaluation":
            yield from _rank_differences(0, mine.facts.evaluation, reference.facts.evaluation)
        case "sample ids":
            counts = len(mine.facts.steps), len(reference.facts.steps)
            known = mine.facts.source_rows and reference.facts.source_rows
            if known and {*mine.facts.source_rows} != {*reference.facts.source_rows}:  # the first steps may be equal
                yield Difference(math.inf, 1, "rows of data()", mine.facts.source_rows, reference.facts.source_rows)
            if counts[0] != counts[1]:
                yield Difference(math.inf, min(counts) + 1, "steps of the run", *counts)
            for number, m, r in pairs:
                if not (m.rows and r.rows):  # which were not seen
                    continue
                same = m.rows == r.rows
                repeated = len({*m.rows}) < len({*r.rows})
                text = "repeated" if repeated else "rows of the global batch"
                yield Difference(0.0 if same else math.inf, number + 1, text, m.rows, r.rows)
        case "samples":
            for number, m, r in pairs:
                if len(m.samples) == len(r.samples) and m.rows == r.rows and m.samples:
                    wrong = [n for n, (a, b) in enumerate(zip(m.samples, r.samples, strict=True)) if a != b]
                    yield Difference(math.inf if wrong else 0.0, number + 1, f"micro-batches {wrong}" if wrong else "")
        case "outputs":
            for number, m, r in pairs:
                if m.samples == r.samples:
                    for micro, (ours, theirs) in enumerate(zip(m.outputs, r.outputs, strict=False)):
                        if ours and theirs:
                            size, name = sketch_distance(ours, theirs)
                            shown = f"{name} of micro-batch {micro}" if name else ""
                            a, b = ours.get(name, [None])[0], theirs.get(name, [None])[0]
                            yield Difference(size, number + 1, shown, a, b)
        case "update":  # the second, from the reference's state after its first
            made = mine.tensors(quantity, 1)
            whole = {**reference.tensors("parameters", 1), **reference.tensors("optimizer state", 1)}
            yield from _tensor_differences(made, whole, 2) if made else ()
        case "replicas":
            for number, m, _ in pairs:
                yield Difference(math.inf if m.replicas else 0.0, number + 1, join_names(m.replicas))
        case "loss":
            for number, m, r in pairs:
                losses = _loss_values(r)
                least = _SMALL_TENSOR * max((abs(v) for v in losses.values() if math.isfinite(v)), default=0.0)
                yield from _scalar_differences(number + 1, _loss_values(m), losses, least)
        case "gradient norm":
            for number, m, r in pairs:
                if m.grad_norm is not None and r.grad_norm is not None:
                    yield from _scalar_differences(number + 1, {"norm": m.grad_norm}, {"norm": r.grad_norm})
        case "learning rate":
            for number, m, r in pairs:
                for rank, rates in enumerate(m.lr):
                    named = [(f"group {n}", a, b) for n, (a, b) in enumerate(zip(rates, r.lr[0], strict=False))]
                    for name, a, b in _pair_rates(m, r, rank) or named:
                        yield Difference(_relative_difference(a, b), number + 1, name, a, b, (rank,))
        case "metrics":
            for number, m, r in pairs:
                yield from _rank_differences(number + 1, m.metrics, r.metrics)
        case "buffers":
            for number, m, _ in pairs:
                if m.buffers:
                    yield Difference(math.inf, number + 1, join_names(m.buffers))
                yield from _moment_differences(mine, reference, quantity, number, left_out)
        case "optimizer state":  # a sum of gradients that cancel has the rounding of those that were in it before
            largest: dict[str, float] = {}
            for number, _, _ in pairs:
                for one in _moment_differences(mine, reference, quantity, number, left_out, largest):
                    largest[one.name] = max(largest.get(one.name, 0.0), one.reference or 0.0)
                    yield one
        case _:
            for number, _, _ in pairs:
                yield from _moment_differences(mine, reference, quantity, number, left_out)


def _pair_rates(mine: StepFacts, reference: StepFacts, rank: int) -> list[tuple[str, float, float]]:
    """By parameter its rate on a rank and in the reference, where these hold parameters in other groups; else empty."""
    if rank >= len(mine.groups) or not reference.groups:
        return []
    ours, theirs = mine.groups[rank], reference.groups[0]
    common = [name for name in ours if name in theirs]
    if all(ours[name] == theirs[name] for name in common):
        return []
    return [(f"'{name}'", mine.lr[rank][ours[name]], reference.lr[0][theirs[name]]) for name in common]


def _moment_differences(
    mine: Trace,
    reference: Trace,
    moment: str,
    step: int | None,
    left_out: LeftOut = LeftOut(),
    least: Mapping[str, float] | None = None,
) -> Iterator[Difference]:
    number = 0 if step is None else step + 1
    if not (left_out.names or left_out.parts) and mine.shares(reference, moment, step):
        yield Difference(0.0, number)
        return
    ours, theirs = mine.tensors(moment, step), reference.tensors(moment, step)
    for values in (ours, theirs) if left_out.parts else ():
        for name, value in values.items():
            part = left_out.parts.get(_parameter_name(name))
            if part is not None and part.shape == value.shape:
                value[part] = 0
    a, b = ({n: v for n, v in one.items() if _parameter_name(n) not in left_out.names} for one in (ours, theirs))
    yield from _tensor_differences(a, b, number, least)


def _tensor_differences(
    mine: Mapping[str, Array], reference: Mapping[str, Array], step: int, least: Mapping[str, float] | None = None
) -> Iterator[Difference]:
    for name, size in relative_distances(mine, reference, least).items():
        a, b = (norm_of([values[name]]) if name in values else None for values in (mine, reference))
        yield Difference(size, step, name, a, b)


def _parameter_name(name: str) -> str:
    """The parameter that a tensor belongs to, if it is the optimizer's."""
    return name.removeprefix("optimizer/").rpartition("/")[0] if name.startswith("optimizer/") else name


def _rank_differences(
    step: int, mine: list[dict[str, float]], reference: list[dict[str, float]]
) -> Iterator[Difference]:
    for rank, values in enumerate(mine if reference else []):
        for difference in _scalar_differences(step, values, reference[0]):
            yield Difference(difference.size, step, difference.name, difference.mine, difference.reference, (rank,))


def _loss_values(step: StepFacts) -> dict[str, float]:
    return step.terms if step.loss is None else {"loss": step.loss, **step.terms}


def _scalar_differences(
    step: int, mine: Mapping[str, float], reference: Mapping[str, float], least: float = 0.0
) -> Iterator[Difference]:
    for name in {**reference, **mine}:
        a, b = mine.get(name), reference.get(name)
        yield Difference(_relative_difference(a, b, least), step, name, a, b)


def _relative_difference(a: float | None, b: float | None, least: float = 0.0) -> float:
    """Of two numbers; those that are smaller than `least` are measured against it."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b), least)
