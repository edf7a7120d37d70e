"""What others notice of a damaged checkpoint, a kill during a save and a full disk.

    python -m benchmarks.fault_peers [--flips 60] [--kills 40] [--write]

One process saves a model of linear layers with AdamW's moments (12.6 MB) the way each library's own documentation
does, a folder for each step, and where that is common once more over the last one. Then

* one bit is flipped in a file, each file as often as the others; a file is cut to its half; and all of it is loaded:
  it raises, or every array is compared with what was saved;
* the process is killed at a random instant while it saves step 2, step 1 being there;
* the disk has room for one checkpoint and a half, and step 2 is saved, step 1 being there.

Every save and load is a fork of one process with warm imports. A kill takes nothing from the system's memory, so what
is not flushed to the disk, and would be lost with the host, does not show here. A full disk needs root (tmpfs).

What is missing, `lightning_fabric`, `accelerate` or `orbax`, is left out and named.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor, nn

from benchmarks import dcp, page
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Snapshot
from unisono.checkpoint.core.saver import Saver
from unisono.config.schema.run import Checkpoint as Settings
from unisono.engines.torch.state import sharded_tensors
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess

WIDTH, LAYERS, SEED, PATIENCE = 512, 4, 7, 60.0
FINE, RAISED, WRONG, HUNG, KILLED = "fine", "raised", "wrong", "hung", "killed"


class Contender:
    """A way to save and load."""

    needs: str = "torch"

    def __init__(self, folder: Path, step: int = 0) -> None:
        self.folder = folder
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ready()
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()
        self.fill(step)

    def ready(self) -> None:
        """Let the library have the model."""

    @property
    def named(self) -> dict[str, Tensor]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return sharded_tensors.model_tensors(self.model) | sharded_tensors.optimizer_tensors(self.model, optimizer)

    @torch.no_grad()
    def fill(self, step: int) -> None:
        """The state after a step: other numbers for every step."""
        generator = torch.Generator().manual_seed(SEED + step)
        for value in self.named.values():
            value.copy_(torch.rand(value.shape, generator=generator))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, step: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """What a script does when it ends."""

    def load(self, step: int) -> None:
        raise NotImplementedError

    def newest(self) -> int:
        """The step that a restart would take."""
        return max((int(path.name[5:13]) for path in self.folder.glob("step-*")), default=0)


class Unisono(Contender):
    """As a run saves, beside the steps."""

    def ready(self) -> None:
        self.saver = Saver(self.folder, SingleProcess(), Settings(background=True))

    def save(self, step: int) -> None:
        self.saver.save(Snapshot(step, sharded_tensors.shards(self.named, ProcessInfo()), {"step": step}))

    def finish(self) -> None:
        self.saver.finish()

    def load(self, step: int) -> None:
        sharded_tensors.load(self.named, commit.open_checkpoint(self.path(step)).reader())

    def newest(self) -> int:
        return max((int(path.name[5:]) for path in commit.find_checkpoints(self.folder)), default=0)


class Dcp(Contender):
    """Plain torch.distributed.checkpoint."""

    def _state(self) -> dict[str, Any]:
        return dcp.state(self.model, self.optimizer)

    def save(self, step: int) -> None:
        torch_dcp.save(self._state(), checkpoint_id=self.path(step))

    def load(self, step: int) -> None:
        dcp.load(self.model, self.optimizer, self.path(step))


class DcpAsync(Dcp):
    """DCP beside the steps."""

    def save(self, step: int) -> None:
        self.future = torch_dcp.async_save(self._state(), checkpoint_id=self.path(step))

    def finish(self) -> None:
        while not self.future.done():  # training goes on; nothing but `result` would say how it ended
            time.sleep(0.001)


class Fabric(Contender):
    """Lightning's."""

    needs = "lightning_fabric"

    def ready(self) -> None:
        from lightning_fabric import Fabric as Library

        self.fabric = Library(accelerator="cpu", devices=1)
        self.wrapped, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def _state(self) -> dict[str, Any]:
        return {"model": self.wrapped, "optimizer": self.optimizer}

    def save(self, step: int) -> None:
        self.fabric.save(self.path(step), self._state())

    def load(self, step: int) -> None:
        self.fabric.load(self.path(step), self._state())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.ckpt"


class Accelerate(Contender):
    """Accelerate's."""

    needs = "accelerate"

    def ready(self) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def save(self, step: int) -> None:
        self.accelerator.save_state(str(self.path(step)))

    def load(self, step: int) -> None:
        self.accelerator.load_state(str(self.path(step)))


