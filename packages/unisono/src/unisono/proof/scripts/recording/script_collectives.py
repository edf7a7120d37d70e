"""What a script exchanges between ranks while it computes a loss: the collectives that it calls itself, by line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from unisono.runtime.code.source_files import is_our_file, is_user_file

_CALLS = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "reduce_scatter")


class ScriptCollectives:
    """Notes calls by the script's own code that exchange several numbers; those of libraries bring a backward pass.

    Args:
        is_passing: whether a forward pass has begun, and its backward pass has not.

    Attributes:
        found: since the last call of `take`, each with its line.
    """

    def __init__(self, is_passing: Callable[[], bool]) -> None:
        self._is_passing = is_passing
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

    def _watch(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self._is_passing() and any(_is_large(leaf) for leaf in tree_leaves((args, named))):
                frame: Any = sys._getframe(1)
                while frame is not None and is_our_file(frame.f_code.co_filename):  # a mode of torch functions
                    frame = frame.f_back
                if frame is not None and is_user_file(frame.f_code.co_filename):
                    self.found[f"{name} in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"] = None
            return original(*args, **named)

        call.__name__, call.__doc__, call.__wrapped__ = name, original.__doc__, original  # type: ignore[attr-defined]
        return call


def _is_large(leaf: Any) -> bool:
    """Whether it may hold values of rows; a single number is a count of them, or a loss that is reported."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() > 1
