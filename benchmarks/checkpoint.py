"""Saves and loads beside those of others: how long training stands still, how long it is slow, what the disk gives.

    python -m benchmarks.checkpoint [--rounds 5] [--width 4096] [--layers 8] [--folder DIR] [--out FILE] [--write]

Two processes train a stack of linear layers (537 MB in fp32, with AdamW's moments 1.6 GB) with DDP over gloo and save
twice: the first save of a process asks for memory that later ones have; Unisono asks after the first step, beside the
next ones. Every contender runs in processes of its own, in turn with the others, round after round; figures are medians
over rounds. `blocked` is the time of the call. The save window is from there until the save is over on all ranks:
Unisono's and plain DCP's saves are on the disk then (fsync), those of torch.save, Lightning Fabric and Accelerate are
in the memory of the system. Loads are of the last save, by all ranks, into model and optimizer: once right after it,
from the memory of the system, and once after the system was asked to drop the files (`cold`). Raw is what the same
bytes take to be written in parts of 8 MB and flushed, and read.

DCP's `async_save` gets a process group of its own. Without one its thread talks over the group that DDP reduces in, and
both processes die of it.

What is missing, `lightning_fabric` or `accelerate`, is left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import dcp, page
from packages.unisono.tests import processes
from unisono.checkpoint.core import arrays, commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.saver import Saver
from unisono.config.schema.run import Checkpoint as Settings
from unisono.engines.state import ArrayShard
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.state import sharded_tensors
from unisono.runtime.communication.communicator import Communicator, ProcessInfo

PROCESSES, ROWS, PART = 2, 4, 8 << 20
BEFORE, AFTER = 4, 2  # steps before a save, for comparison, and at least so many after


@dataclass
class Trainer:
    """What is trained and saved."""

    process: ProcessInfo
    group: Communicator
    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], None] | None = None) -> None:
        """One update; all ranks end it together, since gradients are reduced."""
        self.optimizer.zero_grad()
        device = self.model[0].weight.device
        rows = torch.full((ROWS, self.model[0].in_features), 0.01 * (1 + self.process.rank), device=device)
        loss = forward(rows).square().mean()
        backward(loss) if backward else loss.backward()
        self.optimizer.step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return sharded_tensors.model_tensors(self.model) | sharded_tensors.optimizer_tensors(self.model, self.optimizer)


class Contender:
    """A way to save. `save` blocks as long as it does, `over` says whether the save is over on this rank."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        alone = trainer.process.world_size == 1
        self.forward: Callable[[Tensor], Tensor] = trainer.model if alone else DistributedDataParallel(trainer.model)
        self.backward: Callable[[Tensor], None] | None = None

    def ready(self) -> None:
        """What a run does after its first step."""

    def save(self, step: int) -> None:
        raise NotImplementedError

    def over(self) -> bool:
        return True

    def load(self, step: int) -> None:
        raise NotImplementedError

    def path(self, step: int) -> Path:
        return self.trainer.folder / f"step-{step:08d}"


class Unisono(Contender):
    """As a run saves, beside the steps: it sees before that all ranks hold the same."""

    background = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.saver = Saver(trainer.folder, trainer.group, Settings(background=self.background))

    @property
    def shards(self) -> list[ArrayShard]:
        return sharded_tensors.shards(self.trainer.tensors, self.trainer.process)

    def ready(self) -> None:
        self.saver.prepare(self.shards)

    def save(self, step: int) -> None:
        ranks = range(self.trainer.process.world_size)
        replicas.check_copies(self.trainer.group, self.trainer.tensors, [ranks], step)
        self.saver.save(Snapshot(step, self.shards, {"step": step}))

    def over(self) -> bool:
        self.saver.check()
        return self.saver._pending is None

    def load(self, step: int) -> None:
        reader = commit.open_checkpoint(self.path(step), self.trainer.group).reader()
        sharded_tensors.init_optimizer_state(self.trainer.optimizer, self.trainer.model, reader)
        sharded_tensors.load(self.trainer.tensors, reader)


class UnisonoSynchronous(Unisono):
    """As a run saves that may not take memory for a copy."""

    background = False


class NoHash:
    """In place of SHA-256."""

    def __init__(self, content: Any = b"") -> None:
        pass

    def update(self, content: Any) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


