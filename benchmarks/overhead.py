"""What Unisono costs beside a bare torch loop, on one and two processes: step time, time to the first step, memory.

    python -m benchmarks.overhead [--rounds 40] [--processes 1 2] [--out overhead.json]

In every round each contender makes one step, in turn, on the same rows: the bare loop, the bare loop again (the A/A
interval: what two equal things differ by on this machine) and Unisono's own loop with its loader, guards, events and
progress. All start from the same weights. The first loss of each is printed, so that one can see that they do the same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, LENGTH, LR = 16, 256, 1e-3


def recipe(processes: int, folder: Path, steps: int) -> list[str]:
    """The overrides that make the language recipe do what the bare loop does."""
    settings = ",".join(f"{name}:{str(value).lower()}" for name, value in MODEL.items())
    return [
        f"layout.world_size={processes}", "layout.device=cpu", f"model.settings={{{settings}}}",
        f"train.global_batch={BATCH}", f"train.steps={steps}", f"task.sequence={LENGTH}", "schedules=constant",
        "schedules.lr.warmup=0", f"optim.lr={LR}", "optim.weight_decay=0.1", f"run.dir={folder}", "run.name=run",
        "eval.at_end=false", "eval.every=null", "checkpoint.at_end=false", "checkpoint.every=null",
        "observe.trackers=[]",
    ]  # fmt: skip


# the bare loop ----------------------------------------------------------------------------------------------------


def bare(rank: int, world: int, task, seed: int) -> Iterator[float]:
    """A training loop as one writes it by hand: DDP, AdamW, clipping, no recording of anything."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan
    from unisono.engines.torch.losses.linear_cross_entropy import linear_cross_entropy
    from unisono.runtime.rng import key

    torch.manual_seed(key(seed, "init"))
    model = task.build()

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, inputs, targets):
            hidden = self.model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
            weight = self.model.get_output_embeddings().weight
            return linear_cross_entropy(hidden.flatten(0, 1), weight, None, targets.flatten())[0]

    step_module = WithLoss()
    wrapped = DistributedDataParallel(step_module, gradient_as_bucket_view=True) if world > 1 else step_module
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    rows = task.data()
    plan = StreamPlan(Order(len(rows), seed), BATCH, 10**9)
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    step = 0
    while True:
        batch = task.collate([rows[int(row)] for row in plan.batch(step)[own]])
        inputs, targets = torch.from_numpy(batch["inputs"]), torch.from_numpy(batch["targets"])
        count = torch.tensor(float((targets != -100).sum()))
        if world > 1:
            torch.distributed.all_reduce(count)
        loss = wrapped(inputs, targets) / count * world
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach() / world
        if world > 1:
            torch.distributed.all_reduce(total)
        step += 1
        yield total.item()


# one process of the comparison ------------------------------------------------------------------------------------


def compare(rank: int, world: int, rounds: int, folder: Path) -> dict | None:
    """Interleave the contenders; returns seconds per step of each, on rank 0."""
    from unisono.config.resolved_run import ResolvedRun
    from unisono.launch.processes import rank_process
    from unisono.launch.resolving import layout, run_directory
    from unisono.runtime.communication.communicator import ProcessInfo
    from unisono.task_config import build_task, load_config
    from unisono.training.loop import Training

    process = ProcessInfo(rank, world, rank, world, "benchmark")
    config, _ = load_config("language", recipe(world, folder, rounds + 5))
    config = layout.resolve_layout(config, process)
    group = rank_process.join_processes(config, process)
    task = build_task(config)
    run = ResolvedRun(config, run_directory.run_path(config), None)
    if rank == 0:
        run.directory.mkdir(parents=True)
    group.barrier("the folder")
    with Training(task, run, process, group) as training:
        contenders: dict[str, Iterator] = {
            "bare": bare(rank, world, build_task(config), config.run.seed),
            "bare again": bare(rank, world, build_task(config), config.run.seed),
            "unisono": (result.loss for result in training.steps()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for number in range(rounds + 3):
            for name in names[number % 3 :] + names[: number % 3]:
                group.barrier("the turn of the next contender")
                began = time.perf_counter()
                losses[name].append(next(contenders[name]))
                if number >= 3:  # the first steps warm caches up
                    seconds[name].append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "first": {n: v[0] for n, v in losses.items()},
        "last": {n: v[-1] for n, v in losses.items()},
    }


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """The 95 % interval of the median of ratios, by bootstrap."""
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, size=(2000, len(ratios))), axis=1)
    return float(np.quantile(medians, 0.025)), float(np.quantile(medians, 0.975))


