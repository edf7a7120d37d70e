"""Resolves the layout of a JAX run: number of processes, devices of each, and how they share the state."""

from __future__ import annotations

from typing import Any

from unisono.config.schema.layout import Layout
from unisono.config.schema.run import RunConfig
from unisono.engines import device_modules
from unisono.runtime.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError


def resolve_jax_layout(config: RunConfig, process: ProcessInfo | None) -> RunConfig:
    """Return the configuration with a concrete layout.

    Args:
        config: With JAX as its engine.
        process: This process as numbered by its launcher; None without a launcher.

    Raises:
        ConfigError: For a layout that this host or its launcher cannot provide.
    """
    devices, layout, nodes = device_modules.device_module("jax"), config.layout, config.launch.nodes
    if process is not None:
        world, here = process.world_size, process.local_world_size
    else:
        world = nodes if layout.world_size == "auto" else layout.world_size
        here = max(1, world // nodes)
    kind = devices.resolve(layout, here, config.train.precision)
    each: int = layout.devices if layout.devices != "auto" else 1
    if layout.devices == "auto":  # a single process on a host gets all its accelerators, several share them
        found = devices.accelerators()[1]
        each = 1 if kind == "cpu" or layout.strategy == "single" else max(1, found // here)
    count = world * each
    strategy = layout.strategy if layout.strategy != "auto" else ("single" if count == 1 else "ddp")
    update: dict[str, Any] = {
        "engine": "jax", "world_size": world, "devices": each, "strategy": strategy, "device": kind,
    }  # fmt: skip
    if strategy == "hsdp" and layout.shards is None:
        node = here * each
        shards: int = node if node < count else each
        if shards in (1, count):
            raise ConfigError(
                "layout.strategy=hsdp needs layout.shards: how many devices share one copy of the model (it has a "
                "default only with several nodes, or with several processes of several devices each)"
            )
        update["shards"] = shards
    try:
        checked = Layout.model_validate({**layout.model_dump(), **update})
    except ValueError as error:
        raise ConfigError(
            "; ".join(e["msg"].removeprefix("Value error, ") for e in getattr(error, "errors", list)())
        ) from error
    return config.model_copy(update={"layout": checked})
