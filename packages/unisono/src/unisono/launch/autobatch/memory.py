"""How much memory a process may use, and how much it has used.

On the CPU a process's peak is its resident set as counted by the kernel, or its address space if that is limited
(`ulimit -v`). Both can be measured on Linux only. An accelerator's peak is what torch's allocator reserved.
"""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryLimit:
    """The memory a process may use.

    Attributes:
        amount: In bytes.
        source: What sets the limit, for messages.
        kind: What is counted.
    """

    amount: int
    source: str
    kind: Literal["resident", "address space", "device"]


def memory_limit(config: RunConfig, device: str, processes: int) -> MemoryLimit:
    """Return the memory limit of one of the processes that share this host's memory.

    Raises:
        ConfigError: If memory cannot be measured here.
    """
    given = config.layout.max_memory_gb
    given_bytes = int(given * 1e9) if given is not None else None
    if device != "cpu":
        if not hasattr(torch.accelerator, "max_memory_reserved"):
            raise ConfigError(
                f"this version of torch does not report memory use on {device}; set layout.micro_batch to a number"
            )
        amount = given_bytes or torch.accelerator.get_memory_info()[1]
        return MemoryLimit(amount, "layout.max_memory_gb" if given_bytes else device, "device")
    if sys.platform != "linux":
        raise ConfigError("memory use of a process can be measured on Linux only; set layout.micro_batch to a number")
    if given_bytes:
        return MemoryLimit(given_bytes, "layout.max_memory_gb", "resident")
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        return MemoryLimit(space, "the limit of the address space (ulimit -v)", "address space")
    free, source = _read_status(Path("/proc/meminfo"))["MemAvailable"], "the free memory of this host"
    for most, used in _read_cgroup_limits(_own_cgroups()):
        if most - used < free:
            free, source = most - used, "the control group"
    return MemoryLimit(free // processes + _read_status()["VmRSS"], source, "resident")


def reset_peak(kind: str) -> None:
    """Restart the measurement of the peak, where that is possible."""
    if kind == "device":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    elif kind == "resident":
        with suppress(OSError):  # then the peak is that since the process started, which is an upper bound
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_peak(kind: str) -> int:
    """Return the peak in bytes."""
    if kind == "device":
        return int(torch.accelerator.max_memory_reserved())
    return _read_status()["VmHWM" if kind == "resident" else "VmPeak"]


def _read_status(path: Path = Path("/proc/self/status")) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB", path.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return {name: 1024 * int(amount) for name, amount in found}


def _own_cgroups() -> list[Path]:
    """Return the folders of this process's control group and its ancestors, for cgroup version 2 and version 1."""
    result = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = _CGROUP / controllers
            folder = root / path.lstrip("/")
            result += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return result


def _read_cgroup_limits(folders: list[Path]) -> list[tuple[int, int]]:
    """Return limit and use of every control group with a limit; reclaimable memory (inactive files) does not count."""
    names: tuple[tuple[str, str, str], ...] = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    result = []
    for folder in folders:
        for most, used, files in names:
            texts = [_read(folder / name) for name in (most, used, "memory.stat")]
            if texts[0].isdigit() and texts[1].isdigit() and int(texts[0]) < 1 << 60:
                idle = re.search(rf"^{files} (\d+)$", texts[2], re.MULTILINE)
                result.append((int(texts[0]), int(texts[1]) - (int(idle[1]) if idle else 0)))
    return result


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return ""