# from the command to the first step -------------------------------------------------------------------------------


def bare_first_step() -> None:
    """A bare script up to its first step; started by torchrun for several processes."""
    import torch

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    from unisono.task_config import build_task, load_config

    config, _ = load_config("language", recipe(world, Path("unused"), 1))
    next(bare(int(os.environ.get("RANK", "0")), world, build_task(config), 0))
    if os.environ.get("RANK", "0") == "0":
        print(f"first step at {time.time()}", flush=True)
    os._exit(0)


def first_step(command: Callable[[Path], list[str]], events: bool) -> float:
    """Seconds from starting a command to the end of its first step."""
    with tempfile.TemporaryDirectory() as name:
        began = time.time()
        process = subprocess.Popen(command(Path(name)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if not events:
            out, _ = process.communicate()
            return float(out.split("first step at ")[1].split()[0]) - began
        path = Path(name) / "run" / "events.jsonl"
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.01)
            assert process.poll() is None or path.exists(), "the run ended without a step"
        seconds = time.time() - began
        process.wait()
        return seconds


def peak_memory(command: list[str]) -> float:
    """Largest resident size of any one process of a command, in MB."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, capture_output=True); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    out = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True).stdout
    return float(out.split()[-1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--starts", type=int, default=5, help="how often the time to the first step is taken")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--bare-first-step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare_first_step:
        bare_first_step()
    report = {"machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"}
    for world in arguments.processes:
        print(f"\n{world} process{'es' if world > 1 else ''}, {arguments.rounds} rounds", flush=True)
        report[str(world)] = steps(world, arguments.rounds) | starts(world, arguments.starts)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


def steps(world: int, rounds: int) -> dict:
    """Compare step times on `world` processes and print them."""
    with tempfile.TemporaryDirectory() as name:
        result = spawn(world, rounds, Path(name))
    seconds = {n: np.array(v) for n, v in result["seconds"].items()}
    for n, values in seconds.items():
        low, high = np.quantile(values, [0.1, 0.9])
        print(
            f"  {n:<11} {1e3 * np.median(values):7.1f} ms a step ({1e3 * low:.1f} to {1e3 * high:.1f}); "
            f"first loss {result['first'][n]:.6f}, last {result['last'][n]:.6f}"
        )
    table = {}
    for n in ("bare again", "unisono"):
        ratios = seconds[n] / seconds["bare"]
        low, high = interval(ratios)
        table[n] = {"ratio": float(np.median(ratios)), "interval": [low, high]}
        print(f"  {n:<11} / bare: {np.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f})")
    return {"milliseconds": {n: 1e3 * float(np.median(v)) for n, v in seconds.items()}, "ratios": table}


def starts(world: int, repeats: int) -> dict:
    """Compare the time to the first step and the peak memory, and print them."""
    script = [sys.executable, __file__, "--bare-first-step"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(world),
        __file__,
        "--bare-first-step",
    ]
    plain = script if world == 1 else torchrun

    def ours(folder: Path) -> list[str]:
        return [sys.executable, "-m", "unisono", "train", "language", *recipe(world, folder, 1)]

    times: dict[str, list[float]] = {"bare": [], "unisono": []}
    for _ in range(repeats):
        times["bare"].append(first_step(lambda _: plain, events=False))
        times["unisono"].append(first_step(ours, events=True))
    with tempfile.TemporaryDirectory() as name:
        memory = {"bare": peak_memory(plain), "unisono": peak_memory(ours(Path(name)))}
    for n in times:
        print(f"  {n:<11} first step after {statistics.median(times[n]):.1f} s; peak {memory[n]:.0f} MB in one process")
    return {"first_step_seconds": {n: statistics.median(v) for n, v in times.items()}, "peak_mb": memory}


def spawn(world: int, rounds: int, folder: Path) -> dict:
    """Run `compare` on processes of its own and fetch what rank 0 found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    code = (
        "import json, os, sys; from pathlib import Path; sys.path.insert(0, sys.argv[4]); import overhead; "
        "rank, world, rounds = map(int, sys.argv[1:4]); folder = Path(sys.argv[5]); "
        "result = overhead.compare(rank, world, rounds, folder); "
        "rank or (folder / 'result.json').write_text(json.dumps(result)); os._exit(0)"
    )
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    here = str(Path(__file__).parent)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(world), str(rounds), here, str(folder)], env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(world)
    ]  # fmt: skip
    assert [process.wait() for process in processes] == [0] * world, "a process failed"
    return json.loads((folder / "result.json").read_text())


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
