"""What one layout needs and how long it takes, from the trace of a step of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unisono.config.schema.layout import Layout
from unisono.launch.autobatch.memory_fit import usable_bytes
from unisono_plan.cost import CENTRAL, FAST, SLOW, StepTime, step_time
from unisono_plan.hardware import Hardware
from unisono_plan.recording import Collective, Kind, Phase, Trace, Work

RESERVED = 2e9  # bytes of a device that no tensor has: the driver's context, workspaces of libraries, NCCL's buffers


@dataclass(frozen=True)
class Estimate:
    """What is foretold of a layout.

    Attributes:
        layout: The layout.
        rows: Of a micro-batch.
        passes: Micro-batches of each process in a step.
        peak: Bytes of a device by kind, when most are in use.
        most: The largest number of bytes of each kind.
        collectives: Of a whole step.
        work: Of a whole step of one device, by phase.
        time: Of a step; None where no peak rate is known.
        bounds: The same with the shares of `FAST` and `SLOW`.
        flops: What the task counts for a step of one device; None if it does not count them.
        tokens: Of a step of one device, where the task counts them.
        fits: Whether the memory of a device suffices.
    """

    layout: Layout
    rows: int
    passes: int
    peak: Mapping[Kind, float]
    most: Mapping[Kind, float]
    collectives: tuple[Collective, ...]
    work: Mapping[Phase, Work]
    time: StepTime | None
    bounds: tuple[StepTime, StepTime] | None
    flops: float | None
    tokens: float | None
    fits: bool

    @property
    def memory(self) -> float:
        """Bytes of a device at the peak."""
        return sum(self.peak.values())


@dataclass(frozen=True)
class Conditions:
    """What all layouts of a plan share.

    Attributes:
        hardware: On which they run.
        precision: Of the run.
        loading: Seconds that a row takes one process to build.
        work: What the task counts for one row.
        programs: Whether a step is one program (JAX), in which no operator and no collective waits for the host.
    """

    hardware: Hardware
    precision: str
    loading: float
    work: Mapping[str, float]
    programs: bool = False


def estimate_traced(trace: Trace, layout: Layout, passes: int, conditions: Conditions) -> Estimate:
    """The estimate of a layout that was traced itself."""
    recording = trace.recording
    each = {
        phase: one * (1 / trace.passes) if phase in ("forward", "backward") else one
        for phase, one in recording.work.items()
    }
    return estimate(layout, trace.rows, passes, recording.peak, recording.most, recording.collectives, each, conditions)


def estimate(
    layout: Layout,
    rows: int,
    passes: int,
    peak: Mapping[Kind, float],
    most: Mapping[Kind, float],
    calls: list[Collective],
    work: Mapping[Phase, Work],
    conditions: Conditions,
) -> Estimate:
    """The estimate of a layout.

    Args:
        layout: The layout.
        rows: Of a micro-batch.
        passes: Micro-batches of each process in a step.
        peak: Bytes by kind.
        most: The same, of each kind by itself.
        calls: Collectives of the last micro-batch, of one before it, and outside of micro-batches.
        work: Of one micro-batch (forward, backward), and of the rest of a step.
        conditions: What all layouts share.
    """
    hardware, seconds = conditions.hardware, conditions.loading * rows * passes
    rate, times = hardware.peak(conditions.precision), list[StepTime]()
    if rate:
        times = [
            step_time(dict(work), calls, passes, hardware, rate, shares, layout.compile, seconds)
            for shares in (one.without_host() if conditions.programs else one for one in (CENTRAL, FAST, SLOW))
        ]
    repeated = [call for call in calls if not call.last and call.phase in ("forward", "backward")]
    others = [call for call in calls if call.last or call.phase not in ("forward", "backward")]
    counted = {name: value * rows * passes for name, value in conditions.work.items()}
    return Estimate(
        layout,
        rows,
        passes,
        peak,
        most,
        (*(repeated * (passes - 1)), *others),
        {phase: one * passes if phase in ("forward", "backward") else one for phase, one in work.items()},
        times[0] if times else None,
        (times[1], times[2]) if times else None,
        counted.get("flops"),
        counted.get("tokens"),
        sum(peak.values()) + RESERVED <= usable_bytes(hardware.memory),
    )


def for_shards(calls: list[Collective], strategy: str, shards: int, world_size: int) -> list[Collective]:
    """The collectives of FSDP over some processes, for other numbers of processes.

    Messages are as large as the model's units, except for what is padded, which only a trace of the layout itself
    knows. Under HSDP what was reduced over the shards is then reduced over the copies, in the last micro-batch.
    """
    found = []
    for call in calls:
        if call.kind == "all_reduce":
            found.append(replace(call, ranks=tuple(range(world_size))))
            continue
        found.append(replace(call, ranks=tuple(range(shards))))
        if strategy == "hsdp" and call.kind == "reduce_scatter" and call.last:
            copies = tuple(range(0, world_size, shards))
            found.append(Collective("all_reduce", call.size // shards, copies, call.phase, True))
    return found
