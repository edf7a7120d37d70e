"""How fast this host multiplies, copies, writes and reduces over processes: short measurements of seconds each.

They are rates of one moment, to be compared with the data sheet or with yesterday, and no benchmark.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from unisono.doctor.facts import HostFacts
from unisono.launch.processes import local_processes
from unisono.launch.resolving import layout
from unisono.runtime.errors import UnisonoError

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_SECONDS = 0.5  # of one measurement
RESULT = "all_reduce.txt"


@dataclass(frozen=True)
class Rate:
    """One measured rate.

    Attributes:
        name: what was measured, e.g. `matmul bf16`.
        value: the rate; None where it could not be measured.
        unit: of the rate, e.g. `TFLOP/s`.
        why: why it could not be measured.
    """

    name: str
    value: float | None
    unit: str
    why: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.name}: ABSTAIN, {self.why}"
        return f"{self.name}: {self.value:.3g} {self.unit}"


def measure_rates(facts: HostFacts, directory: Path, processes: int) -> list[Rate]:
    """All rates of this host; `directory` is where runs will lie, `processes` add up a tensor together."""
    device = torch.device(facts.accelerator, 0) if facts.devices else torch.device("cpu")
    rates = [measure_matmul(name, dtype, device) for name, dtype in PRECISIONS.items()]
    rates += [measure_memory_copy(device), measure_disk(directory)]
    return [*rates, measure_all_reduce(processes, facts.accelerator if facts.devices else "cpu")]


def measure_matmul(name: str, dtype: torch.dtype, device: torch.device) -> Rate:
    """Products of square matrices, 2n³ operations each."""
    size = 1024 if device.type == "cpu" else 8192
    try:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        seconds = _time_repeated(lambda: left @ right, device)
    except (RuntimeError, TypeError) as error:  # a type that the device has not
        return Rate(f"matmul {name}", None, "TFLOP/s", str(error).splitlines()[0])
    return Rate(f"matmul {name}", 2 * size**3 / seconds / 1e12, "TFLOP/s")


def measure_memory_copy(device: torch.device) -> Rate:
    """A copy inside of the device's memory; every byte is read once and written once."""
    source = torch.ones(2**26 if device.type == "cpu" else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = _time_repeated(lambda: target.copy_(source), device)
    return Rate("memory copy", 2 * source.numel() / seconds / 1e9, "GB/s")


def measure_disk(directory: Path) -> Rate:
    """64 MiB written and brought to the disk, as a checkpoint is."""
    content = os.urandom(2**26)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            began = perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            seconds = perf_counter() - began
        with suppress(OSError):
            directory.rmdir()  # if it was not there before, it is empty
    except OSError as error:
        return Rate("disk write", None, "MB/s", f"{directory}: {error.strerror}")
    return Rate("disk write", len(content) / seconds / 1e6, "MB/s")


def measure_all_reduce(processes: int, device: str) -> Rate:
    """A sum of 64 MiB over processes, as the rate that each link must carry: 2 (n - 1) / n of it, as in nccl-tests."""
    name = f"all-reduce {processes} × {device}"
    if processes < 2:
        return Rate(name, None, "GB/s", "there is one device, so a run is one process")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "device").write_text(device, encoding="utf-8")
        try:
            module, threads = "unisono.doctor.all_reduce_process", layout.threads_per_process(processes)
            local_processes.run_processes(module, place, processes, threads, "", device == "cpu")
            seconds, size = map(float, (place / RESULT).read_text(encoding="utf-8").split())
        except (UnisonoError, OSError) as error:
            return Rate(name, None, "GB/s", str(error).strip().splitlines()[-1])
    return Rate(name, 2 * (processes - 1) / processes * size / seconds / 1e9, "GB/s")


def _time_repeated(act: Callable[[], object], device: torch.device) -> float:
    """Seconds that an act takes, once it is warm."""
    act()
    _synchronize(device)
    count, began = 0, perf_counter()
    while perf_counter() - began < _SECONDS:
        for _ in range(1 if device.type == "cpu" else 10):
            act()
            count += 1
        _synchronize(device)
    return (perf_counter() - began) / count


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
