"""What a step has to know of the whole global batch, or of all processes, before any of them computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.data.loader import MicroBatch
from unisono.engines.torch.exhausted import TOTALS, Owed
from unisono.engines.torch.sums import Names, over_ranks
from unisono.errors import ConfigError, KernelError
from unisono.place import Group
from unisono.task import Task

OUTPUTS = "outputs"


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


def at_fault(group: Group, own: list[list[Any]]) -> str:
    """What of which micro-batches is not finite, in words; collective.

    Args:
        group: all processes.
        own: rank, number, source rows, and what is wrong, of each such micro-batch of this process. Where it is
            `OUTPUTS`, all that was computed across samples followed from them.
    """
    everyone = [entry for entries in group.gather(own, "where the step is not finite") for entry in entries]
    everyone = [entry for entry in everyone if entry[3] == [OUTPUTS]] or everyone
    where = "; ".join(
        f"rank {rank}, micro-batch {number}, source rows {rows}: {', '.join(what)}"
        for rank, number, rows, what in everyone
    )
    where = where or "No micro-batch alone is at fault: the sum overflows"
    return f"and the parameters were left as they were. {where}"
