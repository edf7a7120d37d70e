"""Work, collectives and memory of a traced JAX program, from its operators alone.

XLA fuses what is element-wise into what reads it, so such a value exists only where an operator that takes no part in
fusions reads it: a product, a loop, a collective, or the end of the program. Bytes and lifetimes are those of the
values that exist. Loops are as many as their length; one whose length depends on content counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from jax.extend.core import Literal

from unisono_plan.recording import Collective, Kind, Phase, Recording, Work, allocated

Members = Callable[[tuple[str, ...]], tuple[int, ...]]  # the ranks of rank 0's group over axes of a mesh
_CALLS = {"jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "shard_map"}
_VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "stop_gradient", "optimization_barrier", "copy"}
_IN_PLACE = {"psum", "psum_invariant", "pmax", "pmin", "optimization_barrier"}  # each result lies where its operand did
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin", "reduce_prod"}
_COLLECTIVES = {
    "psum": "all_reduce", "psum_invariant": "all_reduce", "pmax": "all_reduce", "pmin": "all_reduce",
    "all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all",
    "ppermute": "collective_permute",
}  # fmt: skip
_APART = {  # operators that read and write memory whatever is before and after them
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "sort",
    "gather", "scatter", "scatter-add", "cumsum", "cumlogsumexp", "cummax", "dynamic_slice", "dynamic_update_slice",
    "concatenate", "custom_call", "top_k", "fft", "threefry2x32", "random_bits", *_COLLECTIVES,
}  # fmt: skip


def record(jaxpr: Any, kinds: Mapping[int, Kind], members: Members) -> Recording:
    """What one device computes, sends and keeps while it runs a program.

    Args:
        jaxpr: Of one device; its arguments are held by the caller, and not counted.
        kinds: What results are, by their numbers.
        members: Ranks of a group.
    """
    walk = _Walk(members)
    peak = walk.run(jaxpr, kinds, "forward")
    result = Recording(peak=peak.peak, most=peak.most, work=walk.work)
    result.collectives = walk.collectives
    return result


@dataclass(eq=False)
class _Value:
    """An array inside of a program.

    Attributes:
        size: Bytes, as an allocator gives them out.
        kind: What it is.
        held: Whether it belongs to the caller, or is a constant of the program.
        exists: Whether it has memory of its own.
        sources: The existing values from which it can be computed again: itself, if it exists.
        last: The number of the last operator that reads it.
    """

    size: int
    kind: Kind = "activations"
    held: bool = False
    exists: bool = False
    sources: frozenset[_Value] = frozenset()
    last: int = -1


@dataclass
class _Operator:
    name: str
    equation: Any
    inputs: list[_Value]
    outputs: list[_Value]
    phase: Phase
    differentiated: bool  # whether it belongs to what is differentiated, or to its derivative


@dataclass
class _Memory:
    """Bytes by kind, at the peak and at most."""

    now: dict[Kind, int] = field(default_factory=dict)
    peak: dict[Kind, int] = field(default_factory=dict)
    most: dict[Kind, int] = field(default_factory=dict)

    def add(self, kind: Kind, size: int) -> None:
        self.now[kind] = self.now.get(kind, 0) + size

    def note(self, inner: Mapping[Kind, int] | None = None) -> None:
        found = {kind: self.now.get(kind, 0) + (inner or {}).get(kind, 0) for kind in {*self.now, *(inner or {})}}
        self.most = {kind: max(found.get(kind, 0), self.most.get(kind, 0)) for kind in {*found, *self.most}}
        if sum(found.values()) > sum(self.peak.values()):
            self.peak = {kind: size for kind, size in found.items() if size}


class _Walk:
    """Goes through a program and all that it calls.

    Attributes:
        work: By phase.
        collectives: In order.
    """

    def __init__(self, members: Members) -> None:
        self._members, self._times = members, 1
        self.work: dict[Phase, Work] = {}
        self.collectives: list[Collective] = []

    def run(self, jaxpr: Any, kinds: Mapping[int, Kind], phase: Phase) -> _Memory:
        """Walk through a program; returns its memory."""
        operators, results = _flatten(jaxpr, phase)
        for number, value in enumerate(results):
            _mark(value, operators, kinds.get(number, "activations"))
        _decide_what_exists(operators, results)
        return self._live(_delay_gathers(operators), results)

    def _live(self, operators: Sequence[_Operator], results: Iterable[_Value]) -> _Memory:
        memory = _Memory()
        for number, one in enumerate(operators):
            for source in _sources(one.inputs):
                source.last = number
        for source in _sources(results):
            source.last = len(operators)
        for number, one in enumerate(operators):
            inner = self._count(one)
            made = [value for value in one.outputs if value.exists]
            ending = [value for value in _sources(one.inputs) if value.last == number and not value.held]
            if one.name not in _APART:  # an element-wise operator writes over what nobody reads any more
                _free(memory, ending)
                ending = []
            for value in made:
                memory.add(value.kind, value.size)
            memory.note(inner)
            _free(memory, ending)
            _free(memory, [value for value in made if value.last < number])
        return memory

    def _count(self, one: _Operator) -> Mapping[Kind, int]:
        """Add the work and the collectives of an operator; returns the memory that it needs inside of itself."""
        equation, params = one.equation, one.equation.params
        if one.name == "scan":
            return self._repeat(params["length"], params["jaxpr"], one)
        if one.name == "while":
            return self._repeat(1, params["body_jaxpr"], one)
        if one.name == "cond":
            alone = [self._apart(branch, one.phase) for branch in params["branches"]]
            heaviest, memory = max(alone, key=lambda found: sum(work.flops for work in found[0].work.values()))
            for phase, work in heaviest.work.items():
                self.work[phase] = self.work.get(phase, Work()) + work
            self.collectives += heaviest.collectives
            return memory.peak
        if (kind := _COLLECTIVES.get(one.name)) is not None:
            self._send(kind, one)
            return {}
        work = self.work.setdefault(one.phase, Work())
        if (flops := _flops(equation)) is not None:
            work.flops += self._times * flops
            work.product_bytes += self._times * _moved([*one.inputs, *one.outputs])
        elif written := [value for value in one.outputs if value.exists]:
            work.other_bytes += self._times * _moved([*_sources(one.inputs), *written])
        return {}

    def _repeat(self, times: int, jaxpr: Any, one: _Operator) -> Mapping[Kind, int]:
        before, self._times = self._times, self._times * times
        start = len(self.collectives)
        memory = self.run(jaxpr, {}, one.phase)
        self.collectives[start:] = self.collectives[start:] * times
        self._times = before
        return memory.peak

    def _apart(self, jaxpr: Any, phase: Phase) -> tuple[_Walk, _Memory]:
        walk = _Walk(self._members)
        walk._times = self._times
        return walk, walk.run(jaxpr, {}, phase)

    def _send(self, kind: str, one: _Operator) -> None:
        params = one.equation.params
        axes = params.get("axes", params.get("axis_name"))
        ranks = self._members(tuple(axes) if isinstance(axes, list | tuple) else (axes,))
        if len(ranks) > 1:
            whole = one.equation.outvars if kind == "all_gather" else one.equation.invars
            size = sum(_size(variable.aval) for variable in whole)
            phase = one.phase
            if (
                kind == "all_reduce" and phase == "forward" and not one.differentiated
            ):  # counts before all passes, or gradients after them
                phase = "backward" if "backward" in self.work else "other"
            self.collectives.append(Collective(kind, size, ranks, phase))


# one program as a list of operators -----------------------------------------------------------------------------------


def _flatten(jaxpr: Any, phase: Phase) -> tuple[list[_Operator], list[_Value]]:
    operators: list[_Operator] = []

    def walk(inner: Any, given: Sequence[_Value], outer: Phase) -> list[_Value]:
        inner = getattr(inner, "jaxpr", inner)
        known = dict(zip(inner.invars, given, strict=True))
        known |= {variable: _Value(_size(variable.aval), held=True) for variable in inner.constvars}

        def value_of(atom: Any) -> _Value:
            return _Value(0, held=True) if isinstance(atom, Literal) else known[atom]

        for equation in inner.eqns:
            inputs = [value_of(atom) for atom in equation.invars]
            name, stack = equation.primitive.name, str(equation.source_info.name_stack)
            where: Phase = "backward" if "transpose(" in stack else outer
            called = equation.params.get("call_jaxpr", equation.params.get("jaxpr")) if name in _CALLS else None
            if called is not None:
                known |= zip(equation.outvars, walk(called, inputs, where), strict=True)
                continue
            outputs = [_Value(allocated(_size(variable.aval))) for variable in equation.outvars]
            known |= zip(equation.outvars, outputs, strict=True)
            operators.append(_Operator(name, equation, inputs, outputs, where, "jvp(" in stack))
        return [value_of(atom) for atom in inner.outvars]

    closed = getattr(jaxpr, "jaxpr", jaxpr)
    return operators, walk(closed, [_Value(_size(variable.aval), held=True) for variable in closed.invars], phase)


def _is_view(one: _Operator) -> bool:
    """Whether each result lies where the operand of its number does."""
    if one.name in _IN_PLACE:
        return True
    return one.name in _VIEWS and one.outputs[0].size == one.inputs[0].size


def _mark(value: _Value, operators: Sequence[_Operator], kind: Kind) -> None:
    """Say what a result is, and so what it is a view of."""
    value.kind = kind
    for one in reversed(operators):
        if _is_view(one):
            for made, given in zip(one.outputs, one.inputs, strict=False):
                if made is value and not given.held:
                    given.kind, value = kind, given
        elif one.name == "reduce_scatter" and one.inputs[0].kind == "activations":
            one.inputs[0].kind = "communication"
        elif one.name == "all_gather":
            one.outputs[0].kind = "communication"


def _decide_what_exists(operators: Sequence[_Operator], results: Iterable[_Value]) -> None:
    """Set which values have memory of their own, and of which the others are computed again."""
    needed = {value for value in results if not value.held}
    for one in reversed(operators):
        if _is_view(one):
            pairs = zip(one.outputs, one.inputs, strict=False)
            needed |= {given for made, given in pairs if made in needed or one.name in _APART}
        elif one.name in _APART:
            needed |= set(one.inputs)
    for one in operators:
        view = _is_view(one)
        for number, made in enumerate(one.outputs):
            given = [one.inputs[number]] if view else one.inputs
            made.exists = not view and (one.name in _APART or one.name in _REDUCTIONS or made in needed)
            made.sources = frozenset([made]) if made.exists else frozenset(_sources(given))


def _delay_gathers(operators: Sequence[_Operator]) -> list[_Operator]:
    """The same operators in the order in which XLA runs them: it gathers when something reads what is gathered."""
    waiting: dict[_Value, _Operator] = {}
    ordered: list[_Operator] = []
    for one in operators:
        if one.name == "all_gather":
            waiting[one.outputs[0]] = one
            continue
        if any(value.exists for value in one.outputs):
            ordered += [waiting.pop(source) for source in list(_sources(one.inputs)) if source in waiting]
        ordered.append(one)
    return [*ordered, *waiting.values()]


def _sources(values: Iterable[_Value]) -> Iterator[_Value]:
    seen: set[_Value] = set()
    for value in values:
        for source in [value] if value.held else value.sources:
            if source not in seen:
                seen.add(source)
                yield source


def _free(memory: _Memory, values: Iterable[_Value]) -> None:
    for value in values:
        memory.add(value.kind, -value.size)


def _moved(values: Iterable[_Value]) -> int:
    return sum(value.size for value in values)


def _size(aval: Any) -> int:
    return int(prod(aval.shape)) * int(aval.dtype.itemsize)  # keys of random numbers have one, too


def _flops(equation: Any) -> float | None:
    """Two for each product of two numbers that is added up; None of what is no product."""
    name, made = equation.primitive.name, 2.0 * float(prod(equation.outvars[0].aval.shape))
    if name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return made * float(prod(shape[axis] for axis in contracted))
    if name in ("ragged_dot", "ragged_dot_general"):
        return made * float(equation.invars[0].aval.shape[-1])
    if name == "conv_general_dilated":
        numbers, kernel = equation.params["dimension_numbers"], equation.invars[1].aval.shape
        return made * float(prod(kernel) / kernel[numbers.rhs_spec[0]])
    return None
