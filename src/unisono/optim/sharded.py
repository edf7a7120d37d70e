"""Tensors of which a process holds a part only, as optimizers see them under FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lies on this process: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered if it is sharded, which is collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(target: Tensor, value: Tensor) -> None:
    """Copy this process's part of a whole tensor into its place; every process has the same value already."""
    if isinstance(target, DTensor):
        value = local(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
    if value is not target:
        local(target).copy_(value)
