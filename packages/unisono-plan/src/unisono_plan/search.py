"""The fastest layout that fits: strategy × shards × micro-batch × recomputation, from a few traces.

Steps of as many rows as are configured are traced, and of half as many, and with recomputation; memory and work of
other sizes are lines through these. State is divided by the number of shards; what copying shards costs is taken as
that of two. What comes out best is traced itself, before it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unisono.config.batch_split import divisors
from unisono.config.schema.layout import Layout
from unisono_plan.estimate import Conditions, Estimate, estimate, for_shards
from unisono_plan.recording import Collective, Kind, Phase, Trace, Work

Tracer = Callable[[dict[str, Any], int], Trace]  # of changes of the layout, and of rows of a micro-batch
_TRACED_SHARDS = 2
_STATE: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
_SIZES = 8  # micro-batches that are tried


@dataclass(frozen=True)
class Family:
    """What the layouts of one wrapper have in common.

    Attributes:
        few: A step of some rows, without recomputation.
        more: Of twice as many, where a process has so many; else the same.
        recomputed: Of the fewer rows, with all blocks recomputed.
    """

    few: Trace
    more: Trace
    recomputed: Trace

    @classmethod
    def trace(cls, tracer: Tracer, layout: dict[str, Any], rows: int) -> Family:
        """Trace a wrapper, with micro-batches of so many rows and of half as many."""
        few = tracer({**layout, "activation_checkpointing": 0}, max(1, rows // 2))
        more = tracer({**layout, "activation_checkpointing": 0}, 2 * few.rows) if rows > 1 else few
        return cls(few, more, tracer({**layout, "activation_checkpointing": 1}, few.rows))

    def activations(self, rows: int, share: float) -> float:
        """Bytes of activations at the peak, with a share of the blocks recomputed."""
        few, more, low = (
            trace.recording.most.get("activations", 0) for trace in (self.few, self.more, self.recomputed)
        )
        slope = max(0.0, (more - few) / self.few.rows) if self.more is not self.few else few / self.few.rows
        base = few - slope * self.few.rows
        saved = max(0.0, few - low) / self.few.rows  # of a row
        return max(base, base + rows * (slope - share * saved))

    def work(self, rows: int, share: float) -> dict[Phase, Work]:
        """Work of a micro-batch, and of the rest of a step."""
        found: dict[Phase, Work] = {}
        for phase, few in self.few.recording.work.items():
            row = (self.more.recording.work[phase] + few * -1) * (1 / self.few.rows)
            more = (self.recomputed.recording.work[phase] + few * -1) * (share * rows / self.few.rows)
            found[phase] = few + row * (rows - self.few.rows) + more
            calls = self.recomputed.recording.work[phase].calls
            found[phase].calls = round(few.calls + share * (calls - few.calls))  # as many whatever the number of rows
        return found

    def calls(self, passes: int) -> list[Collective]:
        """Collectives of the last micro-batch, and of one before it if there are several."""
        last = self.few.recording.collectives
        gathering = ("all_gather", "reduce_scatter")
        before = [replace(call, last=False) for call in last if call.kind in gathering] if passes > 1 else []
        return [*before, *last]


def search(
    tracer: Tracer, configured: Layout, rows: int, size: int, conditions: Conditions, parameters: int
) -> list[Estimate]:
    """Estimates of all layouts, the best first; those that do not fit come last.

    Args:
        tracer: Traces a layout.
        configured: Of the user; what is not searched stays as it is there.
        rows: Of a process in a step.
        size: Rows of the configured micro-batch.
        conditions: What all layouts share.
        parameters: That are trained.
    """
    found = list(_candidates(tracer, configured, rows, max(size, min(rows, 2)), conditions, parameters))
    return sorted(found, key=lambda one: (not one.fits, one.time.total if one.time and one.fits else one.memory))


def _candidates(
    tracer: Tracer, configured: Layout, rows: int, size: int, conditions: Conditions, parameters: int
) -> Iterator[Estimate]:
    world = conditions.hardware.count
    if world == 1:
        family = Family.trace(tracer, {"strategy": "single", "world_size": 1, "shards": None}, size)
        yield from _layouts(family, configured, "single", 1, 1, rows, conditions)
        return
    if 16.0 * parameters < conditions.hardware.memory:  # weights, gradients and two moments in fp32, on each device
        family = Family.trace(tracer, {"strategy": "ddp", "world_size": 2, "shards": None}, size)
        yield from _layouts(family, configured, "ddp", 1, world, rows, conditions)
    if configured.sync_batch_norm or configured.reduction == "ordered":
        return
    family = Family.trace(tracer, {"strategy": "fsdp", "world_size": _TRACED_SHARDS, "shards": None}, size)
    yield from _layouts(family, configured, "fsdp", world, world, rows, conditions)
    shards = 2
    while shards < world:
        if world % shards == 0:
            yield from _layouts(family, configured, "hsdp", shards, world, rows, conditions)
        shards *= 2


def _layouts(
    family: Family, configured: Layout, strategy: str, shards: int, world: int, rows: int, conditions: Conditions
) -> Iterator[Estimate]:
    """All micro-batches and recomputations of a strategy."""
    sharded = strategy in ("fsdp", "hsdp")
    for size in divisors(rows)[:_SIZES]:
        passes = rows // size
        for every in sorted({0, 1, 2, configured.activation_checkpointing}):
            share = 1 / every if every else 0.0
            layout = configured.model_copy(
                update={
                    "strategy": strategy,
                    "world_size": world,
                    "shards": shards if strategy == "hsdp" else None,
                    "micro_batch": size,
                    "activation_checkpointing": every,
                    "defer_reduction": configured.defer_reduction and sharded,
                    "bucket_mb": configured.bucket_mb if strategy == "ddp" else None,
                }
            )
            calls = family.calls(passes)
            if sharded:
                calls = for_shards(calls, strategy, shards, world)
            elif strategy == "ddp":
                calls = [replace(call, ranks=tuple(range(world))) for call in calls]
            memory = _memory(family, size, share, passes, shards if sharded else 0)
            yield estimate(
                layout,
                size,
                passes,
                memory,
                memory,
                calls,
                _shared_work(family, size, share, shards if sharded else 0),
                conditions,
            )


def _memory(family: Family, rows: int, share: float, passes: int, shards: int) -> Mapping[Kind, float]:
    most, peak = family.few.recording.most, family.few.recording.peak
    memory: dict[Kind, float] = {**peak, **{kind: float(most.get(kind, 0)) for kind in _STATE}}
    if shards:
        memory |= {kind: memory[kind] * _TRACED_SHARDS / shards for kind in _STATE}
    elif passes > 1 and "gradients" in memory and family.few.recording.collectives:
        memory["gradients"] *= 2  # what earlier micro-batches left is added to DDP's buckets in the last one
    memory["activations"] = family.activations(rows, share)
    return memory


def _shared_work(family: Family, rows: int, share: float, shards: int) -> dict[Phase, Work]:
    """Work of a micro-batch; the optimizer updates its shard alone."""
    work = family.work(rows, share)
    if shards:
        for phase in ("optimizer", "other"):
            if phase in work:
                calls = work[phase].calls
                work[phase] = work[phase] * (_TRACED_SHARDS / shards)
                work[phase].calls = calls
    return work