class UnisonoUnhashed(Unisono):
    """To know what hashing costs; nothing that is saved so could be loaded."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        mock.patch.object(arrays, "hashlib", mock.Mock(sha256=NoHash)).start()

    def load(self, step: int) -> None:
        pass


class Dcp(Contender):
    """Plain torch.distributed.checkpoint."""

    def state(self) -> dict[str, Any]:
        return dcp.state(self.trainer.model, self.trainer.optimizer)

    def save(self, step: int) -> None:
        torch_dcp.save(self.state(), checkpoint_id=self.path(step))

    def load(self, step: int) -> None:
        dcp.load(self.trainer.model, self.trainer.optimizer, self.path(step))


class DcpAsync(Dcp):
    """DCP beside the steps, with a process group of its own."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.own = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        self.future = torch_dcp.async_save(self.state(), checkpoint_id=self.path(step), process_group=self.own)

    def over(self) -> bool:
        mine = self.future.done()
        everyone: bool = all(self.trainer.group.gather(mine, "the save"))
        if everyone:
            self.future.result()
        return everyone


class TorchSave(Contender):
    """As most scripts do it."""

    def save(self, step: int) -> None:
        if self.trainer.process.is_first:
            self.path(step).mkdir(parents=True)
            state = {"model": self.trainer.model.state_dict(), "optimizer": self.trainer.optimizer.state_dict()}
            torch.save(state, self.path(step) / "state.pt")
        self.trainer.group.barrier("the save")

    def load(self, step: int) -> None:
        state = torch.load(self.path(step) / "state.pt", map_location="cpu", weights_only=True)
        self.trainer.model.load_state_dict(state["model"])
        self.trainer.optimizer.load_state_dict(state["optimizer"])


class Fabric(Contender):
    """Lightning's."""

    needs = "lightning_fabric"

    def __init__(self, trainer: Trainer) -> None:
        from lightning_fabric import Fabric as Library
        from lightning_fabric.plugins.environments import TorchElasticEnvironment

        self.trainer = trainer
        self.fabric = Library(accelerator="cpu", devices=PROCESSES, strategy="ddp", plugins=[TorchElasticEnvironment()])
        self.fabric.launch()
        self.forward, trainer.optimizer = self.fabric.setup(trainer.model, trainer.optimizer)
        self.backward = self.fabric.backward

    def save(self, step: int) -> None:
        self.fabric.save(self.path(step) / "state.ckpt", self._state())

    def load(self, step: int) -> None:
        self.fabric.load(self.path(step) / "state.ckpt", self._state())

    def _state(self) -> dict[str, Any]:
        return {"model": self.forward, "optimizer": self.trainer.optimizer}


class Accelerate(Contender):
    """Accelerate's."""

    needs = "accelerate"

    def __init__(self, trainer: Trainer) -> None:
        from accelerate import Accelerator

        self.trainer = trainer
        self.accelerator = Accelerator(cpu=True)
        assert self.accelerator.num_processes == PROCESSES
        self.forward, trainer.optimizer = self.accelerator.prepare(trainer.model, trainer.optimizer)
        self.backward = self.accelerator.backward

    def save(self, step: int) -> None:
        self.accelerator.save_state(str(self.path(step)))
        self.trainer.group.barrier("the save")

    def load(self, step: int) -> None:
        self.accelerator.load_state(str(self.path(step)))


CONTENDERS: dict[str, type[Contender]] = {
    "Unisono": Unisono,
    "Unisono, `checkpoint.background=false`": UnisonoSynchronous,
    "Unisono without hashing": UnisonoUnhashed,
    "DCP `async_save`": DcpAsync,
    "DCP `save`": Dcp,
    "`torch.save` on rank 0": TorchSave,
    "Lightning Fabric `save`": Fabric,
    "Accelerate `save_state`": Accelerate,
}


