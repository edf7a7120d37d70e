"""The group in which the processes of a script are recorded together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from unisono.engines.torch.guards import replicas
from unisono.engines.torch.parallel.process_group import TorchCommunicator
from unisono.engines.torch.state import sharded_tensors
from unisono.runtime.communication.communicator import Communicator, ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError, UnisonoError
from unisono.runtime.fault_names import FaultName


class TrainsAloneError(UnisonoError):
    """A process makes an update, and has not joined the others."""

    exit_code = 1
    fault = FaultName.TRAINS_ALONE


def has_joined(size: int) -> bool:
    """Whether the script has joined its processes; a group of fewer is not joined either, unless it is of several."""
    return size == 1 or (dist.is_initialized() and dist.get_world_size() > 1)


def build_group(place: ProcessInfo, timeout: float) -> Communicator:
    """All processes, over gloo, whatever the script's own backend.

    Raises:
        ConfigError: if the script has not joined its processes yet, or has joined others.
    """
    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != place.world_size:
        raise ConfigError(
            f"the script was started on {place.world_size} processes, but the recorder finds a group of {joined}: "
            "each trains alone. Call torch.distributed.init_process_group(), or make an Accelerator or a Fabric of "
            "all processes, before the first forward pass"
        )
    if place.world_size == 1:
        return SingleProcess()
    channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    return TorchCommunicator(place, timeout, channel)


def find_differing(group: Communicator, copies: Mapping[str, Tensor]) -> list[str]:
    """What some ranks hold the same piece of with other bits, in sentences; collective."""
    mine = {name: [*sharded_tensors.local_piece(value), replicas.digest(value)] for name, value in copies.items()}
    everyone = group.gather(mine, "the digests of replicas")
    result = []
    for name in dict.fromkeys(name for rank in everyone for name in rank):
        pieces: dict[str, dict[int | None, list[int]]] = {}  # ranks by what they hold of each piece
        for rank, held in enumerate(everyone):
            shape, offset, digest = held.get(name, [None, None, None])
            pieces.setdefault(f"{shape} at {offset}", {}).setdefault(digest, []).append(rank)
        if differing := next((sides for sides in pieces.values() if len(sides) > 1), None):
            result.append(f"'{name}' is not the same on ranks {' and '.join(map(str, differing.values()))}")
    return result
