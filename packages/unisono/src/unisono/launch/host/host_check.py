"""Checks what this host must provide for a run: valid variables, open files, shared memory. Runs before the start."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import psutil

from unisono.config.schema.run import RunConfig
from unisono.data.loading.worker_autotuning import REMOTE_WORKERS
from unisono.launch.host import host_variables
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError, RunError

_SHARED_MEMORY = Path("/dev/shm")
# Bytes that NCCL needs there per process of a host, if its devices have no direct connection.
_SHARED_MEMORY_PER_PROCESS = 32 << 20
_OPEN_FILES = 256  # files that a training process opens: libraries, logs, caches, sockets
_OPEN_FILES_PER_PEER = 4  # additional files for each other process: sockets of gloo, NCCL and the store


def check_host(config: RunConfig) -> None:
    """Refuse to start on a host where the run would fail later; raise the limit on open files where permitted.

    Raises:
        ConfigError: Naming an environment variable with an invalid value.
        RunError: Naming the limit that is too low.
    """
    alone = config.layout.strategy in ("single", "dp") or config.layout.world_size == 1
    up = None if alone else [name for name, state in psutil.net_if_stats().items() if state.isup]
    wrong = list(host_variables.find_fatal_variables(os.environ, up))
    if wrong:
        raise ConfigError("; ".join(f"{one.what}. Remedy: {one.remedy}" for one in wrong))
    for hint in host_variables.find_misspelt_variables(os.environ):
        say(f"unisono: WARNING: {hint}", error=True)
    raise_open_files_limit(config)
    if not alone and config.layout.device != "cpu":
        check_shared_memory(config)


def raise_open_files_limit(config: RunConfig) -> None:
    """Allow as many open files as a process of this run will need.

    Raises:
        RunError: If the limit cannot be raised that far.
    """
    world = config.layout.world_size if isinstance(config.layout.world_size, int) else 1
    workers = getattr(config.data, "workers", 1)
    if not isinstance(workers, int):  # decided later; as many as there may be
        workers = max(REMOTE_WORKERS, usable_cores() // max(1, world // config.launch.nodes))
    ahead = getattr(config.data, "prefetch", None) or 4  # of each worker
    loaders = workers * (8 + 2 * int(ahead))  # sockets, and memory of prefetched batches
    needed = _OPEN_FILES + _OPEN_FILES_PER_PEER * world + 2 * loaders  # training and evaluation
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise RunError(
            f"a process of this run needs about {needed} open files ({world} processes, {workers} data workers), but "
            f"at most {hard} are allowed here. Ask an administrator to raise the limit (ulimit -n; limits.conf, "
            "LimitNOFILE), or lower data.workers or data.prefetch"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_shared_memory(config: RunConfig) -> None:
    """Refuse a host with too little shared memory for NCCL to start, as is common in containers.

    Raises:
        RunError: Saying how much is free.
    """
    assert isinstance(config.layout.world_size, int)
    here = config.layout.world_size // config.launch.nodes
    if not _SHARED_MEMORY.is_dir() or here < 2:
        return
    free, needed = shutil.disk_usage(_SHARED_MEMORY).free, here * _SHARED_MEMORY_PER_PROCESS
    if free < needed:
        raise RunError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free, but {here} processes on one host need about {needed >> 20} "
            "MiB there to exchange data. Give the container more: docker run --shm-size=16g, or --ipc=host"
        )
