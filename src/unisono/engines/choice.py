"""What has to be known of an engine before one is made: its devices, by the name that a layout gives it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def devices(engine: str) -> ModuleType:
    """The module that knows an engine's devices: `accelerators`, `resolve`, `product` and `machine` of each are alike."""
    named = "torch" if engine == "auto" else engine  # of a layout that nobody has made concrete
    return import_module(f"unisono.engines.{named}.devices")
