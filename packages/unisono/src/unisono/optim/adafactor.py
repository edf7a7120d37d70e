"""torch's Adafactor, extended to sharded parameters.

Adafactor needs row and column means of whole matrices, and `torch.optim.Adafactor` does not support sharded parameters
(2.13: it updates in place what would have to be reduced first). So each parameter is gathered with its gradient,
updated by torch's own code as on one process, and scattered again. A step costs two gathers of every parameter, and
memory for one whole tensor at a time. The state is still small: `rows + columns` numbers per matrix, on every process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.optim.sharded import copy_local_part, gather_full


class ShardedAdafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` with bitwise equal results on shards and on whole tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; collective where parameters are sharded."""
        if not any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            return super().step(closure)  # type: ignore[no-untyped-call]
        assert closure is None, "the engine runs the backward pass"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return None

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        stand_in = nn.Parameter(gather_full(parameter.detach()))
        stand_in.grad = gather_full(parameter.grad)
        state = self.state[parameter]
        one = torch.optim.Adafactor([{**group, "params": [stand_in]}])
        one.state[stand_in] = {name: gather_full(value) for name, value in state.items()}
        one.step()
        copy_local_part(parameter, stand_in.detach())
        for name, value in one.state[stand_in].items():
            copy_local_part(state.setdefault(name, value), value)
