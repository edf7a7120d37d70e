"""Whether the gradient of an update has one in it that an update before was already made of."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.optim.sharded import local
from unisono.proof.recording.local_gradients import dense


class LeftGradients:
    """Watches, parameter by parameter, what a backward pass finds there after an update of its optimizer.

    What is left is no fault until an update is made of it: a discriminator keeps its gradients, and is given those of
    its generator's loss, until they are cleared before its own.

    Args:
        parameters: to watch. Those that `fully_shard` has cut into pieces are left out: their hooks see nothing.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._used: set[int] = set()  # whose gradient made an update, and was not seen cleared since
        self._added: set[int] = set()  # of those, the ones that a backward pass has added to
        self._reached: set[int] = set()  # that a backward pass has reached since the update
        self._left: dict[int, bool] = {}  # whether a gradient is there to which one may be added
        self.add(parameters)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Watch these as well."""
        for parameter in parameters:
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_hook(partial(self._before_accumulation, parameter))
                parameter.register_post_accumulate_grad_hook(self._after_accumulation)

    def close_update(self, own: set[int]) -> bool | None:
        """Called with the parameters of an optimizer, by `id`, whose gradients are those of an update.

        Returns:
            Whether they are of this update alone; None if no backward pass was seen to reach one of them.
        """
        clean = not own & self._added if own & self._reached else None
        self._reached -= own
        self._added -= own
        self._used |= own
        return clean

    def _before_accumulation(self, parameter: Tensor, gradient: Tensor) -> None:
        key, before = id(parameter), parameter.grad
        self._left[key] = key in self._used and before is not None and bool(dense(local(before)).any())

    def _after_accumulation(self, parameter: Tensor) -> None:
        """Called where a gradient was added or set, which `torch.autograd.grad` does not do."""
        key = id(parameter)
        self._reached.add(key)
        if self._left.pop(key, False):
            self._added.add(key)
        else:
            self._used.discard(key)
            self._added.discard(key)
