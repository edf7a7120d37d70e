"""Finds JAX's devices without claiming them: a process that starts others must not hold device memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from unisono.config.schema.layout import Layout
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

_HARDWARE = {  # files of a kind of accelerator, and the packages by which JAX uses it
    "NVIDIA GPU": (("/dev/nvidia0", "/proc/driver/nvidia/version"), ("jax-cuda12-plugin", "jax-cuda13-plugin"), "cuda"),
    "AMD GPU": (("/dev/kfd",), ("jax-rocm60-plugin", "jax-rocm7-plugin"), "rocm"),
    "TPU": (("/dev/accel0", "/dev/vfio/0"), ("libtpu", "libtpu-nightly"), "tpu"),
}
# `Device.platform` says `gpu` of NVIDIA's and AMD's alike. The backend has the name that `jax_platforms` takes: JAX
# expands `gpu` to cuda and rocm, and then fails for the one without a plugin.
_QUERY = """
import jax, json
from jax.extend import backend
found = jax.local_devices()
names = [name for name, client in backend.backends().items() if client is found[0].client]
print(json.dumps([*names, found[0].platform][:1] + [len(found), found[0].device_kind]))
"""
_QUERY_TIMEOUT = 300.0  # seconds for JAX to find its devices


@cache
def accelerators() -> tuple[str, int]:
    """Kind (cuda, rocm, tpu, …) and number of this host's accelerators in JAX; `("cpu", 0)` if there are none."""
    kind, count, _ = _query_devices()
    return ("cpu", 0) if kind == "cpu" else (kind, count)


@cache
def fallback() -> str:
    """Why a host with an accelerator computes on its CPU; empty if it does not, or has none."""
    if accelerators()[1] or os.environ.get("JAX_PLATFORMS") == "cpu":
        return ""
    for name, (files, packages, extra) in _HARDWARE.items():
        if any(Path(file).exists() for file in files):
            if not _are_installed(packages):
                return f"this host has a {name}, but JAX has no plugin for it: pip install 'jax[{extra}]'"
            return f"this host has a {name}, but JAX could not use it; `unisono doctor` shows JAX's message"
    return ""


def resolve(layout: Layout, local_world_size: int, precision: str) -> str:
    """The kind of device for a layout.

    Args:
        layout: its `device` may be `auto`: the accelerators if there are enough for the processes of this host, else
            the CPU.
        local_world_size: processes on this host.
        precision: of the run.

    Raises:
        ConfigError: if the device does not exist.
    """
    if layout.device == "cpu":
        return "cpu"
    kind, count = accelerators()
    wanted = local_world_size * (layout.devices if isinstance(layout.devices, int) else 1)
    enough = count >= wanted and not (kind == "tpu" and precision == "fp64")
    if layout.device == "auto":
        return kind if count and enough else "cpu"
    names = {kind, *(("gpu",) if kind in ("cuda", "rocm") else ())}
    if layout.device not in names or not count:
        raise ConfigError(
            f"layout.device={layout.device}: JAX finds {f'{count} × {kind}' if count else 'no accelerator'} on this "
            f"host{f' ({fallback()})' if fallback() else ''}; use auto or cpu"
        )
    if not enough:
        raise ConfigError(
            f"layout.device={layout.device}: {local_world_size} processes × {wanted // local_world_size} devices were "
            f"requested, but this host has {count} × {kind}; use fewer, or layout.device=cpu"
        )
    return kind


def product(kind: str) -> str:
    """Product name of this host's devices of a kind."""
    return kind if kind == "cpu" else _query_devices()[2]


def machine(layout: Layout, place: ProcessInfo) -> dict[str, Any]:
    """The hardware: the device's name, the processor, and the number of threads.

    With `layout.deterministic`, also that kernels are.
    """
    import jax

    return {
        "device": device_name(jax.local_devices()[0]),
        "processor": platform.machine(),
        "threads": layout.threads or 0,
        **({"deterministic": True} if layout.deterministic else {}),
    }


def device_name(device: Any) -> str:
    """Product name of a `jax.Device`; `cpu` for the CPU."""
    return "cpu" if device.platform == "cpu" else str(device.device_kind)


@cache
def _query_devices() -> tuple[str, int, str]:
    """Kind, number and name of the devices, found by a subprocess if there is accelerator hardware."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", 0, "cpu"
    if not any(_are_installed(packages) for _, packages, _ in _HARDWARE.values()):
        return "cpu", 0, "cpu"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUERY], capture_output=True, text=True, check=True, timeout=_QUERY_TIMEOUT
        )
        kind, count, name = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return "cpu", 0, "cpu"
    return str(kind), int(count), str(name)


def _are_installed(packages: tuple[str, ...]) -> bool:
    for package in packages:
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        return True
    return False
