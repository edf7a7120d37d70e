"""What a task's forward pass returns, kept as a few numbers per tensor, and asked whether it can be trusted.

A sketch of a tensor is its norm and its products with four vectors of random signs: a difference d changes each
product by about ‖d‖, so sketches show it as the tensors would, and are small enough to be gathered from all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from unisono.runtime import rng
from unisono.task import Task

_SIGNS = 4
Sketch = list[float]


class Watched:
    """A task that keeps sketches of what its `outputs` returns, and is otherwise the task itself.

    Args:
        task: to look at.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self.seen: list[dict[str, Sketch]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def outputs(self, model: nn.Module, batch: Any, context: Any) -> Any:
        """What the task returns, after it was looked at."""
        result = self._task.outputs(model, batch, context)
        if torch.is_grad_enabled():  # not where a first pass only adds up what the loss needs of the whole batch
            self.seen.append({name: sketch(tensor) for name, tensor in tensors(result)})
        return result


def tensors(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """The computed tensors of a nested structure by name; parameters that a task hands on are none."""
    for path, leaf in tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter | DTensor):
            yield keystr(path) or "output", leaf.detach()


def sketch(tensor: Tensor) -> Sketch:
    """Norm, and products with vectors of random signs."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = real.double().cpu().numpy().ravel()
    bits = rng.generator("sketch").integers(0, 1 << _SIGNS, values.size, dtype=np.uint8)
    return [float(np.linalg.norm(values)), *(float(values @ (1.0 - 2.0 * (bits >> k & 1))) for k in range(_SIGNS))]


def distance(mine: Mapping[str, Sketch], reference: Mapping[str, Sketch]) -> tuple[float, str]:
    """The largest relative difference of two forward passes, and the tensor that has it."""
    worst = 0.0, ""
    for name in {**reference, **mine}:
        a, b = mine.get(name), reference.get(name)
        if a is None or b is None:
            return math.inf, name
        if a != b:
            size = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(a[0], b[0])
            worst = max(worst, (size if math.isfinite(size) else math.inf, name))
    return worst


def row_differs(first: Any, second: Any, row: int, rows: int, floor: float) -> bool:
    """Whether a row came out otherwise, from two passes in which only the other rows differ.

    Args:
        first: outputs of a micro-batch.
        second: outputs of one that has the same row at the same place.
        row: its place.
        rows: of both micro-batches; tensors with another first axis are not looked at.
        floor: relative difference that is rounding.
    """
    for (_, a), (_, b) in zip(tensors(first), tensors(second), strict=False):
        if a.dim() and a.shape == b.shape and len(a) == rows and a.is_floating_point():
            mine, other = a[row].double(), b[row].double()
            if float((mine - other).norm()) > floor * float(torch.maximum(mine.norm(), other.norm())):
                return True
    return False
