"""What an optimised XLA program reads and writes, kernel by kernel, from its text alone.

A fusion is one kernel: it reads its operands, of those that it slices only the slices, and writes its results, of those
that it updates in place only the updates. A loop counts as often as it turns, where XLA knows that, and a branch as the
heavier one. What caches keep from the memory is not seen.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

_WIDTHS = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8,
    "u64": 8, "f64": 8,
}  # fmt: skip
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|(?:true|false)_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "opt-barrier", "partition-id"}


@dataclass(frozen=True)
class Instruction:
    """A line of a program.

    Attributes:
        name: Of its result.
        shape: Of its result, with dtypes.
        operation: What it is.
        operands: Names.
        rest: All that stands after the operands.
        number: Of a parameter.
        is_root: Whether it is the result of its computation.
    """

    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    number: int
    is_root: bool

    @property
    def called(self) -> list[str]:
        """Computations that it calls."""
        if branches := _BRANCHES.search(self.rest):
            return re.findall(r"%?([\w.\-]+)", branches[1])
        return _CALLED.findall(self.rest)


@dataclass(frozen=True)
class Kernel:
    """What runs at once.

    Attributes:
        name: In the program.
        traced: The operation of the user's program that it comes from.
        shape: Of its results.
        is_product: Whether it multiplies matrices.
        times: How often it runs.
        read: Bytes, each time.
        written: Bytes, each time.
    """

    name: str
    traced: str
    shape: str
    is_product: bool
    times: int
    read: int
    written: int

    @property
    def moved(self) -> int:
        """Bytes of all times."""
        return self.times * (self.read + self.written)


Computations = Mapping[str, Sequence[Instruction]]


def kernels(text: str) -> list[Kernel]:
    """The kernels of a program.

    Args:
        text: HLO, optimised.
    """
    computations, entry = _parse(text)
    return list(_walk(computations, entry, 1))


def size_of(shape: str) -> int:
    """Bytes of an array, or of a tuple of them."""
    return sum(
        _WIDTHS.get(kind, 0) * prod(int(side) for side in sides.split(",") if side)
        for kind, sides in _ARRAY.findall(shape)
    )


def _parse(text: str) -> tuple[Computations, str]:
    found: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = head[2]
            found[current] = []
            entry = current if head[1] else entry
        elif (match := _LINE.match(line)) and current:
            found[current].append(_instruction(match[2], match[3], bool(match[1])))
    return found, entry


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    shape_end = _end_of(text, 0) if text.startswith("(") else text.index(" ")
    shape, call = text[:shape_end], text[shape_end:].lstrip()
    opens = call.index("(")
    closes = _end_of(call, opens)
    given = call[opens + 1 : closes - 1]
    operation = call[:opens]
    number = int(given) if operation == "parameter" else -1
    return Instruction(name, shape, operation, tuple(re.findall(r"%([\w.\-]+)", given)), call[closes:], number, is_root)


def _end_of(text: str, start: int) -> int:
    """The place after the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place + 1
    raise ValueError(f"no end of {text[start:80]}")


def _walk(computations: Computations, name: str, times: int) -> Iterator[Kernel]:
    table = {one.name: one for one in computations[name]}
    for one in computations[name]:
        if one.operation in _FREE:
            continue
        if one.operation == "while":
            turns = _TURNS.search(one.rest)
            yield from _walk(computations, one.called[0], times * (int(turns[1]) if turns else 1))
        elif one.operation == "conditional":
            branches = [list(_walk(computations, branch, times)) for branch in one.called]
            yield from max(branches, key=lambda branch: sum(kernel.moved for kernel in branch))
        elif one.operation in ("call", "async-start") and one.called:
            yield from _walk(computations, one.called[0], times)
        else:
            yield _kernel(computations, table, one, times)


def _kernel(computations: Computations, table: Mapping[str, Instruction], one: Instruction, times: int) -> Kernel:
    is_product = one.operation == "dot" or (one.operation == "custom-call" and "gemm" in one.rest)
    if one.operation == "fusion":
        read, written = _fusion(computations[one.called[0]])
        is_product = _multiplies(computations, one.called[0])
    elif one.operation == "dynamic-slice":
        read = written = size_of(one.shape)
    elif one.operation == "dynamic-update-slice":
        read = written = size_of(table[one.operands[1]].shape)
    else:
        read = sum(size_of(table[name].shape) for name in one.operands)
        # A library's product has its workspace for a second result.
        written = size_of(_ARRAY.search(one.shape)[0] if is_product else one.shape)  # type: ignore[index]
    traced = re.search(r'op_name="([^"]*)"', one.rest)
    return Kernel(one.name, traced[1] if traced else "", one.shape, is_product, times, read, written)


def _multiplies(computations: Computations, name: str) -> bool:
    return any(
        one.operation == "dot"
        or (one.operation == "fusion" and any(_multiplies(computations, inner) for inner in one.called))
        for one in computations[name]
    )


def _fusion(body: Sequence[Instruction]) -> tuple[int, int]:
    """Bytes that a fusion reads and writes."""
    table = {one.name: one for one in body}
    readers: dict[str, list[Instruction]] = defaultdict(list)
    for one in body:
        for operand in one.operands:
            readers[operand].append(one)
    (root,) = (one for one in body if one.is_root)
    written = 0
    for result in [table[name] for name in root.operands] if root.operation == "tuple" else [root]:
        made = result
        while made.operation in ("bitcast", "copy"):
            made = table[made.operands[0]]
        in_place = made.operation == "dynamic-update-slice"
        written += size_of(table[made.operands[1]].shape if in_place else result.shape)
    return sum(_read_of(one, readers) for one in body if one.operation == "parameter"), written


def _read_of(parameter: Instruction, readers: Mapping[str, Sequence[Instruction]]) -> int:
    """Bytes that a fusion reads of a parameter: slices, or all of it."""
    whole, total = size_of(parameter.shape), 0
    waiting = [(reader, parameter.name) for reader in readers[parameter.name]]
    while waiting:
        reader, source = waiting.pop()
        first = bool(reader.operands) and reader.operands[0] == source
        if reader.operation == "bitcast" and not reader.is_root:
            waiting += [(one, reader.name) for one in readers[reader.name]]
        elif first and reader.operation in ("slice", "dynamic-slice", "gather"):
            total += size_of(reader.shape)
        elif not (first and reader.operation == "dynamic-update-slice"):
            return whole
    return min(total, whole)
