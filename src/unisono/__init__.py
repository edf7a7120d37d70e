"""Unisono trains a model on one process or on many, and the many compute exactly what the one computes.

This module is the public face. Names are resolved on first use, so that `unisono --help` imports neither torch nor
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.version import __version__

if TYPE_CHECKING:
    from unisono.config.schema.base import Settings
    from unisono.config.schema.data import Data
    from unisono.config.schema.run import RunConfig
    from unisono.data.order.order import Order
    from unisono.data.sources import open_source
    from unisono.launch.load import load_model, load_weights
    from unisono.launch.train import train
    from unisono.runtime.errors import UnisonoError
    from unisono.task import Context, Loss, SampleContext, Source, Task

__all__ = [
    "Context",
    "Data",
    "Loss",
    "Order",
    "RunConfig",
    "SampleContext",
    "Settings",
    "Source",
    "Task",
    "UnisonoError",
    "__version__",
    "load_model",
    "load_weights",
    "open_source",
    "train",
]

_HOME = {
    "Context": "unisono.task",
    "Data": "unisono.config.schema.data",
    "Loss": "unisono.task",
    "Order": "unisono.data.order.order",
    "RunConfig": "unisono.config.schema.run",
    "SampleContext": "unisono.task",
    "Settings": "unisono.config.schema.base",
    "Source": "unisono.task",
    "Task": "unisono.task",
    "UnisonoError": "unisono.runtime.errors",
    "load_model": "unisono.launch.load",
    "load_weights": "unisono.launch.load",
    "open_source": "unisono.data.sources",
    "train": "unisono.launch.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
