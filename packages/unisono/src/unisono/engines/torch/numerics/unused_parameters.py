"""Parameters that a step does not use. On one process they have no gradient; under FSDP they have zeros instead.

Zero gradients are not the same as none: an optimizer still applies weight decay and momentum to such a parameter. So
the zero gradients of parameters that no process used are removed before the update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.engines.torch.numerics.gradients import local_gradients
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.optim.sharded import local

log = logging.getLogger(__name__)


class UnusedParameters:
    """The parameters that a step leaves out, under every strategy as on one process.

    With `parallel.finds_unused`, each FSDP step finds out which they are. Otherwise a step in which all ranks' shards
    of a gradient are zero repeats its passes to see whether the parameter was used; after the second such step, every
    step checks. (Once proves nothing: before its first update, half of an adapter's gradients are zero.)
    """

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self._parallel, self._device = parallel, device
        self._searched_before = False

    @contextmanager
    def track_passes(self) -> Iterator[None]:
        """The context of a step's passes."""
        if not (self._parallel.is_sharded and self._parallel.finds_unused):
            yield
            return
        used: set[str] = set()
        with local_gradients(self._parallel.module, lambda name, _: used.add(name)):
            yield
        self.drop_unused(used)

    def flags(self) -> Tensor | None:
        """For every parameter 1 if this rank's shard of its gradient has an element that is not zero, else 0."""
        if not self._parallel.is_sharded or self._parallel.finds_unused:
            return None
        parts = [None if p.grad is None else local(p.grad) for p in self._parallel.trainable]
        none = torch.zeros((), device=self._device)
        flags = [none if part is None or not part.numel() else part.any() for part in parts]
        return torch.stack([flag.to(none.dtype) for flag in flags])

    def drop_unused_zeros(self, flags: Sequence[float], used: Callable[[], Container[str]], step: int) -> None:
        """Remove gradients that are zero because no rank used the parameter; collective.

        Args:
            flags: over all ranks.
            used: repeats the passes, and returns the parameters that they use on this rank.
            step: updates made before.
        """
        if all(flags):
            return
        left_out = self.drop_unused(used())
        if left_out or self._searched_before:
            log.warning("step %d did not use all parameters; from now on every step checks which ones", step + 1)
            self._parallel.find_unused()
        self._searched_before = True

    def drop_unused(self, used: Container[str]) -> list[str]:
        """Remove the gradients of trainable parameters that no rank used, and return their names; collective.

        Args:
            used: names that this rank used.
        """
        named = list(self._parallel.module.named_parameters())
        flags = torch.tensor([name in used for name, _ in named], dtype=torch.uint8).to(self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        left_out = []
        for (name, parameter), flag in zip(named, flags.tolist(), strict=True):
            if not flag and parameter.requires_grad:
                parameter.grad = None
                left_out.append(name)
        return left_out
