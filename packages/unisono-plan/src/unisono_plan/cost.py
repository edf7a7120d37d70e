"""How long a recorded step takes on given hardware: a roofline for arithmetic and memory, rings for collectives.

Products take their FLOPs at a share of the peak rate, everything else its bytes at a share of the memory's bandwidth,
and what a unit sends hides behind what others compute, except for the first gather and the last reduction. The shares
are measured (`CENTRAL`), and given as ranges (`FAST`, `SLOW`), because they are what a simulation cannot see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unisono_plan.hardware import Hardware
from unisono_plan.recording import Collective, Phase, Work

_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer", "other")
_RING_PASSES = {"all_reduce": 2}  # over the message; other collectives move it once


@dataclass(frozen=True)
class Shares:
    """What of a peak a step reaches.

    Attributes:
        product: Of the peak rate, by matrix products and attention.
        memory: Of the memory's bandwidth, by everything else.
        fused: Of the bytes of everything else that are left once blocks are compiled.
        link: Of a link's bandwidth, by large messages.
        hop: Seconds of one step of a ring.
        call: Seconds that the host takes for one operator, eagerly.
        message: Seconds that it takes around one collective, with the hooks of a wrapper.
    """

    product: float
    memory: float
    fused: float
    link: float
    hop: float
    call: float
    message: float

    def without_host(self) -> Shares:
        """The same for a program that the host only starts."""
        return replace(self, call=0.0, message=0.0)


# memory and fused: such that a Llama of 763 M parameters on one H200 has the MFU that was measured, eager and compiled
# (docs/benchmarks.md, "On a GPU"). The share of memory is near 1 because caches serve what is counted as memory's. All
# others are assumed: product for bf16 with ordinary numbers, link of the nominal bandwidth, hop for one step of a ring.
CENTRAL = Shares(product=0.72, memory=0.95, fused=0.225, link=0.75, hop=5e-6, call=6e-6, message=2e-4)
FAST = Shares(product=0.80, memory=1.0, fused=0.18, link=0.90, hop=2e-6, call=4e-6, message=1e-4)
SLOW = Shares(product=0.62, memory=0.80, fused=0.45, link=0.60, hop=12e-6, call=12e-6, message=5e-4)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on.

    Attributes:
        compute: Products.
        memory: Everything else that a device computes, bound by its memory.
        host: What the device waits for its host.
        network: Collectives that nothing hides.
        loader: What a step waits for its rows.
        sent: Collectives in all, hidden or not.
    """

    compute: float
    memory: float
    host: float
    network: float
    loader: float
    sent: float

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + self.memory + self.host + self.network + self.loader

    @property
    def binds(self) -> str:
        """What takes most of it."""
        parts = ("compute", "memory", "host", "network", "loader")
        return max(parts, key=lambda name: float(getattr(self, name)))


def ring_seconds(call: Collective, hardware: Hardware, shares: Shares) -> float:
    """Seconds of a collective: a ring moves (n - 1) / n of the message through every member."""
    members = len(call.ranks)
    if members == 1:
        return 0.0
    rounds = _RING_PASSES.get(call.kind, 1)
    moved = call.size * (members - 1) / members
    return rounds * (moved / (hardware.rate(call.ranks) * shares.link) + (members - 1) * shares.hop)


def step_time(
    work: dict[Phase, Work],
    collectives: Sequence[Collective],
    passes: int,
    hardware: Hardware,
    peak: float,
    shares: Shares,
    compiled: bool,
    loading: float = 0.0,
) -> StepTime:
    """The time of a step of `passes` micro-batches.

    Args:
        work: Of one micro-batch (forward, backward) and of the rest of the step.
        collectives: Of one micro-batch that is not the last, where there is one, and of the last.
        passes: Micro-batches of a process in a step.
        hardware: On which it runs.
        peak: FLOP/s of one device.
        shares: Of the peaks that it reaches.
        compiled: Whether blocks are compiled.
        loading: Seconds that the rows of a step take a process to build.
    """
    bandwidth = hardware.device.bandwidth * shares.memory
    compute = memory = host = network = sent = 0.0
    for phase in _PHASES:
        inner = phase in ("forward", "backward")
        for last, times in ((False, passes - 1), (True, 1)) if inner else ((True, 1),):
            calls = [call for call in collectives if call.phase == phase and (call.last == last or not inner)]
            products, others = _work_seconds(work.get(phase, Work()), peak, bandwidth, shares, compiled)
            host_seconds = work.get(phase, Work()).calls * shares.call * (shares.fused if compiled else 1.0)
            waits = max(0.0, host_seconds + len(calls) * shares.message - products - others)
            seconds = [ring_seconds(call, hardware, shares) for call in calls]
            edge = sum(seconds)
            if seconds and inner:  # a forward pass waits for its first gather, a backward pass for its last reduction
                edge = seconds[0] if phase == "forward" else seconds[-1]
            exposed = edge + max(0.0, sum(seconds) - edge - products - others - waits)
            compute, memory, host = compute + times * products, memory + times * others, host + times * waits
            network, sent = network + times * exposed, sent + times * sum(seconds)
    so_far = compute + memory + host + network
    return StepTime(compute, memory, host, network, max(0.0, loading - so_far), sent)


def _work_seconds(work: Work, peak: float, bandwidth: float, shares: Shares, compiled: bool) -> tuple[float, float]:
    products = max(work.flops / (peak * shares.product), work.product_bytes / bandwidth)
    return products, (shares.fused if compiled else 1.0) * work.other_bytes / bandwidth
