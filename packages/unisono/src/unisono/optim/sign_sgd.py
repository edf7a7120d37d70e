"""Row-wise sign SGD, for large embeddings with few used rows per batch: θ ← (1 - lr·decay)·θ - lr·sign(gradient).

Only rows with a gradient are updated and decayed (as in sapientinc/HRM: for rarely seen rows, Adam behaves like this).
The gradient is already the sum over the global batch, so no rows need to be gathered and no row numbers compared. A row
without a gradient is one whose gradient is exactly zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from unisono.optim.sharded import local


class RowSignSgd(torch.optim.Optimizer):
    """Sign SGD with decoupled weight decay, on rows with a gradient.

    Args:
        params: parameters or groups of them; the first axis is the row.
        lr: learning rate.
        weight_decay: decoupled, multiplied by `lr`; applied to the rows that are updated.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-4, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        assert closure is None, "the engine runs the backward pass"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                value, gradient = local(parameter), local(parameter.grad)
                axes = tuple(range(1, gradient.dim()))
                changes = (gradient != 0).any(axes, keepdim=True) if axes else gradient != 0
                step = gradient.sign() + group["weight_decay"] * value
                value.sub_(torch.where(changes, step, 0.0), alpha=group["lr"])
