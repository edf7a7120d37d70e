"""Resolves every `auto` of the layout: how many processes, which strategy, which device.

This is decided once, from the user's settings, this host, and what a launcher has already started. The micro-batch is
resolved later (`unisono.launch.resolving.resolve`), since it may depend on what an earlier start of the run used.
"""

from __future__ import annotations

from typing import Any

from unisono.config.schema.run import RunConfig, refuse_other_engine
from unisono.engines import device_module
from unisono.runtime.communication.communicator import ProcessInfo, usable_cores
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.task_config import find_task


def resolve_layout(config: RunConfig, process: ProcessInfo | None, device: str | None = None) -> RunConfig:
    """Return the configuration with every `auto` of the layout resolved, except for the micro-batch.

    Args:
        config: As given by the user.
        process: This process, if a launcher started it; None if the run starts its own processes.
        device: The kind of device on the hosts where the run will be; None: this is its host, whose devices decide.

    Raises:
        ConfigError: For a layout that this host or its launcher cannot provide.
    """
    config = _resolve_engine(config)
    if config.eval.environment is not None and not config.launch.shared_folder:  # unlike an evaluation of such a run
        raise ConfigError(
            "eval.environment writes the weights into one folder together, but launch.shared_folder=false; leave it "
            f"out, and play it with `unisono evaluate RUN eval.environment={config.eval.environment}` on node 0 "
            "afterwards"
        )
    if process is not None:
        _refuse_for_launcher(config, process)
    if config.layout.engine == "jax":
        return _resolve_jax_layout(config, process, device)
    layout, devices = config.layout, device_module("torch")
    if layout.devices not in (1, "auto"):
        raise ConfigError(
            f"layout.devices={layout.devices} is for layout.engine=jax only; torch runs one process per device "
            "(layout.world_size), or all devices of a host in one process (layout.strategy=dp)"
        )
    world, local_world = _resolve_world_size(config, process)
    strategy = ("single" if world == 1 else "ddp") if layout.strategy == "auto" else layout.strategy
    update: dict[str, Any] = {"world_size": world, "strategy": strategy, "devices": 1}
    if strategy == "hsdp" and layout.shards is None:
        if local_world in (1, world):
            raise ConfigError(
                "layout.strategy=hsdp needs layout.shards: how many processes share one copy of the model (the "
                "default, the processes of one node, exists only with several nodes of several processes each)"
            )
        update["shards"] = local_world  # parameters are gathered within a node; only gradients cross nodes
    update["device"] = device or devices.resolve(layout.model_copy(update=update), local_world, config.train.precision)
    if layout.max_memory_gb is not None and layout.micro_batch != "auto" and update["device"] != "cuda":
        raise ConfigError(
            f"layout.max_memory_gb={layout.max_memory_gb:g} is for layout.micro_batch=auto on a {update['device']}, "
            "where torch cannot limit a process; set layout.micro_batch=auto, or leave it out"
        )
    if layout.reduction == "ordered":
        if world & (world - 1):
            below = 1 << (world.bit_length() - 1)
            raise ConfigError(
                f"layout.reduction=ordered: the number of processes must be a power of two, not {world}; use {below} "
                f"or {2 * below}"
            )
        update["threads"] = layout.threads or 1  # the number of threads affects the order of sums within an operation
    return _update_layout(config, update)


