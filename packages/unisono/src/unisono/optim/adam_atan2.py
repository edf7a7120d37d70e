"""Adam with an arctangent in place of the division: θ ← θ − lr·a·atan2(m̂, b·√v̂).

Everett et al., "Scaling Exponents Across Parameterizations and Optimizers" (arXiv 2407.05872): there is no epsilon that
could be too large for small gradients, and the update is invariant to the scale of the gradients.
It is elementwise, so shards are updated in place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from unisono.optim.sharded import local


class AdamAtan2(torch.optim.Optimizer):
    """Adam-atan2 with decoupled weight decay.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        a: factor of the arctangent.
        b: factor of the second moment's root.
        weight_decay: decoupled, multiplied by `lr` and applied before the step.
        foreach: use torch's foreach kernels, for all parameters of a group at once.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        a: float = 1.27,
        b: float = 1.0,
        weight_decay: float = 0.01,
        foreach: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "a": a, "b": b, "weight_decay": weight_decay, "foreach": foreach}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        assert closure is None, "the engine runs the backward pass"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] += 1
            for some in [parameters] if group["foreach"] else [[p] for p in parameters]:
                self._update(some, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        if not parameters:  # torch's foreach functions refuse an empty list
            return
        (beta1, beta2), lr = group["betas"], group["lr"]
        states = [self.state[parameter] for parameter in parameters]
        gradients, firsts, seconds, values = (
            [_real(local(tensor)) for tensor in tensors]
            for tensors in (
                [parameter.grad for parameter in parameters if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                parameters,
            )
        )
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        steps = [float(state["step"]) for state in states]
        updates = torch._foreach_div(firsts, [1 - beta1**step for step in steps])
        roots = torch._foreach_div(seconds, [(1 - beta2**step) / group["b"] ** 2 for step in steps])
        torch._foreach_sqrt_(roots)
        for update, root in zip(updates, roots, strict=True):  # there is no torch._foreach_atan2
            torch.atan2(update, root, out=update)
        torch._foreach_mul_(values, 1 - lr * group["weight_decay"])
        torch._foreach_add_(values, updates, alpha=-lr * group["a"])


def _real(tensor: Tensor) -> Tensor:
    """A view of complex numbers as pairs of real ones, as in torch's own optimizers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
