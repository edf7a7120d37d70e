"""Access to tensors that may be sharded over processes, as under FSDP2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor: all of it, unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather_full(tensor: Tensor) -> Tensor:
    """The whole tensor; collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_local_part(target: Tensor, value: Tensor) -> None:
    """Copy this process's part of a whole tensor into a shard; every process must have the same value."""
    if isinstance(target, DTensor):
        value = local(distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None))
    if value is not target:
        local(target).copy_(value)