def make_trainer(
    process: ProcessInfo, group: Communicator, folder: Path, width: int, layers: int, device: str
) -> Trainer:
    """A stack of linear layers without a step, and AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    return Trainer(process, group, folder, model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True))


def save_twice(contender: Contender) -> dict[str, Any]:
    """Seconds of a process that trains and saves twice, as steps 1 and 2: of steps, of the calls, until all is over."""
    trainer = contender.trainer
    figures: dict[str, Any] = {"steps": [], "blocked": [], "window": [], "over": []}

    def timed_step() -> float:
        began = time.perf_counter()
        trainer.step(contender.forward, contender.backward)
        return time.perf_counter() - began

    timed_step()
    contender.ready()
    for step in (1, 2):
        figures["steps"] += [timed_step() for _ in range(BEFORE)]
        trainer.group.barrier("the save")
        began = time.perf_counter()
        contender.save(step)
        figures["blocked"].append(time.perf_counter() - began)
        window: list[float] = []
        over = None
        while over is None or len(window) < AFTER:
            if contender.over():
                over = over or time.perf_counter() - began
            window.append(timed_step())
        figures["window"].append(window)
        figures["over"].append(over)
    return figures


def contend(
    process: ProcessInfo, group: Communicator, name: str, folder: Path, width: int, layers: int
) -> dict[str, Any]:
    """One process of one contender in one round: train, save twice, load."""
    environment = {"RANK": process.rank, "WORLD_SIZE": process.world_size, "LOCAL_RANK": process.rank}
    os.environ.update({key: str(value) for key, value in environment.items()})
    os.environ.update(LOCAL_WORLD_SIZE=str(process.world_size), GROUP_RANK="0", TORCHELASTIC_RUN_ID="checkpoint")
    trainer = make_trainer(process, group, folder, width, layers, "cpu")
    contender = CONTENDERS[name](trainer)
    figures = save_twice(contender)
    if process.is_first and contender.path(1).exists():
        shutil.rmtree(contender.path(1))
    files = [file for file in contender.path(2).rglob("*") if file.is_file()]
    figures["size"] = sum(file.stat().st_size for file in files)
    figures["bytes"] = sum(t.numel() * t.element_size() for t in tensors_of(trainer))
    for kind in ("warm", "cold"):
        if kind == "cold":
            for file in files:
                drop(file)
        group.barrier("the load")
        began = time.perf_counter()
        contender.load(2)
        group.barrier("the load")
        figures[kind] = time.perf_counter() - began
    return figures


def tensors_of(trainer: Trainer) -> list[Tensor]:
    """All that has to be saved, whatever wraps the optimizer."""
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return [*trainer.model.parameters(), *(value for value in moments if isinstance(value, Tensor))]


def raw(process: ProcessInfo, group: Communicator, folder: Path, size: int) -> dict[str, float]:
    """Write, flush and read as many bytes as the state has, each process its half."""
    content = memoryview(torch.randint(0, 256, (PART,), dtype=torch.uint8).numpy())
    file = folder / f"raw-{process.rank}"
    figures = {}
    group.barrier("writing")
    began = time.perf_counter()
    with file.open("wb", buffering=0) as opened:
        for _ in range(size // PROCESSES // PART):
            opened.write(content)
        os.fsync(opened.fileno())
    group.barrier("writing")
    figures["write"] = time.perf_counter() - began
    for kind in ("warm", "cold"):
        if kind == "cold":
            drop(file)
        buffer = memoryview(bytearray(PART))
        group.barrier("reading")
        began = time.perf_counter()
        for number in range(PROCESSES):  # every process reads everything, as a load of replicas does
            with (folder / f"raw-{number}").open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
        group.barrier("reading")
        figures[kind] = time.perf_counter() - began
    return figures


def drop(file: Path) -> None:
    """Ask the system to forget a file's content."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def hashing(size: int) -> float:
    """Seconds of one core for the hashes of so many bytes: each is in the hash of its piece and in that of its file."""
    import hashlib

    content = bytes(64 << 20)
    began = time.perf_counter()
    hashlib.sha256(content).digest()
    return 2 * size * (time.perf_counter() - began) / len(content)


