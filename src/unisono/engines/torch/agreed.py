"""What a step has to know of the whole global batch, or of all processes, before any of them computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.data.loader import MicroBatch
from unisono.errors import KernelError
from unisono.place import Group
from unisono.task import Task


def kernels(task: Task, group: Group, device: str, precision: str) -> dict[str, str]:
    """The kernels that the task chooses, the same on every process; collective.

    Raises:
        KernelError: on every process, if one of them cannot have what was asked for, or chooses otherwise.
    """
    mine, why = {}, ""
    try:
        mine = task.kernels(device, precision)
    except KernelError as error:
        why = str(error)
    everyone = group.gather([mine, why], "the kernels of all ranks")
    for rank, (chosen, refused) in enumerate(everyone):
        if refused:
            raise KernelError(refused if all(told for _, told in everyone) else f"rank {rank}: {refused}")
        if chosen != everyone[0][0]:
            raise KernelError(
                f"rank 0 would compute with {everyone[0][0]} and rank {rank} with {chosen}; install the same packages "
                "on all hosts, or name the kernels"
            )
    return mine


@torch.no_grad()
def totals(
    batches: Sequence[MicroBatch],
    part: Callable[[MicroBatch], Mapping[str, Tensor]],
    world_size: int,
    device: torch.device,
    wide: torch.dtype,
) -> dict[str, Tensor]:
    """What `Task.totals` comes to over all micro-batches of all ranks, idle ones left out; collective.

    Args:
        batches: this rank's.
        part: the forward pass of one micro-batch.
        world_size: number of ranks.
        device: where they are added up.
        wide: dtype in which they are; whole numbers are exact in it, so no layout changes them.
    """
    added: dict[str, Tensor] = {}
    for micro in batches:
        for name, value in sorted(part(micro).items()):
            mine = torch.zeros_like(value, dtype=wide) if micro.idle else value.detach().to(device, wide)
            added[name] = added[name] + mine if name in added else mine
    if world_size > 1 and added:
        vector = torch.cat([value.reshape(-1) for value in added.values()])
        dist.all_reduce(vector)
        parts = vector.split([value.numel() for value in added.values()])
        added = {name: part.reshape(added[name].shape) for name, part in zip(added, parts, strict=True)}
    return added
