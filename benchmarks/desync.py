"""What it costs to compare collectives before each update, on two processes over gloo.

    python -m benchmarks.desync [--write] [--rounds 30]

A collective that is noted, beside one that is not: the time until the backend has it, in a group of one process, with a
product of matrices before each, as the caches of a training step are cold. An all-reduce is seen in torch's dispatcher;
gathers and scatters of FSDP units are noted where FSDP hands them over, and compared with its own way. Then steps of
about 100 ms of a model of 12 blocks, under DDP and FSDP2: how many collectives they make; what a comparison takes of
the process that comes to it last, which waits for nobody (the others would wait for it in the next reduction); what all
this comes to; and, as far as the machine's noise lets it be seen, the step itself with and without, and without again,
in turns.
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from benchmarks import page
from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan
from unisono.engines.protocol import EngineJob
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.guards.collective_comparison import CollectiveComparison
from unisono.engines.torch.parallel import fsdp_communication
from unisono.runtime.communication.collective_log import COMPARISON
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Context, Loss, SampleContext, Task

CALLS, DEPTH, STEPS = 100, 15, 3
KINDS = {"all_reduce": "all_reduce", "gather": "all_gather_into_tensor", "scatter": "reduce_scatter_tensor"}
WIDTH, BLOCKS, ROWS = 384, 12, 384


class Deep(Task):
    """A regression through many blocks, each of them a unit of FSDP."""

    def data(self) -> np.ndarray[Any, Any]:
        return np.random.default_rng(0).normal(size=(4 * ROWS, WIDTH)).astype(np.float32)

    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": float(len(batch["x"]))}

    def sample(self, record: Any, context: SampleContext) -> Any:
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


def noted(process: ProcessInfo, rounds: int) -> dict[str, list[float]]:
    """Microseconds by which a collective that is noted takes longer, by its kind and round."""
    groups = [dist.new_group([rank]) for rank in range(process.world_size)]
    own, tensor, out = groups[process.rank], torch.ones(4), torch.ones(4)
    rows, weight = torch.ones(ROWS // 2, WIDTH), torch.ones(WIDTH, WIDTH)
    desync = CollectiveComparison(process, 60.0, wanted=True)
    ours = (
        fsdp_communication.LoggedAllGather("FSDP unit 3", desync.note),
        fsdp_communication.LoggedReduceScatter("FSDP unit 3", desync.note),
    )
    torchs = DefaultAllGather(), DefaultReduceScatter()

    def block(kind: str, gather: Any, scatter: Any) -> float:
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(tensor, group=own, async_op=True),
            "gather": lambda: gather(out, tensor, own, async_op=True),
            "scatter": lambda: scatter(out, tensor, own, dist.ReduceOp.SUM, async_op=True),
        }
        times = []
        for _ in range(CALLS):
            torch.mm(rows, weight)
            began = time.perf_counter()
            work = deep(DEPTH, calls[kind])
            times.append(time.perf_counter() - began)
            work.wait()
        return statistics.median(times) * 1e6

    durations: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, times in durations.items():
            without = block(kind, *torchs)
            desync.start()
            block(kind, *ours)
            times.append(block(kind, *ours) - without)
            desync.close()
    return durations


class Timed(CollectiveComparison):
    """A comparison whose time is taken: its beginning and its end, without what is computed in between."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.times: list[float] = []

    def begin_check(self) -> None:
        began = time.perf_counter()
        super().begin_check()
        self.times.append(time.perf_counter() - began)

    def check(self, when: str) -> None:
        began = time.perf_counter()
        super().check(when)
        self.times[-1] += time.perf_counter() - began


