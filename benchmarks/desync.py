"""What it costs to compare collectives before each update, on two processes over gloo.

    python -m benchmarks.desync [--write] [--rounds 30]

Three figures. A collective that is noted, beside one that is not: CPU time of the thread that calls it, in a group of
one process, where the collective itself does nothing, from FSDP's depth of frames; blocks with and without take turns.
A comparison: how long a process waits for it when all come at once. A step of about 100 ms of a model of 12 blocks,
under DDP and FSDP2: how many collectives it makes, what these and one comparison come to by the first two figures, and,
as far as the machine's noise lets it be seen, the step itself with and without, and without again, in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import page
from tests import processes
from tests.runs import configuration
from unisono.config.split import Split
from unisono.data.loader import Loader
from unisono.data.planning import plan_of
from unisono.engines.torch.desync import Desync
from unisono.engines.torch.engine import TorchEngine
from unisono.place import Group, Place
from unisono.task import Context, Loss, Task

CALLS, DEPTH, STEPS = 300, 15, 3
WIDTH, BLOCKS, ROWS = 384, 12, 384


class Deep(Task):
    """A regression through many blocks, each of them a unit of FSDP."""

    def data(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).normal(size=(4 * ROWS, WIDTH)).astype(np.float32)

    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    def sample(self, record: Any, rng: Any) -> Any:
        return {"x": record}

    def build(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return model(batch["x"])

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["x"]).square().mean(1).sum()})


def deep(depth: int, act: Callable[[], Any]) -> Any:
    """Call something from some frames further down."""
    return act() if depth == 0 else deep(depth - 1, act)


def noted(place: Place, rounds: int) -> list[float]:
    """Microseconds by which a collective that is noted takes longer, by round."""
    groups = [dist.new_group([rank]) for rank in range(place.world_size)]
    own, tensor = groups[place.rank], torch.ones(4)

    def block() -> float:
        began = time.thread_time()
        for _ in range(CALLS):
            deep(DEPTH, lambda: dist.all_reduce(tensor, group=own))
        return (time.thread_time() - began) / CALLS * 1e6

    found = []
    for _ in range(rounds):
        without = block()
        desync = Desync(place, 60.0, wanted=True)
        desync.start()
        block()
        found.append(block() - without)
        desync.close()
    return found


def compared(place: Place, group: Group, rounds: int) -> list[float]:
    """Microseconds of one comparison, by round."""
    desync = Desync(place, 60.0, wanted=True)
    desync.start()
    found = []
    for _ in range(rounds):
        group.barrier("a round")
        began = time.perf_counter()
        for _ in range(CALLS):
            desync.check("a round")
        found.append((time.perf_counter() - began) / CALLS * 1e6)
    desync.close()
    return found


def steps(place: Place, group: Group, strategy: str, rounds: int) -> tuple[float, dict[str, list[float]]]:
    """Collectives of a step, and milliseconds of steps with and without their comparison, by round."""
    task = Deep()
    config = configuration(
        layout={"strategy": strategy, "world_size": 2, "micro_batch": ROWS // 2},
        train={"steps": 10**6, "global_batch": ROWS, "guard_every": 10**6},
        optim={"kind": "sgd", "lr": 1e-4},
    )
    split = Split.of(ROWS, place.world_size, ROWS // 2)
    source = task.data()
    loader = Loader(task, source, plan_of(task, source, config, place.world_size), split, place.rank)
    engine = TorchEngine(task, config, place, group, split)
    batches = next(iter(loader.steps()))
    engine.setup(batches, {"lr": 1e-4})
    number, made = 0, 0.0

    def block() -> float:
        nonlocal number
        group.barrier("a block")
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step(batches, number, {"lr": 1e-4})
            number += 1
        return (time.perf_counter() - began) / STEPS * 1e3

    block()
    before = engine._desync._log.calls()[-1].number
    block()
    made = (engine._desync._log.calls()[-1].number - before) / STEPS
    engine._desync.close()
    found: dict[str, list[float]] = {"with": [], "without": [], "without, again": []}
    for _ in range(rounds):
        for name, times in found.items():
            engine._desync = Desync(place, 60.0, wanted=name == "with", ddp=strategy == "ddp")
            engine._desync.start()
            engine.step(batches, number, {"lr": 1e-4})
            times.append(block())
            engine._desync.close()
    loader.close()
    engine.close()
    return made, found


def measure(place: Place, group: Group, rounds: int) -> dict[str, Any]:
    os.environ.pop("UNISONO_PULSE", None)
    return {
        "noted": noted(place, rounds),
        "compared": compared(place, group, rounds),
        **{strategy: steps(place, group, strategy, rounds) for strategy in ("ddp", "fsdp")},
    }


def table(rounds: int) -> str:
    ranks = processes.run(measure, 2, rounds, timeout=3600)
    note = max(statistics.median(rank["noted"]) for rank in ranks)
    compare = max(statistics.median(rank["compared"]) for rank in ranks)
    lines = [
        f"A collective that is noted takes {note:.0f} µs longer, a comparison {compare:.0f} µs.",
        "",
        "| strategy | collectives a step | cost by these figures | of 100 ms | step with | without | without, again |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy in ("ddp", "fsdp"):
        made = ranks[0][strategy][0]
        cost = (made * note + compare) / 1e3
        medians = [
            max(statistics.median(rank[strategy][1][name]) for rank in ranks)
            for name in ("with", "without", "without, again")
        ]
        told = " | ".join(f"{value:.1f} ms" for value in medians)
        lines.append(f"| {strategy} | {made:.0f} | {cost:.2f} ms | {cost:.2f} % | {told} |")
    told = f"torch {torch.__version__.partition('+')[0]}, {BLOCKS} blocks, medians of {rounds} rounds"
    return "\n".join([*lines, "", f"{told}; {time.strftime('%Y-%m-%d')}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    made = table(arguments.rounds)
    print(made)
    if arguments.write:
        page.put("desync", made)


if __name__ == "__main__":
    main()
