"""Parameters that a step leaves out. On one process they have no gradient; under FSDP they have zeros in its place.

Zeros are not absence: an optimizer decays what has a gradient of zero, and moves it by what it remembers.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.config.schema.run import Layout
from unisono.engines.torch.numerics.gradients import local, watching


def alive(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device) -> Tensor:
    """For every parameter 1 if this rank's part of its gradient has an element that is not zero, else 0."""
    parts = [None if p.grad is None else local(p.grad) for p in parameters]
    flags = [torch.zeros((), device=device) if p is None or not p.numel() else p.any() for p in parts]
    return torch.stack([flag.to(dtype) for flag in flags])


@contextmanager
def forgetting(step: nn.Module, layout: Layout, device: torch.device) -> Iterator[None]:
    """Take away the zeros that FSDP gives to parameters which no process used, so that no optimizer decays them."""
    if layout.strategy not in ("fsdp", "hsdp") or not layout.find_unused_parameters:
        yield
        return
    used: set[str] = set()
    with watching(step, lambda name, _: used.add(name)):
        yield
    forget(step, used, device)


def forget(step: nn.Module, used: Container[str], device: torch.device) -> list[str]:
    """Take away the gradients of trainable parameters that no rank used, and return their names; collective.

    Args:
        step: the module whose parameters they are.
        used: names that this rank used.
        device: of this process.
    """
    flags = torch.tensor([name in used for name, _ in step.named_parameters()], dtype=torch.uint8).to(device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    left_out = []
    for (name, parameter), flag in zip(step.named_parameters(), flags.tolist(), strict=True):
        if not flag and parameter.requires_grad:
            parameter.grad = None
            left_out.append(name)
    return left_out