class Orbax(Contender):
    """JAX's, which takes NumPy's arrays."""

    needs = "orbax"

    def ready(self) -> None:
        import orbax.checkpoint as library

        self.library = library
        self.manager = library.CheckpointManager(self.folder.absolute())

    def _state(self) -> dict[str, Any]:
        return {name.replace("/", "."): value.detach().numpy() for name, value in self.named.items()}

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.library.args.StandardSave(self._state()))

    def finish(self) -> None:
        self.manager.wait_until_finished()

    @torch.no_grad()
    def load(self, step: int) -> None:
        state = self.manager.restore(step, args=self.library.args.StandardRestore(self._state()))
        for name, value in self.named.items():
            value.copy_(torch.as_tensor(state[name.replace("/", ".")]))

    def path(self, step: int) -> Path:
        return self.folder / f"{step}"

    def newest(self) -> int:
        return self.manager.latest_step() or 0


class Over:
    """The same folder for every step, as scripts have it that keep the last state only."""

    def path(self, step: int) -> Path:
        return self.folder / "step-00000000"  # type: ignore[attr-defined, no-any-return]


class DcpOver(Over, Dcp):
    """DCP so."""


class FabricOver(Over, Fabric):
    """Lightning's so."""


CONTENDERS: dict[str, type[Contender]] = {
    "Unisono": Unisono,
    "torch DCP": Dcp,
    "torch DCP, `async_save`": DcpAsync,
    "torch DCP, one folder for all": DcpOver,
    "Lightning Fabric": Fabric,
    "Lightning Fabric, one file for all": FabricOver,
    "Accelerate": Accelerate,
    "Orbax `CheckpointManager`": Orbax,
}


def apart(act: Callable[[Callable[[], None]], None], kill_after: float | None = None) -> tuple[str, str, float]:
    """What a fork of this process comes to.

    Args:
        act: what it does; it is given what to call once its preparations are done.
        kill_after: seconds from then on, after which it is killed; None lets it go on.

    Returns:
        `FINE`, `RAISED`, `HUNG` or `KILLED`; what it said; and the seconds from its preparations to its end.
    """
    (ready_reader, ready_writer), (error_reader, error_writer) = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        code = 0
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        try:
            act(lambda: os.write(ready_writer, b"!") and None)
        except BaseException as error:
            os.write(error_writer, f"{type(error).__name__}: {error}".encode()[:60000])
            code = 1
        os._exit(code)
    os.close(ready_writer)
    os.close(error_writer)
    os.read(ready_reader, 1)
    began = time.monotonic()
    limit, how = began + (PATIENCE if kill_after is None else kill_after), FINE
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            how = FINE if status == 0 else RAISED
            break
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            how = HUNG if kill_after is None else KILLED
            break
        time.sleep(0.0005)
    seconds = time.monotonic() - began
    with os.fdopen(error_reader, "rb") as file:
        text = file.read().decode(errors="replace")
    os.close(ready_reader)
    return how, text, seconds


def saved(kind: type[Contender], folder: Path, step: int, kill_after: float | None = None) -> tuple[str, str, float]:
    """Save a step, as a script that ends then."""

    def act(ready: Callable[[], None]) -> None:
        _alone()
        one = kind(folder, step)
        ready()
        one.save(step)
        one.finish()

    return apart(act, kill_after)


def loaded(kind: type[Contender], folder: Path, step: int | None = None) -> tuple[str, str]:
    """Load a step, or the one that a restart would take: `FINE` if every bit is that of some step, `WRONG` if not."""

    def act(ready: Callable[[], None]) -> None:
        _alone()
        one = kind(folder)
        ready()
        one.load(one.newest() if step is None else step)
        loaded_bits = bits(one)
        for right in (1, 2) if step is None else (step,):
            one.fill(right)
            if loaded_bits == bits(one):
                return
        raise DiffersError

    how, text, _ = apart(act)
    return (WRONG, "") if text.startswith(DiffersError.__name__) else (how, text)


def bits(one: Contender) -> dict[str, bytes]:
    """Every array."""
    return {name: value.detach().numpy().tobytes() for name, value in one.named.items()}


class DiffersError(Exception):
    """What was loaded is not what was saved."""


def _alone() -> None:
    """A process group of one, which `async_save` asks for."""
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)


def flips(kind: type[Contender], folder: Path, count: int, rng: random.Random) -> str:
    """One bit at a time."""
    how, text, _ = saved(kind, folder, 1)
    assert how == FINE and loaded(kind, folder, 1) == (FINE, ""), f"{kind}: {text} {loaded(kind, folder, 1)}"
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    outcomes = []
    for number in range(count):
        file = files[number % len(files)]
        offset, bit = rng.randrange(file.stat().st_size), 1 << rng.randrange(8)
        _flip(file, offset, bit)
        outcomes.append((*loaded(kind, folder, 1), file.name))
        _flip(file, offset, bit)
    return describe_outcomes(outcomes)


