"""Chooses the device of a process from what `torch.accelerator` offers."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from typing import Any

import torch

from unisono.config.schema.layout import Layout
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.runtime.untrusted import resource_limits


def accelerators() -> tuple[str, int]:
    """Kind and number of this host's accelerators; `("cpu", 0)` if there are none."""
    if not torch.accelerator.is_available():
        return "cpu", 0
    found = torch.accelerator.current_accelerator()
    return (found.type, torch.accelerator.device_count()) if found else ("cpu", 0)


def resolve(layout: Layout, local_world_size: int, precision: str) -> str:
    """The kind of device for a layout.

    Args:
        layout: its `device` may be `auto`: the accelerator if there is one for each process of this host, else the CPU.
        local_world_size: processes on this host.
        precision: of the run.

    Raises:
        ConfigError: if the device does not exist or does not support the layout or precision.
    """
    kind, count = accelerators()
    if layout.device == "auto":
        return kind if count >= local_world_size and (precision != "fp64" or kind == "cuda") else "cpu"
    if layout.device == "cpu":
        return "cpu"
    if layout.device != kind:
        raise ConfigError(
            f"layout.device={layout.device}: this host has {f'{count} × {kind}' if count else 'no accelerator'}; "
            "use auto or cpu"
        )
    if local_world_size > count:
        raise ConfigError(
            f"layout.device={kind}: {local_world_size} processes on this host, but only {count} {kind} device"
            f"{'s' if count != 1 else ''}; use layout.world_size={count} or layout.device=cpu"
        )
    if kind == "mps" and (layout.strategy != "single" or precision == "fp64"):
        raise ConfigError(
            "layout.device=mps: one process (layout.strategy=single) in fp32 or bf16 only; use layout.device=cpu"
        )
    return kind


def find_device(device: str, precision: str) -> str:
    """The kind of device of a verb on a run: `auto` is an accelerator with this precision, if there is one.

    Raises:
        ConfigError: for a device that this host does not have.
    """
    found, count = accelerators()
    if device == "auto":
        return "cpu" if precision == "fp64" and found != "cuda" else found
    if device not in ("cpu", found):
        raise ConfigError(f"device={device}: this host has {f'{count} × {found}' if count else 'no accelerator'}")
    return device


def select_device(kind: str, process: ProcessInfo) -> torch.device:
    """The device of one process, made current."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, process.local_rank)
    torch.accelerator.set_device_index(device.index)
    return device


def peak_memory(device: torch.device) -> int | None:
    """Peak bytes of this process so far: what tensors took on an accelerator, or the resident set on the CPU."""
    if device.type == "cpu":
        return resource_limits.peak_resident()
    module = torch.get_device_module(device)
    return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else None


def limit_memory(layout: Layout, device: torch.device) -> None:
    """Give this process no more of its device than `layout.max_memory_gb`, where torch can limit it."""
    if layout.max_memory_gb is not None and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1e9 * layout.max_memory_gb / whole), device)


def machine(layout: Layout, place: ProcessInfo) -> dict[str, Any]:
    """The hardware: the device's name, the processor's instruction set, and the number of threads.

    With `layout.deterministic`, also that kernels are.
    """
    return {
        "device": device_name(select_device(layout.device, place)),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
        **({"deterministic": True} if layout.deterministic else {}),
    }


def device_name(device: torch.device) -> str:
    """Product name, e.g. `NVIDIA H200`; `cpu` for the CPU."""
    if device.type == "cpu":
        return "cpu"
    module = getattr(torch, device.type, None)
    named = getattr(module, "get_device_name", None)
    return str(named(device)) if named else device.type


@cache
def product(kind: str) -> str:
    """Product name of this host's first device of a kind; the kind itself if it has no name.

    Runs in a subprocess, since a launcher must not allocate memory on the devices of its training processes.
    """
    if kind == "cpu":
        return kind
    code = (
        f"import torch; from unisono.engines.torch.devices import device_name as n; print(n(torch.device({kind!r}, 0)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else kind
