"""Jobs for tests of launchers: a task file that misbehaves on demand, and the command line in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.observe import events as events_

UNISONO = str(Path(sys.executable).with_name("unisono"))

SMALL = '''
import os
import time
from pathlib import Path

import numpy as np
import torch
import unisono


class Small(unisono.Task):
    """Least squares, and whatever can go wrong in a process."""

    class Config(unisono.Settings):
        rows: int = 40
        marks: Path | None = None  # a folder in which every process leaves its number, once it trains
        sleep: float = 0.0
        hold: float = 60.0  # seconds that a step takes from the second on, while a file `held` is in the folder
        raises: int | None = None  # the rank that raises in step 3, on its first attempt
        hangs: int | None = None  # the rank that never ends step 3
        nan: int | None = None  # the row whose loss is not a number
        dropout: float = 0.0

    def rows(self, seed, count):
        inputs = np.random.default_rng(seed).normal(size=(count, 3)).astype(np.float32)
        return [{"x": x, "y": x.sum(keepdims=True), "row": np.int64(row)} for row, x in enumerate(inputs)]

    def data(self):
        return self.rows(1, self.config.rows)

    def held_out(self):
        return self.rows(2, 9)

    def counts(self, batch):
        return {"square": float(len(batch["x"]))}

    def build(self):
        return torch.nn.Sequential(torch.nn.Dropout(self.config.dropout), torch.nn.Linear(3, 1))

    def outputs(self, model, batch, context):
        rank = int(os.environ.get("RANK", "0"))
        if context.step >= 1 and self.config.marks and not (mark := self.config.marks / f"rank-{rank}").exists():
            mark.write_text(str(os.getpid()))
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if context.step == 2 and rank == self.config.raises and not again:
            raise RuntimeError("the sky fell")
        if context.step == 2 and context.training and rank == self.config.hangs:
            time.sleep(600)
        time.sleep(self.config.sleep)
        began = time.monotonic()
        while context.step >= 1 and Path("held").exists() and time.monotonic() < began + self.config.hold:
            time.sleep(0.01)
        return model(batch["x"])

    def loss(self, outputs, batch, context):
        total = (outputs - batch["y"]).square().sum()
        if self.config.nan is not None and context.training:
            total = total + torch.where(batch["row"] == self.config.nan, float("nan"), 0.0).sum()
        return unisono.Loss({"square": total}, metrics={"bias": ((outputs - batch["y"]).sum(), len(outputs))})
'''
QUIET = ("observe.progress=false", "train.global_batch=8")


def task_file(folder: Path, name: str = "small.py") -> Path:
    """The small task in a file of its own."""
    path = folder / name
    path.write_text(SMALL, encoding="utf-8")
    return path


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without a launcher's variables, with one thread."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC", "GLOO"))}
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def unisono(*words: str, cwd: Path, timeout: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `unisono` to its end."""
    return finished([UNISONO, *words], cwd, timeout, **variables)


def finished(
    command: Sequence[str], cwd: Path, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and leave nothing of it behind."""
    with started(command, cwd, **variables) as process:
        output, errors = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


def torchrun(*options: str, port: int = 0) -> list[str]:
    """The beginning of a command under torchrun."""
    command = str(Path(sys.executable).with_name("torchrun"))
    return [command, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", *options]


def ends(processes: Sequence[subprocess.Popen[str]], timeout: float) -> list[subprocess.CompletedProcess[str]]:
    """How commands that run side by side end."""
    told = [process.communicate(timeout=timeout) for process in processes]
    return [subprocess.CompletedProcess([], p.returncode, *end) for p, end in zip(processes, told, strict=True)]


@contextmanager
def started(command: Sequence[str], cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command; whatever it started ends with the context."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment(**variables), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        for pid in {process.pid, *working_in(cwd)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=20)


def working_in(folder: Path) -> list[int]:
    """All living processes whose working directory is this folder, this one left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.joinpath("cwd").resolve() == folder.resolve() and _alive(path) and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def training(marks: Path, count: int, seconds: float = 60) -> list[int]:
    """The process numbers of all ranks, once they all train."""
    files = [marks / f"rank-{rank}" for rank in range(count)]
    wait_for(lambda: all(file.is_file() and file.read_text() for file in files), seconds)
    return [int(file.read_text()) for file in files]


def all_gone(folder: Path, seconds: float) -> bool:
    """Whether no process works in a folder any more within so many seconds."""
    with suppress(TimeoutError):
        wait_for(lambda: not working_in(folder), seconds)
    return not working_in(folder)


def wait_for(true: Callable[[], bool], seconds: float) -> None:
    """Return once something is true."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.05)


def events(run: Path) -> list[dict[str, Any]]:
    """The steps and evaluations in `events.jsonl` of a run."""
    lines = (json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines())
    return [event for event in lines if not events_.NOTE_KEYS & event.keys()]


def _alive(path: Path) -> bool:
    """Whether a process does not only wait to be collected by its parent."""
    return (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
