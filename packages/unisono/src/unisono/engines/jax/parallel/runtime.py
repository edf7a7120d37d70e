"""Starts JAX in one process: platform, devices, program cache, and the other processes.

Everything is set before JAX looks for devices, and nothing is left to detection: the coordinator's address is chosen by
rank 0 and told to all, its timeouts are those of the run, and that it answers is seen before JAX is asked to meet it.
JAX would end the process with a signal where it does not.
"""

from __future__ import annotations

import inspect
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jaxlib._jax  # type: ignore[import-not-found]
from jax._src import xla_bridge

from unisono.config.schema.run import RunConfig
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, format_address
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.communication.listening import listen, reserve_port
from unisono.runtime.errors import ConfigError, DeadlineError
from unisono.runtime.files import cache_dir, check_private, make_cache_folder
from unisono.runtime.untrusted import safe_writing

log = logging.getLogger(__name__)

_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_REACH_TIMEOUT = 15.0  # seconds for a process to reach a port on which rank 0 listens already
_PROBE_INTERVAL = 0.1  # seconds between two looks for the coordinator


def start(config: RunConfig, place: ProcessInfo, group: Communicator, addresses: Sequence[str] = ()) -> None:
    """Start JAX with the devices of a layout, and join the other processes; collective.

    Args:
        config: concrete.
        place: of this process.
        group: all processes; they have met already.
        addresses: at which the others reach each process, by rank.

    Raises:
        ConfigError: where JAX was started in this process before, with other devices or without a flag of XLA's.
        DeadlineError: if JAX's coordinator does not answer.
    """
    layout = config.layout
    assert isinstance(layout.devices, int)
    _set_option("jax_enable_preemption_service", False)  # it would take SIGTERM, which asks for a checkpoint
    if layout.deterministic:
        _ask_for_determinism()
    if layout.device == "cpu":
        _use_cpu_devices(layout.devices)
    elif layout.device != "auto":
        _set_option("jax_platforms", f"{layout.device},cpu")
    _use_program_cache()
    if place.world_size > 1:
        _join_coordinator(config, place, group, addresses[0])
        _set_gloo_address(addresses[place.rank])
    count = _count_devices(layout.device)
    if count < layout.devices:
        raise ConfigError(
            f"layout.devices={layout.devices}, but JAX has {count} × {jax.default_backend()} in this process"
        )


def _count_devices(kind: str) -> int:
    """Devices of this process; JAX starts here, and says by an error that it cannot."""
    try:
        return jax.local_device_count()
    except RuntimeError as error:
        raise ConfigError(
            f"layout.device={kind}: JAX could not start on it: {error}. `unisono doctor` shows what JAX finds on this "
            "host; layout.device=cpu runs without it"
        ) from error


def stop(group: Communicator) -> None:
    """Shut down JAX's coordination on all processes together, since leaving first would kill the others; collective."""
    if jax.distributed.is_initialized():
        group.barrier("the end of all processes")
        jax.distributed.shutdown()


