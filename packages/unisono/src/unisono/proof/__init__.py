"""Numerical evidence that many processes compute what one computes, from running a task under several layouts.

`World` and `compare` do the same for a training script that is not ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.proof.scripts.function_proof import compare
    from unisono.proof.scripts.judging.script_comparison import Report
    from unisono.proof.scripts.lightning_callback import LightningCallback
    from unisono.proof.scripts.recording.script_recorder import Records, World
    from unisono.proof.scripts.same_on import same_on
    from unisono.proof.scripts.transformers_callback import TransformersCallback

__all__ = ["LightningCallback", "Records", "Report", "TransformersCallback", "World", "compare", "same_on"]

_HOME = {
    "LightningCallback": "lightning_callback",
    "Records": "recording.script_recorder",
    "Report": "judging.script_comparison",
    "TransformersCallback": "transformers_callback",
    "World": "recording.script_recorder",
    "compare": "function_proof",
    "same_on": "same_on",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.proof' has no attribute {name!r}")
    return getattr(import_module(f"unisono.proof.scripts.{_HOME[name]}"), name)