def measure(rounds: int, width: int, layers: int, root: Path) -> dict[str, Any]:
    """All contenders, in turn."""
    names = [name for name, kind in CONTENDERS.items() if importlib.util.find_spec(getattr(kind, "needs", "torch"))]
    missing = sorted(set(CONTENDERS) - set(names))
    for name in missing:
        print(f"  {name} is not installed and is left out", flush=True)
    result: dict[str, Any] = {"missing": missing, "raw": [], "hashing": [], "runs": {name: [] for name in names}}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                ranks = processes.run(contend, PROCESSES, name, Path(folder), width, layers, timeout=1800)
            result["runs"][name].append(together(ranks))
            figures = result["runs"][name][-1]
            print(f"  {name}: blocked {figures['blocked'][1]:.2f} s, over after {figures['over'][1]:.2f} s", flush=True)
        result["bytes"] = result["runs"][names[0]][0]["bytes"]
        with tempfile.TemporaryDirectory(dir=root) as folder:
            ranks = processes.run(raw, PROCESSES, Path(folder), result["bytes"])
            result["raw"].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
        result["hashing"].append(hashing(result["bytes"] // PROCESSES))
        print(f"  round {number + 1} of {rounds}", flush=True)
    return result


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of all ranks: the slowest of them counts."""
    return {
        "step": statistics.median(ranks[0]["steps"]),
        "blocked": [max(rank["blocked"][save] for rank in ranks) for save in (0, 1)],
        "slowest": [max(max(rank["window"][save]) for rank in ranks) for save in (0, 1)],
        "mean": statistics.mean(ranks[0]["window"][1]),
        "over": [max(rank["over"][save] for rank in ranks) for save in (0, 1)],
        **{key: max(rank[key] for rank in ranks) for key in ("size", "bytes", "warm", "cold")},
    }


def middle(runs: list[dict[str, Any]], key: str, save: int | None = None) -> float:
    """The median over rounds."""
    return statistics.median(run[key] if save is None else run[key][save] for run in runs)


def table(results: dict[str, Any]) -> str:
    """The part of the page."""
    runs, size = results["runs"], results["bytes"]
    sync = middle(runs["DCP `save`"], "blocked", 1)
    write, warm, cold = (middle(results["raw"], key) for key in ("write", "warm", "cold"))
    head = (
        "", "blocked, s: first save", "later", "of a DCP `save`", "slowest step ÷ median step", "over after, s",
        "write, GB/s", "load, s", "cold, s", "size, GB",
    )  # fmt: skip
    lines = ["".join(f"| {title} " for title in head) + "|", "|---" * len(head) + "|"]
    for name, seen in runs.items():
        over, loaded = middle(seen, "over", 1), name != "Unisono without hashing"
        first, later = (middle(seen, "blocked", save) for save in (0, 1))
        slow = statistics.median(run["slowest"][1] / run["step"] for run in seen)
        loads = [f"{middle(seen, kind):.2f}" if loaded else "—" for kind in ("warm", "cold")]
        lines.append(
            f"| {name} | {first:.2f} | {later:.2f} | {100 * later / sync:.0f} % | {slow:.2f} | {over:.1f} | "
            f"{size / over / 1e9:.2f} | {loads[0]} | {loads[1]} | {middle(seen, 'size') / 1e9:.2f} |"
        )
    lines.append(
        f"| raw disk | — | — | — | — | {write:.1f} | {size / write / 1e9:.2f} | {warm:.2f} | {cold:.2f} | "
        f"{size / 1e9:.2f} |"
    )
    step = middle(runs["Unisono"], "step")
    hashed = statistics.median(results["hashing"])
    with_, without = (middle(runs[name], "mean") for name in ("Unisono", "Unisono without hashing"))
    missing = f" Not installed: {', '.join(results['missing'])}." if results["missing"] else ""
    return "\n".join(lines) + (
        f"\n\nA state of {size / 1e9:.2f} GB on {PROCESSES} processes, {len(results['raw'])} rounds; a step takes "
        f"{step:.2f} s. Hashing a rank's share takes {hashed:.2f} s of one core: {hashed / step:.1%} of a step, so "
        f"{hashed / step / 100:.2%} of the time where every 100th step is saved. The mean step in the save window "
        f"takes {with_:.2f} s with hashing and {without:.2f} s without. torch {torch.__version__}; "
        f"{platform.machine()}, {os.cpu_count()} cores; {time.strftime('%Y-%m-%d')}.{missing}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=4096, help="of the linear layers")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; the temporary folder unless given")
    parser.add_argument("--out", type=Path, help="a file for all figures, as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    arguments = parser.parse_args()
    results = measure(
        arguments.rounds, arguments.width, arguments.layers, arguments.folder or Path(tempfile.gettempdir())
    )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))
    text = table(results)
    print(text)
    if arguments.write:
        page.put("checkpoint", text)


if __name__ == "__main__":
    main()
