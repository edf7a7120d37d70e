"""The faults that a task of the fault matrix injects into its own process; see `unisono_faults.task`."""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config.schema import Settings
from unisono.task import SampleContext, Task

VARIABLE = "UNISONO_TASK_FAULT"
MARK = Path("fault_happened")  # in the working folder: seconds of the monotonic clock, process number
RELEASED = Path("released")  # in the working folder: a process that is held resumes
ADDRESS_WANTED = "UNISONO_WRITE_ADDRESS"  # if set, rank 0 writes the address at which the processes meet
ADDRESS = Path("address")  # in the working folder: that address, and the port
FOREVER = 3600.0
ANY = -1


@dataclass(frozen=True)
class TaskFault:
    """A fault to inject: what, where and when.

    Attributes:
        act: `kill`, `stop`, `sleep`, `hold` (until released), `gil`, `raise`, `eat` (memory, once released), `exit`,
            `slow`, `pause`, `eio` (once), `away` (the same from then on, for checkpoints), or one of the task's own.
            `nan`, and a record that cannot be built, happen every time, because finding the row computes it again,
            and measuring the duration of samples builds some first.
        where: `data`, `forward`, `backward`, `update`, `updated`, `loss`, `evaluate`, or a system call: `fsync`,
            `fsynced` (just after it), `rename`, `renamed`, `rmtree`.
        rank: of the process; -1 for the first that gets there.
        step: from 0, or a row of the data; for system calls, the number of the call, from 0.
    """

    act: str
    where: str
    rank: int
    step: int

    @classmethod
    def from_environment(cls) -> TaskFault | None:
        """Parse the fault in the environment of this process; None if there is none."""
        words = os.environ.get(VARIABLE, "")
        if not words:
            return None
        act, rest = words.split("@")
        where, rank, step = rest.split(":")
        return cls(act, where, int(rank), int(step))

    def is_due(self, where: str, step: int) -> bool:
        """Whether the fault happens here and now in this process; most faults happen only once."""
        if self.where != where or self.rank not in (ANY, rank_of_process()):
            return False
        if self.act in ("slow", "away"):
            return step >= self.step
        repeats = self.act == "nan" or (self.act, self.where) == ("raise", "data")
        return step == self.step and (repeats or not MARK.exists())

    def trigger(self) -> None:
        """Inject the fault, if it acts on the process itself."""
        self.write_mark()
        match self.act:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "sleep":
                time.sleep(FOREVER)
            case "hold":
                _wait_for_release()
            case "gil":  # a call that holds the interpreter, and that no signal ends
                re.match(r"(a+)+$", "a" * 64 + "b")
            case "raise":
                raise RuntimeError("the sky fell")
            case "eat":
                _wait_for_release()
                blocks = []
                while True:
                    blocks.append(b"x" * (1 << 24))
            case "exit":
                os._exit(0)
            case "slow":
                time.sleep(0.1)
            case "eio" | "away":
                raise OSError(errno.EIO, "Input/output error")
            case "pause":
                time.sleep(2.0)

    def write_mark(self) -> None:
        """Record the time of the first occurrence."""
        if not MARK.exists():
            MARK.write_text(f"{time.monotonic()} {os.getpid()}")


class RandomRows:
    """Rows of numbers; the task is to learn their sum."""

    def __init__(self, seed: int, count: int) -> None:
        self.values = np.random.default_rng(seed).normal(size=(count, 5)).astype(np.float32)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> tuple[int, np.ndarray]:
        return row, self.values[row]


class FaultyTask(Task):
    """Learns the sum of noisy rows; injects the requested fault."""

    class Config(Settings):
        """The size of data and model, and the duration of a step."""

        rows: int = 40
        seed: int = 1
        width: int = 16
        sleep: float = 0.0

    config: Config

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault = TaskFault.from_environment()
        if self.fault is not None and self.fault.where in _CALLS and "RANK" in os.environ:  # not in the launcher
            patch_call(self.fault)
        if ADDRESS_WANTED in os.environ and os.environ.get("RANK") == "0":
            partial = ADDRESS.with_suffix(".part")
            partial.write_text(f"{os.environ['MASTER_ADDR']} {os.environ['MASTER_PORT']}")
            partial.replace(ADDRESS)

    def data(self) -> RandomRows:
        """Rows to train on."""
        return RandomRows(self.config.seed, self.config.rows)

    def held_out(self) -> RandomRows:
        """Rows to evaluate on."""
        return RandomRows(self.config.seed + 1, 9)

    def sample(self, record: tuple[int, np.ndarray], context: SampleContext) -> tuple[int, np.ndarray]:
        """A row with noise, unless the fault is due."""
        row, values = record
        if self.fault is not None and self.fault.is_due("data", row):
            self.fault.trigger()
            if self.fault.act == "nan":
                values = values * float("nan")
        if not context.training:
            return row, values
        return row, values + 0.1 * context.rng.normal(size=values.shape).astype(np.float32)

    def collate(self, samples: Any) -> dict[str, Any]:
        """Rows as arrays."""
        rows, values = zip(*samples, strict=True)
        return {"x": np.stack(values), "y": np.stack(values).sum(1, keepdims=True), "row": np.array(rows)}

    def counts(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """Rows."""
        return {"square": float(len(batch["x"]))}


def patch_call(fault: TaskFault) -> None:
    """Inject the fault into the n-th such system call, before or after the call."""
    module, name, after = _CALLS[fault.where]
    call = getattr(module, name)
    calls = 0

    @functools.wraps(call)
    def call_with_fault(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        due = fault.is_due(fault.where, calls) and (fault.act != "away" or _is_in_checkpoint(args[0]))
        calls += 1
        result = call(*args, **kwargs) if after or not due else None
        if due:
            fault.trigger()
        return result if after or not due else call(*args, **kwargs)

    setattr(module, name, call_with_fault)


def _is_in_checkpoint(descriptor: int) -> bool:
    return "/checkpoints/" in str(Path(f"/proc/self/fd/{descriptor}").readlink())


_CALLS: dict[str, tuple[Any, str, bool]] = {
    "fsync": (os, "fsync", False),
    "fsynced": (os, "fsync", True),
    "rename": (os, "rename", False),
    "renamed": (os, "rename", True),
    "rmtree": (shutil, "rmtree", False),
}


def _wait_for_release() -> None:
    while not RELEASED.exists():
        time.sleep(0.005)


def rank_of_process() -> int:
    """The rank that the launcher gave this process."""
    return int(os.environ.get("RANK", "0"))
