"""What a step needs, as either engine's trace writes it down: memory by kind, work by phase, collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Literal

Kind = Literal["parameters", "gradients", "optimizer", "buffers", "batch", "communication", "activations"]
Phase = Literal["forward", "backward", "optimizer", "other"]
_ALLOCATED = 512  # bytes: allocators of GPUs give out multiples of it, or of half of it


def allocated(size: float) -> int:
    """The bytes that an allocator gives out for an array of so many bytes."""
    return ceil(size / _ALLOCATED) * _ALLOCATED


@dataclass(frozen=True)
class Collective:
    """One call of a collective.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, …
        size: Bytes of the whole message: what is gathered, or what is reduced.
        ranks: The members.
        phase: Of the step.
        last: Whether it belongs to the last micro-batch, or to no micro-batch at all.
    """

    kind: str
    size: int
    ranks: tuple[int, ...]
    phase: Phase
    last: bool = True


@dataclass
class Work:
    """What a phase computes.

    Attributes:
        flops: Of products of matrices, convolutions and attention.
        product_bytes: Read and written by those.
        other_bytes: Read and written by everything else.
        calls: Operators that compute.
    """

    flops: float = 0.0
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    calls: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.flops + other.flops,
            self.product_bytes + other.product_bytes,
            self.other_bytes + other.other_bytes,
            self.calls + other.calls,
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.product_bytes * times, self.other_bytes * times, round(self.calls * times))


@dataclass
class Recording:
    """A recorded step.

    Attributes:
        peak: Bytes by kind at the moment when most were in use.
        most: The largest number of bytes of each kind, which need not have been in use at the same time.
        fullest: Bytes by kind at the moment when most activations were in use: the peak of larger micro-batches.
        held: Bytes by kind at the end of the last forward pass: what the backward pass needs.
        work: By phase.
        collectives: In the order of the calls.
    """

    peak: dict[Kind, int] = field(default_factory=dict)
    most: dict[Kind, int] = field(default_factory=dict)
    fullest: dict[Kind, int] = field(default_factory=dict)
    held: dict[Kind, int] = field(default_factory=dict)
    work: dict[Phase, Work] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """What was seen of one step of one process.

    Attributes:
        recording: Of the step.
        passes: Micro-batches that were traced: at most two, since all but the last are alike.
        rows: Of a micro-batch.
        parameters: Scalars that are trained, over all processes.
        work: What the task says that a micro-batch is, e.g. its tokens and FLOPs.
    """

    recording: Recording
    passes: int
    rows: int
    parameters: int
    work: dict[str, float]


def extend(few: Trace, more: Trace, rows: int) -> Trace:
    """What a micro-batch of more rows would show, by lines through two of its kind, for all that is counted."""
    times = (rows - few.rows) / (more.rows - few.rows)

    def line(one: float, other: float) -> int:
        return max(0, round(one + times * (other - one)))

    def bytes_of(one: Mapping[Kind, int], other: Mapping[Kind, int]) -> dict[Kind, int]:
        return {kind: line(one.get(kind, 0), other.get(kind, 0)) for kind in {*one, *other}}

    one, other = few.recording, more.recording
    fullest = bytes_of(one.fullest, other.fullest)
    recording = Recording(
        max(other.peak, fullest, key=lambda found: sum(found.values())),
        bytes_of(one.most, other.most),
        fullest,
        bytes_of(one.held, other.held),
        {phase: work + (other.work[phase] + work * -1) * times for phase, work in one.work.items()},
        [replace(a, size=line(a.size, b.size)) for a, b in zip(one.collectives, other.collectives, strict=True)],
    )
    work = {name: value + times * (more.work[name] - value) for name, value in few.work.items()}
    return Trace(recording, few.passes, rows, few.parameters, work)
