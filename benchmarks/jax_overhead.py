"""What Unisono's JAX engine costs beside a bare jitted loop with optax, on one and two processes.

    python -m benchmarks.jax_overhead [--size small] [--rounds 40] [--processes 1 2] [--out jax_overhead.json]

As in `benchmarks/overhead.py`: in every round each contender makes one step on the same rows, in turn: the bare loop,
the bare loop again (what two equal things differ by on this machine) and Unisono's own loop. Beside the time there is
that of the processors, which other work on the machine hardly changes. The same transformer in
Unisono's torch engine follows in processes of its own, before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.overhead import interval

HERE = Path(__file__).parent
TASKS = {name: f"{HERE / 'jax_transformer.py'}:{name}" for name in ("InJax", "InTorch")}
BATCH, LR, DECAY = 16, 1e-3, 0.1
# 0.7 M parameters and rows of 64 tokens; 3.4 M and 256, about what `benchmarks/overhead.py` trains in torch.
SIZES: dict[str, list[str]] = {"small": [], "large": ["task.width=256", "task.blocks=4", "task.length=256"]}
WARM = 3  # rounds before anything is measured


def words(processes: int, folder: Path, steps: int, size: str) -> list[str]:
    """The settings by which a task does what the bare loop does."""
    return [
        *SIZES[size],
        f"layout.world_size={processes}", "layout.device=cpu", f"train.global_batch={BATCH}", f"train.steps={steps}",
        "schedules=constant", "schedules.lr.warmup=0", "optim=adamw", f"optim.lr={LR}", f"optim.weight_decay={DECAY}",
        "train.precision=fp32", "train.clip_norm=1.0", f"run.dir={folder}", "run.name=run", "eval.at_end=false",
        "eval.every=null", "checkpoint.at_end=false", "checkpoint.every=null", "observe.trackers=[]",
    ]  # fmt: skip


# the bare loop ----------------------------------------------------------------------------------------------------


def bare(rank: int, world: int, seed: int, size: str, seconds: dict[str, float]) -> Iterator[float]:
    """A training loop as one writes it by hand: one jitted function over global arrays, donated state, nothing else."""
    import jax
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan
    from unisono.engines.jax.model import init_key
    from unisono.task_config import build_task, load_config

    task = build_task(load_config(TASKS["InJax"], SIZES[size])[0])
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, by_row = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(LR, 0.9, 0.95, 1e-8, weight_decay=DECAY, mask=matrices)
    )

    def loss(parameters, batch):
        sums = task.loss(task.outputs(parameters, batch, None), batch, None).sums["next"]
        return sums.sum() / (batch["targets"] >= 0).sum()

    def step(parameters, state, batch):
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    parameters = jax.jit(lambda: task.build(init_key(seed)), out_shardings=replicated)()
    state = jax.jit(optimizer.init, out_shardings=replicated)(parameters)
    rows = task.data()
    plan = StreamPlan(Order(len(rows), seed), BATCH, 10**9)
    own = slice(rank * BATCH // world, (rank + 1) * BATCH // world)

    def batch_of(number):
        arrays = task.collate([rows[int(row)] for row in plan.batch(number)[own]])
        return {
            name: jax.make_array_from_process_local_data(by_row, array, (BATCH, *array.shape[1:]))
            for name, array in arrays.items()
        }

    began = time.perf_counter()
    compiled_step = jax.jit(step, donate_argnums=(0, 1), out_shardings=(replicated, replicated, replicated))
    program = compiled_step.lower(parameters, state, batch_of(0)).compile()
    seconds["compile"] = time.perf_counter() - began
    number = 0
    while True:
        parameters, state, value = program(parameters, state, batch_of(number))
        number += 1
        yield float(value)


# one process of the comparison ------------------------------------------------------------------------------------


def compare(rank: int, world: int, rounds: int, folder: Path, kind: str, size: str) -> dict:
    """Interleave the contenders, of which torch has one; returns seconds per step of each."""
    from unisono.config.resolved_run import ResolvedRun
    from unisono.launch.processes import rank_process
    from unisono.launch.resolving import layout, run_directory
    from unisono.runtime.communication.communicator import ProcessInfo
    from unisono.task_config import build_task, load_config
    from unisono.training.loop import Training

    process = ProcessInfo(rank, world, rank, world, "benchmark")
    config, _ = load_config(TASKS[kind], words(world, folder, rounds + WARM + 2, size))
    config = layout.resolve_layout(config, process)
    group = rank_process.join_processes(config, process)
    run = ResolvedRun(config, run_directory.run_path(config), None)
    if rank == 0:
        run.directory.mkdir(parents=True)
    group.barrier("the folder")
    compiled: dict[str, float] = {}
    seed = config.run.seed
    with Training(build_task(config), run, process, group) as training:
        contenders: dict[str, Iterator] = {"unisono": (result.loss for result in training.steps())}
        if kind == "InJax":
            contenders = {
                "bare": bare(rank, world, seed, size, compiled),
                "bare again": bare(rank, world, seed, size, {}),
            } | contenders
            own = training._parts.engine._compiler.seconds
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        cpu: dict[str, list[float]] = {name: [] for name in contenders}
        losses: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for number in range(rounds + WARM):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                group.barrier("the turn of the next contender")
                began, busy = time.perf_counter(), time.process_time()
                losses[name].append(next(contenders[name]))
                if number >= WARM:
                    seconds[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - busy)
    ends = {name: (values[0], values[-1]) for name, values in losses.items()}
    compile_seconds = {"bare": compiled["compile"], "unisono": own} if kind == "InJax" else {}
    return {"seconds": seconds, "cpu": cpu, "losses": ends, "compile_seconds": compile_seconds}


def spawn(world: int, code: str, arguments: list[str], cache: str) -> list[str]:
    """Start processes that call something of this module and wait; what each has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "OMP_NUM_THREADS": f"{threads}",
        "GLOO_SOCKET_IFNAME": "lo", "UNISONO_CACHE": cache,
    }  # fmt: skip
    command = [sys.executable, "-c", f"import os, sys; from benchmarks import jax_overhead; {code}; os._exit(0)"]
    started = [
        subprocess.Popen(
            [*command, f"{rank}", f"{world}", *arguments], env=environment, cwd=HERE.parent, stdout=subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.DEVNULL, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started), "a process failed"
    return outputs


def steps(world: int, rounds: int, kind: str, size: str) -> dict:
    """Step times on `world` processes."""
    with tempfile.TemporaryDirectory() as name:
        code = "jax_overhead.write_comparison(*sys.argv[1:])"
        spawn(world, code, [f"{rounds}", name, kind, size], f"{name}/cache")
        return json.loads((Path(name) / "result.json").read_text())


def write_comparison(rank: str, world: str, rounds: str, folder: str, kind: str, size: str) -> None:
    """`compare`, with what it found in a file; the entry of a process."""
    result = compare(int(rank), int(world), int(rounds), Path(folder), kind, size)
    if rank == "0":
        (Path(folder) / "result.json").write_text(json.dumps(result))


# from the command to the first step -------------------------------------------------------------------------------


def bare_first_step(rank: str, world: str, size: str) -> None:
    """A bare script up to its first step; the entry of a process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    if int(world) > 1:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, int(world), int(rank))
    next(bare(int(rank), int(world), 0, size, {}))
    print(f"first step at {time.time()}", flush=True)


def first_steps(world: int, repeats: int, size: str) -> dict[str, float]:
    """Seconds from starting a command to the end of its first step: bare, ours, and ours with compiled programs."""
    times: dict[str, list[float]] = {"bare": [], "unisono": [], "unisono, from the cache": []}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            began = time.time()
            outputs = spawn(world, "jax_overhead.bare_first_step(*sys.argv[1:])", [size], f"{name}/cache")
            times["bare"].append(float(outputs[0].split("first step at ")[1].split()[0]) - began)
            for number, contender in enumerate(("unisono", "unisono, from the cache")):
                folder = Path(name) / f"{number}"
                command = [sys.executable, "-m", "unisono", "train", TASKS["InJax"], *words(world, folder, 1, size)]
                began = time.time()
                process = subprocess.Popen(
                    command, env={**os.environ, "UNISONO_CACHE": f"{name}/cache"}, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )  # fmt: skip
                path = folder / "run" / "events.jsonl"
                while not (path.exists() and path.stat().st_size):
                    time.sleep(0.01)
                    assert process.poll() is None or path.exists(), "the run ended without a step"
                times[contender].append(time.time() - began)
                process.wait()
    return {name: statistics.median(values) for name, values in times.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--starts", type=int, default=3, help="how often the time to the first step is taken")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    report: dict[str, object] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"
    }
    for world in arguments.processes:
        print(f"\n{world} process{'es' if world > 1 else ''}, {arguments.rounds} rounds", flush=True)
        size, few = arguments.size, arguments.rounds // 4 + 1
        torch = [steps(world, few, "InTorch", size)["seconds"]["unisono"]]
        results = steps(world, arguments.rounds, "InJax", size)
        torch.append(steps(world, few, "InTorch", size)["seconds"]["unisono"])
        report[f"{world}"] = shown = summary(results, torch) | {
            "first_step_seconds": first_steps(world, arguments.starts, size)
        }
        print(json.dumps(shown, indent=1), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))


def summary(results: dict, torch: list[list[float]]) -> dict:
    """Medians, ratios to the bare loop with their intervals, first and last losses."""
    seconds = {name: np.array(values) for name, values in results["seconds"].items()}
    cpu = {name: np.array(values) for name, values in results["cpu"].items()}
    ratios: dict[str, dict] = {}
    for kind, values in (("", seconds), (", processors", cpu)):
        for name in ("bare again", "unisono"):
            ratio = values[name] / values["bare"]
            ratios[name + kind] = {"median": float(np.median(ratio)), "interval": interval(ratio)}
            ratios[name + kind]["of medians"] = float(np.median(values[name]) / np.median(values["bare"]))
    milliseconds = {name: 1e3 * float(np.median(values)) for name, values in seconds.items()}
    milliseconds |= {f"{name}, processors": 1e3 * float(np.median(values)) for name, values in cpu.items()}
    milliseconds["unisono, torch"] = 1e3 * statistics.median([*torch[0], *torch[1]])
    return {
        "milliseconds": milliseconds, "ratios": ratios, "losses": results["losses"],
        "compile_seconds": results["compile_seconds"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
