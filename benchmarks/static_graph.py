"""Whether DDP's `static_graph` gains anything: processor time of a step, with and without parameters left unused.

    python -m benchmarks.static_graph [--rounds 5]

Two processes with gloo and one thread each train a transformer (4 layers of 256 features) on four micro-batches per
step, of which three accumulate under `no_sync`. The four kinds take turns within the same two processes, in each round
in another order, and the figure is the median over rounds of the time of a step, in processor time (which leaves out
what else the machine does) and by the clock.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

KINDS = {
    "plain": {},
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "find_unused_parameters, static_graph": {"find_unused_parameters": True, "static_graph": True},
}
_STEPS, _PASSES = 6, 4


def build() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def steps(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    for _ in range(_STEPS):
        for number in range(_PASSES):
            model.require_backward_grad_sync = number == _PASSES - 1  # what no_sync() sets
            model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def work(rank: int, port: int, rounds: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    rows = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(rank))
    models = {name: DistributedDataParallel(build(), **how) for name, how in KINDS.items()}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=1e-3) for name, model in models.items()}
    for name, model in models.items():
        model(rows).square().mean().backward()  # with static_graph, a first pass in no_sync() is an error
        optimizers[name].zero_grad(set_to_none=True)
        steps(model, optimizers[name], rows)  # buckets are rebuilt after the first backward pass
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn in range(rounds):
        names = list(KINDS)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            processor, clock = time.process_time(), time.perf_counter()
            steps(models[name], optimizers[name], rows)
            found[name].append((time.process_time() - processor, time.perf_counter() - clock))
    first = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models.values()]
    if rank == 0:
        for name, times in found.items():
            processor, clock = (statistics.median(part) for part in zip(*times, strict=True))
            base, by_clock = (statistics.median(part) for part in zip(*found["plain"], strict=True))
            print(
                f"{name}: {1e3 * processor / _STEPS:.1f} ms of processor a step ({processor / base:.3f}), "
                f"{1e3 * clock / _STEPS:.1f} ms of clock ({clock / by_clock:.3f})"
            )
        print(f"largest difference of a parameter between kinds: {max((one - first[0]).abs().max() for one in first)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29577)
    arguments = parser.parse_args()
    mp.start_processes(work, args=(arguments.port, arguments.rounds), nprocs=2, start_method="spawn")
