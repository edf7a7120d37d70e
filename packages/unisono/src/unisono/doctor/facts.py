"""Collects the facts of this host. `None` means that a fact cannot be determined here; nothing is judged."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from unisono.checkpoint.core import provenance
from unisono.config import environment
from unisono.launch.nodes import network
from unisono.launch.nodes.network import Interface
from unisono.runtime.communication.communicator import usable_cores

GIB = 2**30
_PACKAGES = (
    "torchaudio", "accelerate", "peft", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "filelock", "hydra-core",
)  # fmt: skip


@dataclass(frozen=True)
class HostFacts:
    """What this host has.

    Attributes:
        environment: Variables of this process.
        versions: Of packages, CUDA, its driver and NCCL.
        system: Name and release of the operating system.
        host: The host's name.
        resolves: The address that its name resolves to; empty if none.
        interfaces: Network interfaces.
        cores: Cores that this process may use.
        memory_gib: Available memory.
        shared_gib: Free in /dev/shm.
        files: Open files allowed per process.
        locked_memory: Bytes that a process may lock; -1 if unlimited.
        infiniband: Whether there is an InfiniBand device.
        accelerator: Kind of the accelerators that torch sees, or `cpu`.
        devices: Their names.
        jax: What JAX computes on, as `N × kind`, and `XLA_FLAGS` if set; empty if JAX is not installed.
        device_memory: Free share of each device's memory, 0 to 1.
        driver_devices: Accelerators offered by a driver, whether torch sees them or not.
        compiler: Whether there is a C++ compiler.
        audio_core: Instruction set used by the native core of `unisono_audio`; empty if it was not built, None if the
            package is not installed.
        clock_behind: Seconds by which the clock is behind the time at which Unisono was installed.
        directory: Where runs will be written.
        writable: Why that directory is not writable; empty if it is.
        disk_gib: Free there.
    """

    environment: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict)
    system: str = ""
    host: str = ""
    resolves: str | None = None
    interfaces: tuple[Interface, ...] = ()
    cores: int = 1
    memory_gib: float | None = None
    shared_gib: float | None = None
    files: int | None = None
    locked_memory: int | None = None
    infiniband: bool = False
    accelerator: str = "cpu"
    devices: tuple[str, ...] = ()
    jax: str = ""
    device_memory: tuple[float, ...] | None = None
    driver_devices: int | None = None
    compiler: bool = True
    audio_core: str | None = "baseline"
    clock_behind: float = 0.0
    directory: str = "."
    writable: str = ""
    disk_gib: float | None = None


def gather_facts(directory: Path) -> HostFacts:
    """Collect the facts of this host.

    Args:
        directory: Where runs will be written; it need not exist yet.
    """
    import torch

    from unisono.engines.torch import devices

    kind, count = devices.accelerators()
    existing = next(parent for parent in (directory, *directory.resolve().parents) if parent.exists())
    return HostFacts(
        environment=dict(os.environ),
        versions=_versions(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        host=platform.node(),
        resolves=_resolve_name(platform.node()),
        interfaces=tuple(network.interfaces()),
        cores=usable_cores(),
        memory_gib=psutil.virtual_memory().available / GIB,
        shared_gib=shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else None,
        files=_resource_limit("RLIMIT_NOFILE"),
        locked_memory=_resource_limit("RLIMIT_MEMLOCK"),
        infiniband=Path("/dev/infiniband").is_dir(),
        accelerator=kind,
        devices=tuple(devices.device_name(torch.device(kind, index)) for index in range(count)),
        jax=_jax(),
        device_memory=_device_memory(kind, count),
        driver_devices=_driver_devices(),
        compiler=any(shutil.which(name) for name in ("g++", "clang++", "c++")),
        audio_core=_audio_core(),
        clock_behind=max(0.0, Path(sys.modules[__name__].__file__ or ".").stat().st_mtime - time.time()),
        directory=str(directory),
        writable=_write_error(existing),
        disk_gib=shutil.disk_usage(existing).free / GIB,
    )


def _audio_core() -> str | None:
    """Return the instruction set of the native audio core, empty if it was not built, None without the package."""
    if not find_spec("unisono_audio"):
        return None
    return next(iter(import_module("unisono_audio.native_core").instruction_sets()), "")


def _jax() -> str:
    """Return what JAX computes on here, determined in a separate process, the only one that imports JAX."""
    if not find_spec("jax"):
        return ""
    from unisono.engines.jax import devices

    kind, count = devices.accelerators()
    text = f"{count} × {kind}" if count else "cpu"
    flags = os.environ.get("XLA_FLAGS")
    return ", ".join(filter(None, [text, devices.fallback(), flags and f"XLA_FLAGS={flags}"]))


def _versions() -> dict[str, str]:
    import torch

    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    found = {
        **environment.library_versions("jax"),
        **provenance.versions("torch"),
        **{name: metadata.version(name) for name in _PACKAGES if name in installed},
        "torch": torch.__version__,  # including its build
    }
    driver = environment.driver_version()  # even if this build of torch has no use for it
    return found | ({"driver": driver} if driver else {})


def _resolve_name(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return ""


def _resource_limit(name: str) -> int | None:
    with suppress(AttributeError):
        soft = resource.getrlimit(getattr(resource, name))[0]
        return -1 if soft == resource.RLIM_INFINITY else int(soft)
    return None


def _device_memory(kind: str, count: int) -> tuple[float, ...] | None:
    import torch

    ask: Any = getattr(getattr(torch, kind, None), "mem_get_info", None)
    with suppress(RuntimeError):
        return tuple(free / total for free, total in map(ask, range(count))) if count and ask is not None else None
    return None


def _driver_devices() -> int | None:
    """Return the number of accelerators that NVIDIA's or AMD's driver offers; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        with suppress(OSError):
            count += path.read_text(encoding="utf-8").strip() not in ("", "0")
    return count


def _write_error(existing: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=existing):
            return ""
    except OSError as error:
        return error.strerror or str(error)
