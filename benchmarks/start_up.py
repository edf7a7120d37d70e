"""How long the command takes before it does anything, and how long from the command to the first step of a run.

    python -m benchmarks.start_up [ROUNDS] [--steps-only]

Each round runs every command once, in turn, so that all of them meet the same other load. A command without a run is
compared with a bare Python; a run on one process with a script of plain torch, on two with that script under
`torchrun`. The processor's time (user and system, of all processes together) says more on a busy machine than the wall
clock. All are medians; a ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

UNISONO = [sys.executable, "-m", "unisono"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "unisono": UNISONO,
    "unisono --help": [*UNISONO, "--help"],
    "unisono train --help": [*UNISONO, "train", "--help"],
    "unisono trian language": [*UNISONO, "trian", "language"],
    "unisono list": [*UNISONO, "list"],
}
BARE = """
import os
import numpy as np
import torch
import torch.nn.functional as F

world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    torch.distributed.init_process_group("gloo")
rank = int(os.environ.get("RANK", 0))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))
wrapped = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
rng = np.random.default_rng(0)
pixels, labels = rng.normal(size=(2000, 64)).astype(np.float32), rng.integers(0, 10, 2000)
rows = slice(rank * 32 // world, (rank + 1) * 32 // world)
loss = F.cross_entropy(wrapped(torch.from_numpy(pixels[rows])), torch.from_numpy(labels[rows]))
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
if rank == 0:
    print(f"step 1 loss {loss.item():.4f}", flush=True)
if world > 1:
    torch.distributed.destroy_process_group()
"""
TASK = """
import numpy as np
import torch
import torch.nn.functional as F
import unisono


class Digits(unisono.Task):
    def data(self):
        rng = np.random.default_rng(0)
        pixels, labels = rng.normal(size=(2000, 64)).astype(np.float32), rng.integers(0, 10, 2000)
        return [{"pixels": row, "label": label} for row, label in zip(pixels, labels)]

    def build(self):
        return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 10))

    def outputs(self, model, batch, context):
        return model(batch["pixels"])

    def loss(self, logits, batch, context):
        return unisono.Loss({"label": F.cross_entropy(logits, batch["label"], reduction="sum")})
"""
TRAIN = [*UNISONO, "train", "task.py:Digits", "train.steps=1", "layout.device=cpu", "observe.progress=plain"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "bare.py"]
FIRST_STEPS = {
    "python bare.py": [sys.executable, "bare.py"],
    "unisono train, 1 process": [*TRAIN, "layout.world_size=1"],
    "torchrun bare.py, 2 processes": TORCHRUN,
    "unisono train, 2 processes": [*TRAIN, "layout.world_size=2"],
}


def measure_command(words: Sequence[str], folder: Path) -> tuple[float, float]:
    """Wall and processor seconds of one command, to its end."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(words, cwd=folder, capture_output=True, check=False)
    wall, after = time.perf_counter() - began, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def measure_first_step(words: Sequence[str], folder: Path) -> tuple[float, float]:
    """Wall and processor seconds of one command, to the line that says that its first step is done."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 1"):
                wall, processor = time.perf_counter() - began, _processor_seconds(process.pid)
                process.stdout.read()
                return wall, processor
    raise RuntimeError(f"{' '.join(words)} made no step:\n{''.join(said)}")


def _processor_seconds(pid: int) -> float:
    """Of a process and all that it has started."""
    root = psutil.Process(pid)
    found = [root, *root.children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in found)


def compare(
    commands: dict[str, list[str]], measure: Callable[[Sequence[str], Path], tuple[float, float]], rounds: int
) -> dict[str, tuple[float, float]]:
    """Run all commands in turn; prints and returns the medians of their wall and processor seconds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        (folder / "task.py").write_text(TASK)
        loads = []
        for _ in range(rounds):
            for name, words in commands.items():
                found[name].append(measure(words, folder))
            loads.append(os.getloadavg()[0])
    print(f"{'':<32}{'wall, s':>10}{'CPU, s':>10}   (medians of {rounds} rounds, load {statistics.median(loads):.1f})")
    medians = {}
    for name, times in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
        medians[name] = wall, cpu
        print(f"{name:<32}{wall:>10.3f}{cpu:>10.3f}")
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=15)
    parser.add_argument("--steps-only", action="store_true", help="leave out the commands without a run")
    parsed = parser.parse_args()
    if not parsed.steps_only:
        compare(COMMANDS, measure_command, parsed.rounds)
        print()
    medians = compare(FIRST_STEPS, measure_first_step, parsed.rounds)
    names = list(FIRST_STEPS)
    for bare, ours in zip(names[::2], names[1::2], strict=True):
        wall, cpu = (mine / theirs for mine, theirs in zip(medians[ours], medians[bare], strict=True))
        print(f"{ours} / {bare}: {wall:.2f} wall, {cpu:.2f} CPU")


if __name__ == "__main__":
    main()
