"""What ranks exchange while they compute a loss: collectives, by the line that calls each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.runtime.code.source_files import is_our_file

_CALLS = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
)  # fmt: skip
HARMLESS = (" of torch", " of counts")  # how calls end that torch makes itself, or of what may be counts or reports
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class ScriptCollectives:
    """Notes calls of collectives, and whether torch makes them, which brings a backward pass.

    Args:
        is_passing: whether a forward pass has begun, and its backward pass has not.
        tell: is called before any exchange, whoever makes it.

    Attributes:
        found: since the last call of `take`, each with its line.
    """

    def __init__(self, is_passing: Callable[[], bool], tell: Callable[[], None]) -> None:
        self._is_passing, self._tell = is_passing, tell
        self.found: dict[str, None] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With functions of `torch.distributed` that are watched."""
        before = {name: getattr(dist, name) for name in _CALLS}
        try:
            for name, call in before.items():
                setattr(dist, name, self._watch(name, call))
            yield
        finally:
            for name, call in before.items():
                setattr(dist, name, call)

    def take(self) -> list[str]:
        """What was found since the last call."""
        result, self.found = [*self.found], {}
        return result

    def note(self, name: str, given: Any) -> None:
        """A function that exchanges something is called, with these arguments."""
        self._tell()
        frame: Any = sys._getframe(1) if self._is_passing() else None
        while frame is not None and is_our_file(frame.f_code.co_filename):  # what watches, a mode of torch functions
            frame = frame.f_back
        if frame is not None:
            file = frame.f_code.co_filename
            said = name if file.startswith(_TORCH) else f"{name} in {Path(file).name}, line {frame.f_lineno}"
            large = any(_is_large(leaf) for leaf in tree_leaves(given))
            self.found[f"{said}{HARMLESS[0] if said == name else '' if large else HARMLESS[1]}"] = None

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.note(name, (args, named))
            return original(*args, **named)

        call.__name__, call.__doc__, call.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
        return call


def _is_large(leaf: Any) -> bool:
    """Whether it may hold values of rows; a single number is a count of them, or a loss that is reported."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 1
