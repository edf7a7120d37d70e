"""What ranks exchange while they compute a loss: collectives, by the line that calls each."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves

from unisono.runtime.code.source_files import is_our_file

_CALLS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "isend", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip
_FUNCTIONAL = (  # of which some bring a backward pass, and in newer versions of torch more
    "all_gather_tensor", "all_gather_tensor_autograd", "all_gather_single", "all_gather_single_autograd",
    "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_coalesced", "all_to_all_single",
    "all_to_all_single_autograd", "broadcast", "permute_tensor", "reduce_scatter_single",
    "reduce_scatter_single_autograd", "reduce_scatter_tensor", "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
)  # fmt: skip
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"


class Exchange(StrEnum):
    """What ranks exchange by a collective, as far as it may explain their gradients."""

    ROWS = "rows"  # what may be values of rows, without a backward pass
    COUNT = "count"  # a number, which may be a count or a report
    WITH_BACKWARD = "with backward"  # torch makes it, or its result has a gradient


def merge_exchanges(*each: Mapping[str, str]) -> dict[str, str]:
    """What several passes or ranks exchange, by line: a line that exchanges rows in one of them exchanges rows."""
    result: dict[str, str] = {}
    for found in each:
        result |= {line: kind for line, kind in found.items() if result.get(line) != Exchange.ROWS}
    return result


class ScriptCollectives:
    """Notes calls of collectives, and whether torch makes them, which brings a backward pass.

    Args:
        is_passing: whether a forward pass has begun, and its backward pass has not.
        tell: is called before any exchange, whoever makes it.

    Attributes:
        found: since the last call of `take`, each with its line, and what it exchanges.
    """

    def __init__(self, is_passing: Callable[[], bool], tell: Callable[[], None]) -> None:
        self._is_passing, self._tell = is_passing, tell
        self.found: dict[str, Exchange] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """With functions of `torch.distributed`, and functional ones, that are watched."""
        before = [(home, name, getattr(home, name)) for home, name in _list_calls()]
        sends = distributed_c10d.isend
        try:
            for home, name, call in before:
                setattr(home, name, self._watch(name, call, home is functional))
            distributed_c10d.isend = dist.isend  # which a `P2POp` has to be of
            yield
        finally:
            distributed_c10d.isend = sends
            for home, name, call in before:
                setattr(home, name, call)

    def take(self) -> dict[str, Exchange]:
        """What was found since the last call."""
        result, self.found = self.found, {}
        return result

    def note(self, name: str, given: Any, result: Any = None) -> None:
        """A function that exchanges something is called, with these arguments, and may have returned a result."""
        self._tell()
        frame: Any = sys._getframe(1) if self._is_passing() else None
        while frame is not None and is_our_file(frame.f_code.co_filename):  # what watches, a mode of torch functions
            frame = frame.f_back
        if frame is None:
            return
        file = frame.f_code.co_filename
        by_torch = file.startswith(_TORCH)
        said = name if by_torch else f"{name} in {Path(file).name}, line {frame.f_lineno}"
        if by_torch or any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            kind = Exchange.WITH_BACKWARD
        else:
            kind = Exchange.ROWS if any(_is_large(leaf) for leaf in tree_leaves(given)) else Exchange.COUNT
        if self.found.get(said) != Exchange.ROWS:  # a line may exchange a count and rows after it
            self.found[said] = kind

    def _watch(self, name: str, original: Callable[..., Any], is_functional: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **named)
            if not is_functional:
                self.note(name, (args, named))
                return original(*args, **named)
            result = original(*args, **named)
            self.note(name, (args, named), result)
            return result

        return call


def _list_calls() -> Iterator[tuple[Any, str]]:
    """The modules and names of those that this version of torch has."""
    for home, names in ((dist, _CALLS), (functional, _FUNCTIONAL)):
        yield from ((home, name) for name in names if hasattr(home, name))


def _is_large(leaf: Any) -> bool:
    """Whether it may hold values of rows; a single number is a count of them, or a loss that is reported."""
    tensor = getattr(leaf, "tensor", leaf)  # of a `P2POp`
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel() > 1
