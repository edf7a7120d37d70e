"""Numerical evidence that many processes compute what one computes, from running a task under several layouts.

`World` and `compare` do the same for a training script that is not ours.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.proof.scripts.script_comparison import Report, compare
    from unisono.proof.scripts.script_recorder import Records, World

__all__ = ["Records", "Report", "World", "compare"]

_HOME = dict.fromkeys(("Records", "World"), "script_recorder") | dict.fromkeys(
    ("Report", "compare"), "script_comparison"
)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono.proof' has no attribute {name!r}")
    return getattr(import_module(f"unisono.proof.scripts.{_HOME[name]}"), name)
