"""What a step has to know of the whole global batch, or of all processes, before any of them computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from unisono.data.loading.loader import MicroBatch
from unisono.engines.torch.guards.oom import TOTALS, Owed
from unisono.engines.torch.numerics.metric_reduction import Names, over_ranks
from unisono.runtime.communicator import Group
from unisono.runtime.errors import ConfigError, KernelError
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
    owed: Owed,
) -> dict[str, Tensor]:
    """What `Task.totals` comes to over all micro-batches of all ranks, idle ones left out; collective.

    Args:
        batches: this rank's.
        part: the forward pass of one micro-batch.
        world_size: number of ranks.
        device: where they are added up.
        wide: dtype in which they are; whole numbers are exact in it, so no layout changes them.
        owed: what this process still has to exchange.
    """
    added: dict[str, Tensor] = {}
    for micro in batches:
        for name, value in sorted(part(micro).items()):
            mine = torch.zeros_like(value, dtype=wide) if micro.idle else value.detach().to(device, wide)
            added[name] = added[name] + mine if name in added else mine
    if world_size > 1 and added:
        with owed.exchange(TOTALS):
            added = over_ranks(added)
    return added


def names(group: Group, own: Names | None) -> None:
    """See that all processes report the same terms, metrics and work in an evaluation; collective.

    Raises:
        ConfigError: with the names of each.
    """
    told = group.gather(own, "the names of what is evaluated")
    if any(theirs != told[0] for theirs in told):
        raise ConfigError(f"in evaluation ranks report other names: {told}. They may not depend on the rows.")


def left_out(group: Group, names: Names | None, own: Sequence[str], random: bool) -> tuple[bool, list[str]]:
    """Whether the first pass of any process drew, and parameters that some left out of it; collective.

    Args:
        group: all processes.
        names: of terms, metrics and work.
        own: parameters that this process left out.
        random: whether it drew random numbers.

    Raises:
        ConfigError: for other names on another process.
    """
    everyone = group.gather([names, list(own), random], "the others to warm up")
    for rank, (others, _, _) in enumerate(everyone):
        if others != names:
            raise ConfigError(
                f"terms, metrics and work of rank {group.rank} and rank {rank} have other names: {names} and {others}. "
                "They may not depend on the rows."
            )
    return any(drew for _, _, drew in everyone), sorted({name for _, left, _ in everyone for name in left})
