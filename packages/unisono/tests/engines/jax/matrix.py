"""The JAX runs that have to be the same: a transformer and spirals on every layout; shared with the benchmark.

The transformer has dropout, its target counts are uneven, one row has none. The last batch of either does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packages.unisono.tests import processes
from packages.unisono.tests.runs import SGD, Trace, configuration
from unisono.config.schema.run import RunConfig
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Task

BATCH = 48
ROWS = 9 * BATCH + 5  # ten batches, the last one short
MODELS = ("transformer", "spirals")
PRECISIONS = ("fp64", "fp32")
DEVICES = {1: 4, 2: 2}  # of each process, by the number of processes

# name -> (processes, devices of each, layout, micro-batches; 48 rows are one to four passes, on one device up to 16)
KINDS: dict[str, tuple[int, int, dict[str, Any], tuple[int, ...]]] = {
    "single": (1, 1, {"strategy": "single"}, (48, 24, 12, 8, 6, 4, 3)),
    "ddp ×2": (1, 2, {"strategy": "ddp"}, (24, 12, 8, 6)),
    "fsdp ×4": (1, 4, {"strategy": "fsdp"}, (12, 6, 4, 3)),
    "hsdp 2×2": (1, 4, {"strategy": "hsdp", "shards": 2}, (12, 6, 4, 3)),
    "2 processes × 2, ddp": (2, 2, {"strategy": "ddp"}, (12, 6, 4, 3)),
    "2 processes × 2, fsdp": (2, 2, {"strategy": "fsdp"}, (12, 6, 4, 3)),
    "2 processes × 2, hsdp": (2, 2, {"strategy": "hsdp", "shards": 2}, (12, 6, 4, 3)),
}


@dataclass(frozen=True)
class Case:
    """One run of the matrix; `micro_batch` rows are one pass of one device."""

    model: str
    precision: str
    kind: str
    micro_batch: int

    @property
    def reference(self) -> Case:
        """The run on one device with the same micro-batches, by which dropout is drawn; spirals draw nothing."""
        return Case(self.model, self.precision, "single", self.micro_batch if self.model == "transformer" else BATCH)


CASES = [
    Case(model, precision, kind, micro_batch)
    for model in MODELS
    for precision in PRECISIONS
    for kind, (*_, passes) in KINDS.items()
    for micro_batch in passes
]


def run(cases: list[Case], timeout: float = 1800) -> dict[Case, Trace]:
    """Make the runs, those of as many processes in the same ones; references are not added."""
    results: dict[Case, Trace] = {}
    for world in DEVICES:
        chosen = [case for case in cases if KINDS[case.kind][0] == world]
        if not chosen:
            continue
        for case, *everyone in zip(chosen, *processes.run(traces, world, chosen, timeout=timeout), strict=True):
            assert all(other.losses == everyone[0].losses for other in everyone), f"{case}: ranks report other losses"
            results[case] = everyone[0]
    return results


def traces(place: ProcessInfo, group: Communicator, cases: list[Case]) -> list[Trace]:
    """Several runs in the same processes, one after the other; each process has JAX to itself."""
    from packages.unisono.tests.jax_runs import layout, trace
    from unisono.engines.jax.parallel import runtime

    world = place.world_size
    runtime.start(
        configuration(layout=layout(DEVICES[world], "fsdp", world_size=world)), place, group, ["127.0.0.1"] * world
    )
    made = []
    for case in cases:
        task = _task(case.model)
        made.append(trace(task, _config(case, len(task.data())), place, group))
    runtime.stop(group)
    return made


def _config(case: Case, rows: int) -> RunConfig:
    world, devices, layout, _ = KINDS[case.kind]
    return configuration(
        layout={"engine": "jax", "world_size": world, "devices": devices, "micro_batch": case.micro_batch, **layout},
        train={"epochs": ROWS / rows, "global_batch": BATCH, "precision": case.precision, "clip_norm": 0.5},
        optim=SGD,
    )


def _task(model: str) -> Task:
    if model == "spirals":
        from examples.spirals_jax import Spirals

        return Spirals(Spirals.Config())
    from packages.unisono.tests.jax_tasks import TransformerTask

    return TransformerTask(TransformerTask.Config(rows=200, dropout=0.1))
