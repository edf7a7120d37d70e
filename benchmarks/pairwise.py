"""Losses across samples: time, memory and gradient of ours, of all pairs everywhere, and of two libraries, in one run.

    pip install --no-deps pytorch-metric-learning sentence-transformers
    python -m benchmarks.pairwise [--write] [--world 1 2 4] [--repeats 7] [--most 4096]

Only the loss is measured, from the embeddings that a model has returned to their gradients: a contrast (InfoNCE with
the same temperature everywhere) and a regression of distances, whose pairs are written as a broadcast difference. Ours
is the engine's own code (`unisono.engines.torch.numerics.cross_sample`). Memory is the growth of the peak resident size
of a process; time is the median over repetitions of the slowest process, after a barrier, one thread each, over gloo.
The gradient is held against that of the same loss on one process over the whole batch, under DDP's convention: what
reaches a parameter is the mean over processes. pytorch-metric-learning's contrast is of both views with both, which is
four times the pairs. A library that is not installed is left out, and named.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import page
from packages.unisono.tests import processes
from packages.unisono.tests.runs import configuration
from unisono.config.batch_split import BatchSplit
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.protocol import EngineJob
from unisono.engines.torch.numerics.cross_sample import TorchCrossSampleLoss
from unisono.engines.torch.numerics.random_state import RandomState
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Context, Loss, Task

TEMPERATURE = 0.07
SIZES = {"contrast": (256, (1024, 4096)), "distances": (64, (256, 1024))}  # features; rows of the global batch
Pair = tuple[Tensor, Tensor]
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]  # own rows, everyone's, places of the own -> summed loss
Way = Callable[[Tensor, Tensor], None]  # leaves -> their gradients, such that DDP's mean over processes is right


def contrast(own: Tensor, everyone: Tensor, here: Tensor) -> Tensor:
    logits = F.normalize(own) @ F.normalize(everyone).T / TEMPERATURE
    return F.cross_entropy(logits, here, reduction="sum")


def distances(own: Tensor, everyone: Tensor, here: Tensor) -> Tensor:
    apart = (own[:, None] - everyone[None]).square().sum(-1)  # (rows, all rows, features) on the way
    wanted = torch.tanh((here[:, None] - torch.arange(len(everyone))[None]).abs() / len(everyone))
    return (torch.tanh(apart.clamp_min(1e-8).sqrt() / 10) - wanted).square().sum() / len(everyone)


LOSSES: dict[str, Rows] = {"contrast": contrast, "distances": distances}


class Crossed(Task):
    """A task that is its loss."""

    cross_sample = "rows"

    def __init__(self, loss: Rows) -> None:
        super().__init__()
        self._loss = loss

    def data(self) -> list[int]:
        return [0]

    def build(self) -> nn.Module:
        return nn.Identity()

    def counts(self, batch: Any) -> dict[str, float]:
        return {"across": 1.0}

    def outputs(self, model: nn.Module, batch: Any, context: Context) -> Any:
        return batch

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        assert context.global_batch is not None
        first = context.global_batch.first
        here = torch.arange(first, first + len(outputs["a"]))
        return Loss({"across": self._loss(outputs["a"], context.global_batch.outputs["b"], here)})


# the ways -------------------------------------------------------------------------------------------------------------


def ours(loss: Rows, process: ProcessInfo, group: Communicator, passes: int) -> Way:
    job = EngineJob(
        Crossed(loss),
        configuration(),
        process,
        group,
        BatchSplit.create(passes * process.world_size, process.world_size, 1),
    )
    across = TorchCrossSampleLoss(job, RandomState(0, torch.device("cpu")), lambda _, context: ({}, context))

    def way(a: Tensor, b: Tensor) -> None:
        size = len(a) // passes
        parts = [{"a": x, "b": y} for x, y in zip(a.split(size), b.split(size), strict=True)]
        micros = [MicroBatch(process.rank * passes + k, np.arange(size), {}, {}, {}) for k in range(passes)]
        for micro, outputs in zip(micros, parts, strict=True):
            across.add_outputs(micro, outputs, {})
        rows = len(a) * process.world_size
        across.compute_loss(Context(0, training=True), {"across": torch.tensor(process.world_size / rows)})
        for micro, outputs in zip(micros, parts, strict=True):
            across.surrogate_loss(micro, outputs)[0].backward()

    return way


def everywhere(loss: Rows) -> Way:
    """Every process gathers all rows, with gradients, and computes all pairs."""

    def way(a: Tensor, b: Tensor) -> None:
        all_a, all_b = (torch.cat(dist.nn.all_gather(view)) for view in (a, b))  # type: ignore[attr-defined]
        (loss(all_a, all_b, torch.arange(len(all_a))) / len(all_a)).backward()

    return way


def local(loss: Rows) -> Way:
    """Every process has the pairs of its own rows only: what a loss does that knows nothing of the others."""

    def way(a: Tensor, b: Tensor) -> None:
        (loss(a, b, torch.arange(len(a))) / len(a)).backward()

    return way


def metric_learning(efficient: bool, rank: int) -> Way:
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    wrapped = DistributedLossWrapper(of_both_views(), efficient=efficient)

    def way(a: Tensor, b: Tensor) -> None:
        labels = torch.arange(rank * len(a), (rank + 1) * len(a)).repeat(2)
        wrapped(torch.cat([a, b]), labels).backward()

    return way


def of_both_views() -> Any:
    """pytorch-metric-learning's: each row of both views against all others of both, so four times the pairs.

    Its `NTXentLoss` holds every positive pair against every negative one, which is B³; `SupConLoss` is the same here.
    """
    from pytorch_metric_learning.losses import SupConLoss

    return SupConLoss(temperature=TEMPERATURE)


def alone(name: str, way: str, rows: int) -> Way:
    """The same loss on one process."""
    if way.startswith("pytorch-metric-learning"):
        return lambda a, b: of_both_views()(torch.cat([a, b]), torch.arange(rows).repeat(2)).backward()
    return local(LOSSES[name])


def sentence_transformers() -> Way:
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    nobody: Any = nn.Identity()
    loss_module = MultipleNegativesRankingLoss(nobody, scale=1 / TEMPERATURE, gather_across_devices=True)

    def way(a: Tensor, b: Tensor) -> None:
        loss_module.compute_loss_from_embeddings([a, b], torch.zeros(0)).backward()

    return way


def ways(name: str, process: ProcessInfo, group: Communicator) -> dict[str, Way]:
    loss = LOSSES[name]
    losses = {
        "Unisono": ours(loss, process, group, 1),
        "Unisono, 8 micro-batches": ours(loss, process, group, 8),
        "all pairs everywhere": everywhere(loss),
        "local pairs only": local(loss),
    }
    if name == "contrast" and installed("pytorch_metric_learning"):
        losses["pytorch-metric-learning"] = metric_learning(False, process.rank)
        losses["pytorch-metric-learning, efficient"] = metric_learning(True, process.rank)
    if name == "contrast" and installed("sentence_transformers"):
        losses["sentence-transformers"] = sentence_transformers()
    return losses


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# measuring ------------------------------------------------------------------------------------------------------------


def embeddings(rows: int, features: int) -> Pair:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, features, generator=generator), torch.randn(rows, features, generator=generator)


def measure(process: ProcessInfo, group: Communicator, repeats: int, most: int) -> list[list[Any]]:
    """Of this process: loss, rows, way, seconds, bytes, squared error of the gradient and squared gradient."""
    warnings.simplefilter("ignore")
    results: list[list[Any]] = []
    for name, (features, sizes) in SIZES.items():
        for rows in (rows for rows in sizes if rows <= most):
            size = rows // process.world_size
            mine = slice(process.rank * size, (process.rank + 1) * size)
            own = [view[mine].clone() for view in embeddings(rows, features)]
            for way, run in ways(name, process, group).items():
                whole = [view.requires_grad_() for view in embeddings(rows, features)]
                alone(name, way, rows)(whole[0], whole[1])
                exact = [view.grad[mine].clone() for view in whole]  # type: ignore[index]
                del whole
                leaves = [view.clone().requires_grad_() for view in own]
                before = fresh_peak()
                run(leaves[0], leaves[1])
                memory = peak() - before
                got = [view.grad / process.world_size for view in leaves]  # type: ignore[operator]
                errors = [float((g - e).square().sum()) for g, e in zip(got, exact, strict=True)]
                seconds = []
                for _ in range(repeats):
                    leaves = [view.clone().requires_grad_() for view in own]
                    group.barrier("a repetition")
                    began = time.perf_counter()
                    run(leaves[0], leaves[1])
                    seconds.append(time.perf_counter() - began)
                squares = sum(float(e.square().sum()) for e in exact)
                results.append([name, features, rows, way, seconds, memory, sum(errors), squares])
    return results


def fresh_peak() -> int:
    """The resident size of this process, from which its peak counts anew; in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def table(worlds: list[int], repeats: int, most: int) -> str:
    lines = [
        "| loss | rows × features | processes | way | ms | memory | error of the gradient |",
        "|---|---|---|---|---|---|---|",
    ]
    everything = []
    for world in worlds:
        ranks = processes.run(measure, world, repeats, most, timeout=1800)
        for entry in zip(*ranks, strict=True):
            name, features, rows, way = entry[0][:4]
            slowest = statistics.median(map(max, zip(*(rank[4] for rank in entry), strict=True)))
            memory = max(rank[5] for rank in entry)
            error = (sum(rank[6] for rank in entry) / sum(rank[7] for rank in entry)) ** 0.5
            row = f"| {name} | {rows} × {features} | {world} | {way} | {1e3 * slowest:.1f} | {memory / 1e6:.0f} MB"
            everything.append((name, rows, world, f"{row} | {error:.0e} |"))
    everything.sort(key=lambda per_rank: per_rank[:3])
    missing = [p for p in ("pytorch_metric_learning", "sentence_transformers") if not installed(p)]
    notes = f"torch {torch.__version__.partition('+')[0]}, {repeats} repetitions; {time.strftime('%Y-%m-%d')}."
    notes += f" Not installed, so not measured: {', '.join(missing)}." if missing else ""
    return "\n".join([*lines, *(row for *_, row in everything), "", notes])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--world", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--most", type=int, default=4096, help="rows of the largest global batch")
    arguments = parser.parse_args()
    text = table(arguments.world, arguments.repeats, arguments.most)
    print(text)
    if arguments.write:
        page.put("pairwise", text)


if __name__ == "__main__":
    main()