def cuts(kind: type[Contender], folder: Path) -> str:
    """Each file cut to its half."""
    assert saved(kind, folder, 1)[0] == FINE
    outcomes = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1):
        kept = file.read_bytes()
        os.truncate(file, len(kept) // 2)
        outcomes.append((*loaded(kind, folder, 1), file.name))
        file.write_bytes(kept)
    return describe_outcomes(outcomes)


def describe_outcomes(outcomes: list[tuple[str, str, str]]) -> str:
    """How often it was noticed, and with the file or an array of it in the message; and what else came of it."""
    count = {how: sum(one == how for one, _, _ in outcomes) for how in (RAISED, WRONG, FINE, HUNG)}
    named = sum(how == RAISED and file in text for how, text, file in outcomes)
    parts = [f"{count[RAISED]} of {len(outcomes)} ({named} named)"]
    parts += [f"**{count[WRONG]} loaded wrong**"] if count[WRONG] else []
    parts += [f"{count[FINE]} without effect"] if count[FINE] else []
    parts += [f"{count[HUNG]} hung"] if count[HUNG] else []
    return ", ".join(parts)


def kills(kind: type[Contender], folder: Path, count: int, rng: random.Random) -> tuple[str, str]:
    """Killed in the save of step 2: whether step 1 can be loaded, and what a restart comes to that takes the newest."""
    took = []
    for number in range(3):
        saved(kind, folder / f"{number}", 1)
        took.append(saved(kind, folder / f"{number}", 2)[2])
    hit, before, restarts = 0, 0, []
    for number in range(count):
        own = folder / f"kill-{number}"
        saved(kind, own, 1)
        hit += saved(kind, own, 2, rng.uniform(0.0, sorted(took)[1]))[0] == KILLED
        before += loaded(kind, own, 1)[0] == FINE
        restarts.append(loaded(kind, own)[0])
        shutil.rmtree(own)
    text = f"{restarts.count(FINE)} of {count}" + (f", **{wrong} wrong**" if (wrong := restarts.count(WRONG)) else "")
    return f"{text} ({hit} hit the save)", "" if issubclass(kind, Over) else f"{before} of {count}"


def full(kind: type[Contender], folder: Path) -> str:
    """The disk has room for one and a half; whoever writes over the last one needs no more than one."""
    if issubclass(kind, Over):
        return ""
    size = sum(path.stat().st_size for path in (folder / "size").rglob("*")) if saved(kind, folder / "size", 1) else 0
    own = folder / "small"
    own.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size * 3 // 2}", "tmpfs", own],
        capture_output=True, check=False,
    ).returncode:  # fmt: skip
        return "not measured (root)"
    try:
        first, second = saved(kind, own, 1), saved(kind, own, 2)
        assert first[0] == FINE, first
        noticed = {RAISED: "raises", FINE: "**no error**", HUNG: "hangs"}[second[0]]
        if second[0] == RAISED:
            noticed += ", and names the disk space" if "space" in second[1].lower() else ", with a misleading error"
        return f"{noticed}; a restart {_IN_WORDS[loaded(kind, own)[0]]}"
    finally:
        subprocess.run(["umount", "-l", own], check=True)


_IN_WORDS = {FINE: "works", RAISED: "fails", WRONG: "**loads wrong numbers**", HUNG: "hangs"}


def _flip(file: Path, offset: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(offset)
        (value,) = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([value ^ bit]))


def main() -> None:
    """Measure, print, and write it down if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--flips", type=int, default=60)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", action="store_true", help="into docs/faults.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    needed = dict.fromkeys(kind.needs for kind in CONTENDERS.values())
    here = {name for name in needed if importlib.util.find_spec(name)}
    for name in sorted(here):
        importlib.import_module("orbax.checkpoint" if name == "orbax" else name)
    lines = [
        "| | One bit flipped: raises | Truncated: raises | Killed in a save: restarts | The step before is intact "
        "| Disk full in a save |",
        "|---|---|---|---|---|---|",
    ]
    for name, kind in CONTENDERS.items():
        if kind.needs not in here or (arguments.only and name not in arguments.only):
            continue
        rng = random.Random(SEED)
        with tempfile.TemporaryDirectory(prefix="fault-peers-") as folder:
            where = [Path(folder, subfolder) for subfolder in ("flips", "cuts", "kills", "full")]
            for one in where:
                one.mkdir()
            row = ["as above", "as above"]
            if not issubclass(kind, Over):
                row = [flips(kind, where[0], arguments.flips, rng), cuts(kind, where[1])]
            row += [*kills(kind, where[2], arguments.kills, rng), full(kind, where[3])]
        lines.append(f"| {name} | {' | '.join(row)} |")
        print(lines[-1], flush=True)
    versions = ", ".join(f"{_PACKAGES[name]} {version(_PACKAGES[name])}" for name in needed if name in here)
    absent = [name for name in needed if name not in here]
    left = f" Not installed, and left out: {', '.join(absent)}." if absent else ""
    lines += ["", f"{versions}; {platform.machine()}, CPU, ext4 and tmpfs, {date.today()}.{left}"]
    if arguments.write:
        page.put("fault_peers", "\n".join(lines), "docs/faults.md")


_PACKAGES = {
    "torch": "torch", "lightning_fabric": "lightning-fabric", "accelerate": "accelerate", "orbax": "orbax-checkpoint"
}  # fmt: skip

if __name__ == "__main__":
    main()
