"""Looks up an engine's device module by name, before an engine exists."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def device_module(engine: str) -> ModuleType:
    """The device module of an engine; all have `accelerators`, `resolve`, `product` and `machine`."""
    named = "torch" if engine == "auto" else engine  # `auto` means the layout is not resolved yet
    return import_module(f"unisono.engines.{named}.devices")
