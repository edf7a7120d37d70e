"""The group in which the processes of a script are recorded together."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from unisono.engines.torch.parallel.process_group import TorchCommunicator
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.runtime.fault_names import FaultName

if TYPE_CHECKING:
    from unisono.proof.scripts.script_recorder import World


class TrainsAloneError(UnisonoError):
    """A process makes an update, and has not joined the others."""

    exit_code = 1
    fault = FaultName.TRAINS_ALONE


def has_joined(world: World) -> bool:
    """Whether the script has joined its processes; a group of fewer is not joined either, unless it is of several."""
    return world.size == 1 or (dist.is_initialized() and dist.get_world_size() > 1)


def build_group(world: World) -> Communicator:
    """All processes, over gloo, whatever the script's own backend.

    Raises:
        ConfigError: if the script has not joined its processes yet, or has joined others.
    """
    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != world.size:
        raise ConfigError(
            f"the script was started on {world.size} processes, but the recorder finds a group of {joined}: each "
            "trains alone. Call torch.distributed.init_process_group(), or make an Accelerator or a Fabric of all "
            "processes, before the first forward pass"
        )
    if world.size == 1:
        return SingleProcess()
    place = ProcessInfo(world.rank, world.size, world.local_rank, world.size, "unisono")
    channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
    return TorchCommunicator(place, world.timeout, channel)