def _resolve_jax_layout(config: RunConfig, process: ProcessInfo | None, device: str | None) -> RunConfig:
    """The same for a JAX run: number of processes, devices of each, and how they share the state."""
    devices, layout, nodes = device_module("jax"), config.layout, config.launch.nodes
    if process is not None:
        world, here = process.world_size, process.local_world_size
    else:
        world = nodes if layout.world_size == "auto" else layout.world_size
        here = max(1, world // nodes)
    kind = device or devices.resolve(layout, here, config.train.precision)
    each: int = layout.devices if layout.devices != "auto" else 1
    if layout.devices == "auto":  # a single process on a host gets all its accelerators, several share them
        found = here if device else devices.accelerators()[1]
        each = 1 if kind == "cpu" or layout.strategy == "single" else max(1, found // here)
    count = world * each
    strategy = layout.strategy if layout.strategy != "auto" else ("single" if count == 1 else "ddp")
    update: dict[str, Any] = {"world_size": world, "devices": each, "strategy": strategy, "device": kind}
    if strategy == "hsdp" and layout.shards is None:
        update["shards"] = here * each if here * each < count else each
        if update["shards"] in (1, count):
            raise ConfigError(
                "layout.strategy=hsdp needs layout.shards: how many devices share one copy of the model (it has a "
                "default only with several nodes, or with several processes of several devices each)"
            )
    return _update_layout(config, update)


def _update_layout(config: RunConfig, update: dict[str, Any]) -> RunConfig:
    try:
        checked = type(config.layout).model_validate({**config.layout.model_dump(), **update})
    except ValueError as error:
        raise ConfigError(
            "; ".join(e["msg"].removeprefix("Value error, ") for e in getattr(error, "errors", list)())
        ) from error
    return config.model_copy(update={"layout": checked})


def on_one_process(config: RunConfig, **others: Any) -> RunConfig:
    """A configuration for one process of this host, whatever layout it is for; `others` are keys of the layout."""
    one = {
        "world_size": 1, "devices": "auto", "device": "auto", "strategy": "single", "shards": None, "bucket_mb": None,
        "defer_reduction": False, "offload": False, **others,
    }  # fmt: skip
    alone = config.layout.model_copy(update=one)
    return resolve_layout(config.model_copy(update={"layout": alone, "launch": type(config.launch)()}), None)


def _resolve_engine(config: RunConfig) -> RunConfig:
    """Return the configuration with the task's engine; of a recipe's tasks, the one for the requested engine."""
    written = find_task(config.recipe, config.layout.engine).engine
    if config.layout.engine not in ("auto", written):
        raise ConfigError(
            f"layout.engine={config.layout.engine}, but {config.recipe} is written for {written}; leave out "
            "layout.engine"
        )
    try:
        refuse_other_engine(config, written)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return config.model_copy(update={"layout": config.layout.model_copy(update={"engine": written})})


def is_single(config: RunConfig) -> bool:
    """Whether the run is a single process; in JAX it may have several devices."""
    layout = config.layout
    return layout.strategy in ("single", "dp") or (layout.engine == "jax" and layout.world_size == 1)


def threads_per_process(processes: int) -> int:
    """Divide this host's cores among its processes."""
    return max(1, usable_cores() // processes)


def warn_about_layout(configured: RunConfig, config: RunConfig) -> None:
    """Warn about accelerators that stay idle and settings without effect, once what was asked for is concrete."""

    def warn(text: str) -> None:
        say(f"unisono: WARNING: {text}", error=True)

    layout, devices = config.layout, device_module(config.layout.engine)
    kind, count = devices.accelerators()
    if layout.engine == "jax" and configured.layout.device == "auto" and (why := devices.fallback()):
        warn(f"this run uses the CPU: {why}. Set layout.device=cpu if that is intended")
    if count and configured.layout.device == "auto" and layout.device == "cpu":
        run = f"{layout.world_size} × {config.train.precision}"
        warn(
            f"this run ({run}) uses the CPU, although this host has {count} × {kind}: a run needs one for each "
            f"process, and it must support the precision. layout.device={kind} shows what is missing; set "
            "layout.device=cpu if the CPU is intended"
        )
    if layout.strategy == "dp" and (layout.device == "cpu" or count < 2):
        found = f"{count} × {kind}" if layout.device != "cpu" else "the CPU"
        warn(
            f"layout.strategy=dp splits rows over several devices of one process, and this run has {found}: it is the "
            "same as layout.strategy=single"
        )
    if is_single(config) and config.launch.max_restarts:
        warn(
            f"launch.max_restarts={config.launch.max_restarts} has no effect on a single process: a launcher restarts "
            "the processes that it started, and this run has no launcher"
        )


def _resolve_world_size(config: RunConfig, process: ProcessInfo | None) -> tuple[int, int]:
    layout, nodes = config.layout, config.launch.nodes
    if process is not None:
        return process.world_size, process.local_world_size
    if layout.world_size != "auto":
        return layout.world_size, layout.world_size // nodes
    alone = layout.device == "cpu" or is_single(config)
    local = 1 if alone else max(1, device_module("torch").accelerators()[1])
    return local * nodes, local


def _refuse_for_launcher(config: RunConfig, process: ProcessInfo) -> None:
    launcher, launch = process.launcher, config.launch
    if process.world_size > 1 and config.layout.strategy == "dp":
        raise ConfigError(
            f"layout.strategy=dp is one process with all devices of its host, but {launcher} started "
            f"{process.world_size} processes; start a single process, or use layout.strategy=ddp"
        )
    if launcher == "unisono":
        return
    if launch.nodes > 1:
        raise ConfigError(
            f"launch.nodes={launch.nodes}, but {launcher} started this process and already knows the nodes: "
            "leave out launch.nodes, or start one plain `unisono train` on each node"
        )
    if launch.max_restarts:
        raise ConfigError(
            f"launch.max_restarts={launch.max_restarts}, but {launcher} started this process, and only it can restart "
            "them all: leave out launch.max_restarts, and use the launcher's own option (torchrun --max-restarts, "
            "sbatch --requeue)"
        )