def steps(process: ProcessInfo, group: Communicator, strategy: str, rounds: int) -> dict[str, Any]:
    """Collectives of a step, seconds of each comparison, and milliseconds of steps with and without it, by round."""
    task = Deep()
    config = configuration(
        layout={"strategy": strategy, "world_size": 2, "micro_batch": ROWS // 2},
        train={"steps": 10**6, "global_batch": ROWS, "guard_every": 10**6},
        optim={"kind": "sgd", "lr": 1e-4},
        launch={"desync": False},  # it is observed by a comparison of our own
    )
    split = BatchSplit.create(ROWS, process.world_size, ROWS // 2)
    source = task.data()
    loader = Loader(task, source, build_plan(task, source, config, process.world_size), split, process.rank)
    engine = TorchEngine(EngineJob(task, config, process, group, split))
    batches = next(iter(loader.steps()))
    engine.setup(batches, {"lr": 1e-4})
    number = 0

    def block() -> float:
        nonlocal number
        group.barrier("a block")
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step(batches, number, {"lr": 1e-4})
            number += 1
        return (time.perf_counter() - began) / STEPS * 1e3

    desync = Timed(process, 60.0, wanted=True, ddp=strategy == "ddp")
    engine.observe(desync)
    wrapped = engine.train_state.parallel.wrapped

    def start() -> None:
        desync.start()
        desync.watch(wrapped)

    start()
    block()
    before = desync._log.calls()[-1].number
    engine.step(batches, number, {"lr": 1e-4})
    ring = [call.what for call in desync._log.calls() if call.number > before]
    calls = [entry.operation for entry in ring if entry.site != COMPARISON]  # whose time is taken as a whole
    counts = {kind: calls.count(name) for kind, name in KINDS.items()}
    assert sum(counts.values()) == len(calls)
    desync.close()
    durations: dict[str, list[float]] = {"with": [], "without": [], "without, again": []}
    compared = []
    for _ in range(rounds):
        for name, times in durations.items():
            for module in wrapped.modules():
                if isinstance(module, FSDPModule):
                    module.set_custom_all_gather(DefaultAllGather())
                    module.set_custom_reduce_scatter(DefaultReduceScatter())
            if name == "with":
                start()
            engine.step(batches, number, {"lr": 1e-4})
            times.append(block())
            desync.close()
            compared += desync.times[-STEPS:] if name == "with" else []
    loader.close()
    engine.close()
    return {"counts": counts, "compared": compared, "times": durations}


def measure(process: ProcessInfo, group: Communicator, rounds: int) -> dict[str, Any]:
    os.environ.pop("UNISONO_HEARTBEAT", None)
    return {
        "noted": noted(process, rounds),
        **{strategy: steps(process, group, strategy, rounds) for strategy in ("ddp", "fsdp")},
    }


def table(rounds: int) -> str:
    ranks = processes.run(measure, 2, rounds, timeout=3600)
    note = {kind: max(statistics.median(rank["noted"][kind]) for rank in ranks) for kind in KINDS}
    lines = [
        f"Recording adds {note['all_reduce']:.0f} µs to an all-reduce, {note['gather']:.0f} µs to an all-gather of an "
        f"FSDP unit and {note['scatter']:.0f} µs to a reduce-scatter.",
        "",
        "| strategy | collectives | comparison | cost of all | of 100 ms | step with | without | without, again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for strategy in ("ddp", "fsdp"):
        counts = ranks[0][strategy]["counts"]
        last = [min(times) for times in zip(*(rank[strategy]["compared"] for rank in ranks), strict=True)]
        compare = statistics.median(last) * 1e6
        cost = (sum(note[kind] * count for kind, count in counts.items()) + compare) / 1e3
        medians = [
            max(statistics.median(rank[strategy]["times"][name]) for rank in ranks)
            for name in ("with", "without", "without, again")
        ]
        cells = " | ".join(f"{value:.1f} ms" for value in medians)
        collectives = f"{counts['all_reduce']} + {counts['gather'] + counts['scatter']}"
        lines.append(f"| {strategy} | {collectives} | {compare:.0f} µs | {cost:.2f} ms | {cost:.2f} % | {cells} |")
    cells = f"torch {torch.__version__.partition('+')[0]}, {BLOCKS} blocks, medians of {rounds} rounds"
    return "\n".join([*lines, "", f"{cells}; {time.strftime('%Y-%m-%d')}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    text = table(arguments.rounds)
    print(text)
    if arguments.write:
        page.put("desync", text)


if __name__ == "__main__":
    main()