def _ask_for_determinism() -> None:
    """Set the flag that XLA reads once, when JAX starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _DETERMINISTIC not in flags.split():
        if xla_bridge.backends_are_initialized():
            raise ConfigError(
                "layout.deterministic=true, but JAX was started in this process before, without it. Start the run in a "
                f"process of its own, or set XLA_FLAGS={_DETERMINISTIC} before JAX is used"
            )
        os.environ["XLA_FLAGS"] = f"{flags} {_DETERMINISTIC}".strip()


def _use_cpu_devices(devices: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_platforms", "cpu")
    except RuntimeError as error:  # JAX has looked for devices already
        if (found := len(jax.devices("cpu"))) < devices:
            raise ConfigError(
                f"layout.devices={devices}, but JAX was started in this process before, with {found} CPU "
                f"device{'s' if found > 1 else ''}. Start the run in a process of its own, or set JAX_NUM_CPU_DEVICES="
                f"{devices} before JAX is used"
            ) from error


def _use_program_cache() -> None:
    """Cache compiled programs on disk, unless the user has configured or disabled the cache."""
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = cache_dir() / "jax"
        try:
            make_cache_folder(folder)
            check_private(folder)  # compiled programs are code
        except OSError as error:
            log.warning("compiled programs cannot be cached in %s: %s", folder, error)
            return
        _set_option("jax_compilation_cache_dir", str(folder))
        _set_option("jax_persistent_cache_min_compile_time_secs", 0.0)


def _join_coordinator(config: RunConfig, place: ProcessInfo, group: Communicator, host: str) -> None:
    """Meet the other processes at JAX's coordinator, which is rank 0's."""
    launch, layout = config.launch, config.layout
    assert isinstance(layout.devices, int)
    with reserve_port(host) if place.is_first else nullcontext() as held:
        limit = min(_REACH_TIMEOUT, launch.initialization_timeout, launch.timeout / 2)
        port = _agree_on_port(held, group, host, limit)
        address = format_address(host, port)
        ids = None
        if layout.device != "cpu":
            first = place.local_rank * layout.devices
            ids = list(range(first, first + layout.devices))
        known = inspect.signature(jax.distributed.initialize).parameters
        given: dict[str, Any] = {
            "coordinator_address": address,
            "coordinator_bind_address": address,
            "num_processes": place.world_size,
            "process_id": place.rank,
            "local_device_ids": ids,
            "cluster_detection_method": "deactivate",
            "initialization_timeout": round(launch.initialization_timeout),
            "heartbeat_timeout_seconds": round(launch.heartbeat_timeout),
            "shutdown_timeout_seconds": round(launch.timeout),
        }
        with heartbeat.phase("wait", "JAX's coordinator"):
            if not place.is_first:
                _probe(host, port, place.rank, launch.initialization_timeout, "launch.initialization_timeout")
            log.info("JAX's coordinator is at %s", address)
            jax.distributed.initialize(**{name: value for name, value in given.items() if name in known})


def _agree_on_port(held: socket.socket | None, group: Communicator, host: str, limit: float) -> int:
    """The coordinator's port, once every process has reached it; collective.

    JAX would end all processes with a signal if one of them cannot.

    Args:
        held: On rank 0, what reserves the port.
        group: All processes.
        host: Address of rank 0.
        limit: Seconds that a process tries.
    """
    with ExitStack() as stack:
        if held is not None:
            stack.enter_context(listen(host, held.getsockname()[1], shared=True) or nullcontext())
        port: int = group.gather(held.getsockname()[1] if held else None, "the address of JAX's coordinator")[0]
        reach = None if held is not None else lambda: _probe(host, port, group.rank, limit)
        raise_everywhere(group, reach, "all processes to reach the port of JAX's coordinator")
    return port


def _set_gloo_address(address: str) -> None:
    """Have gloo listen at an address of this process; JAX would let it look up the host's name, often 127.0.1.1."""
    if hasattr(jaxlib._jax, "make_gloo_tcp_collectives"):
        made = jaxlib._jax.make_gloo_tcp_collectives
        jaxlib._jax.make_gloo_tcp_collectives = partial(getattr(made, "func", made), hostname=address)


def _probe(host: str, port: int, rank: int, limit: float, key: str = "") -> None:
    """Wait until something listens at the coordinator's address.

    Raises:
        DeadlineError: if nothing does in time; `key` is the setting to blame.
    """
    deadline, why = time.monotonic() + limit, "no answer"
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), min(5.0, max(0.1, deadline - time.monotonic()))).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(_PROBE_INTERVAL)
    raise DeadlineError(
        f"JAX's coordinator at {format_address(host, port)} (rank 0) did not respond to rank {rank} within {limit:g} s"
        f"{f' ({key})' if key else ''}: {why}. Check that no firewall blocks ports between the hosts"
    )


def redirect_native_output(folder: Path, name: str) -> None:
    """Send what native code writes to stdout and stderr to a file in a folder; what Python writes goes where it went.

    gloo and XLA log every connection, and a page of addresses when a peer is gone.
    """
    with suppress(OSError, ValueError):
        log_file = safe_writing.open_anew(folder, name)
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, name)
            stream.flush()
            kept = os.dup(number)
            setattr(sys, name, os.fdopen(kept, "w", buffering=1, encoding=stream.encoding, errors="backslashreplace"))
            os.dup2(log_file.fileno(), number)
        log_file.close()


def _set_option(name: str, value: object) -> None:
    """Set a JAX option, if this release has it."""
    if hasattr(jax.config, name):
        jax.config.update(name, value)
