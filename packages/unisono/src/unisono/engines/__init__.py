"""How a step is computed: the protocol the loop uses, the rules all engines share, and one package per engine.

Here is chosen what computes: the engine, the module of its devices, and a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from unisono.runtime.collector import paused_collector
from unisono.runtime.errors import KernelError

if TYPE_CHECKING:
    from unisono.engines.protocol import Engine, EngineJob


def create_engine(job: EngineJob) -> Engine:
    """The engine that the layout names; for `auto`, that of the task's framework."""
    configured = job.config.layout.engine
    name = job.task.engine if configured == "auto" else configured
    with paused_collector():
        module = import_module(f"unisono.engines.{name}.engine")
    engine: Engine = module.create(job)
    return engine


def device_module(engine: str) -> ModuleType:
    """The device module of an engine; all have `accelerators`, `resolve`, `product` and `machine`."""
    named = "torch" if engine == "auto" else engine  # `auto` means the layout is not resolved yet
    return import_module(f"unisono.engines.{named}.devices")


def choose_kernel(setting: str, configured: str, against: Mapping[str, str], expected: str = "") -> tuple[str, str]:
    """The kernel to compute with, and why `auto` could not choose a better one.

    Args:
        setting: key of the setting, e.g. `model.attention`.
        configured: its value: a kernel, or `auto`.
        against: by kernel, best first: why it cannot be used; empty if it can. The last one can always be used.
        expected: kernel that every device should have; `auto` gives a reason only if it falls back to a lesser one.

    Raises:
        KernelError: if a kernel was requested by name and cannot be used; names the best one that can.
    """
    usable = [kernel for kernel, why in against.items() if not why]
    if configured == "auto":
        order = list(against)
        lesser = bool(expected) and order.index(usable[0]) > order.index(expected)
        return usable[0], f"{expected}: {against[expected]}" if lesser else ""
    if against[configured]:
        raise KernelError(
            f"{setting}={configured} cannot be used: {against[configured]}; set {setting}={usable[0]}, or auto"
        )
    return configured, ""
