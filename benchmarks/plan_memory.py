"""Memory that `unisono plan` foretells beside what a real step holds, on a CPU: bytes that can be counted exactly.

    python -m benchmarks.plan_memory [CASE …]

Of each case one real step is made, by real processes over gloo where there are two, with the engine's own code. Bytes
of parameters, gradients and the optimizer's state are those of the tensors that rank 0 holds. The peak is independent
of what a plan does: torch's profiler says what its allocator gives out and takes back while the step runs, which is
added to what was there before. `plan` is asked for one device per process, and traces CPU kernels as always.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks import checkout

LLAMA = (
    "model.settings={hidden_size: 256, intermediate_size: 688, num_hidden_layers: 6, num_attention_heads: 4, "
    "num_key_value_heads: 4, max_position_embeddings: 512, tie_word_embeddings: false}"
)
LANGUAGE = [LLAMA, "task.sequence=256", "data.packing={method: concatenate}", "train.global_batch=8"]
CASES: dict[str, tuple[int, str, list[str]]] = {  # processes, recipe, settings
    "language": (1, "language", LANGUAGE),
    "language, bf16": (1, "language", [*LANGUAGE, "train.precision=bf16"]),
    "language, two micro-batches": (1, "language", [*LANGUAGE, "layout.micro_batch=4"]),
    "language, every block recomputed": (1, "language", [*LANGUAGE, "layout.activation_checkpointing=1"]),
    "language, LoRA": (1, "language", [*LANGUAGE, "adapter=lora"]),
    "language, DDP on 2": (2, "language", [*LANGUAGE, "layout.strategy=ddp"]),
    "language, FSDP on 2": (2, "language", [*LANGUAGE, "layout.strategy=fsdp"]),
    "language, LoRA, FSDP on 2": (2, "language", [*LANGUAGE, "layout.strategy=fsdp", "adapter=lora"]),
    "microbiome": (1, "microbiome", ["train.global_batch=32"]),
    "speech": (1, "speech", ["train.global_batch=16"]),
}
KINDS = ("parameters", "gradients", "optimizer")
OWN = ["train.steps=4", "data.workers=1", "launch.desync=false"]


def foretold(recipe: str, processes: int, words: list[str]) -> dict[str, float]:
    """Bytes by kind, and all of them at the peak."""
    from unisono.task_config import load_config
    from unisono_plan.plan import PlanSettings, make_plan

    config = load_config(recipe, [*OWN, *words])[0]
    settings = PlanSettings.model_validate({"hardware": f"h100x{processes}", "search": False})
    found = make_plan(config, settings).configured
    return {**{kind: float(found.most.get(kind, 0)) for kind in KINDS}, "peak": found.memory}


def size_of(tensors: Iterable[Any]) -> int:
    """Bytes of the distinct storages of this process's parts of tensors."""
    from torch import Tensor

    from unisono.optim.sharded import local

    storages = [local(one).untyped_storage() for one in tensors if isinstance(one, Tensor)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def make_step(recipe: str, words: list[str]) -> dict[str, float] | None:
    """A real step of this process; what rank 0 held."""
    from torch.profiler import ProfilerActivity, profile

    from unisono.config.batch_split import resolve_split
    from unisono.data.loading.loader import Loader
    from unisono.data.order.planning import build_plan, build_source
    from unisono.engines.observers import Observer
    from unisono.engines.protocol import EngineJob
    from unisono.engines.torch.engine import TorchEngine
    from unisono.launch import cluster
    from unisono.launch.processes import rank_process
    from unisono.launch.resolving import layout
    from unisono.optim.schedules import ScheduledScalars
    from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
    from unisono.task import run_setup
    from unisono.task_config import build_task, load_config

    process = cluster.process_info() or ProcessInfo()
    own = ["layout.device=cpu", "layout.threads=1", f"layout.world_size={process.world_size}"]
    config = layout.resolve_layout(load_config(recipe, [*own, *OWN, *words])[0], process)
    task = build_task(config)
    run_setup(task)
    source = build_source(task, config, process.world_size)
    plan = build_plan(task, source, config, process.world_size)
    alone = process.world_size == 1
    communicator = SingleProcess() if alone else rank_process.join_processes(config, process)
    split = resolve_split(config)
    loader = Loader.from_config(task, source, plan, split, process, config)
    engine = TorchEngine(EngineJob(task, config, process, communicator, split, check_updates=False))
    first, scalars = next(iter(loader.steps())), ScheduledScalars(config, plan.steps)
    engine.setup(first, scalars(0))
    engine.step(first, 0, scalars(0))  # after which the optimizer has its state
    state, found = engine.train_state, dict[str, float]()

    class Look(Observer):
        def on_gradients(self) -> None:
            found["gradients"] = size_of(one.grad for one in state.module.parameters())

    engine.observe(Look())
    found["parameters"] = size_of(state.module.parameters())
    found["optimizer"] = size_of(value for one in state.optimizer.state.values() for value in one.values())
    arrays = [array for micro in first for array in micro.arrays.values()]
    before = found["parameters"] + found["optimizer"] + size_of(state.module.buffers())
    before += sum(array.nbytes for array in arrays if hasattr(array, "nbytes"))
    if config.layout.strategy == "ddp":
        before += found["parameters"]  # its buckets, of which gradients are views
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine.step(first, 1, scalars(1))  # the rows of the plan: those of another step may be longer
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    loader.close()
    engine.close()
    if not alone:
        import torch.distributed as dist

        dist.destroy_process_group()
    return {**found, "peak": before + most} if process.is_first else None


def measured(case: str, processes: int) -> dict[str, float]:
    """The same of a real step, by processes of their own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(processes):
        environment = dict(os.environ)
        if processes > 1:
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "plan", **variables}
            environment |= {name: str(value) for name, value in own.items()}
        command = [sys.executable, "-m", "benchmarks.plan_memory", "--step", case]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=checkout.ROOT))
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{case}: a process failed, see above")
    result: dict[str, float] = json.loads(outputs[0].strip().splitlines()[-1])
    return result


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of: {'; '.join(CASES)}")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        _, recipe, words = CASES[options.step]
        print(json.dumps(make_step(recipe, words)))
        return
    names = [*KINDS, "peak"]
    print(f"| MB, foretold / held | {' | '.join(names)} | peak, foretold beside held |")
    print(f"|{'---|' * (len(names) + 2)}")
    for case in options.cases or CASES:
        processes, recipe, words = CASES[case]
        plan, real = foretold(recipe, processes, words), measured(case, processes)
        both = " | ".join(f"{plan[name] / 1e6:.3f} / {real[name] / 1e6:.3f}" for name in names)
        print(f"| {case} | {both} | {100 * (plan['peak'] / real['peak'] - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
