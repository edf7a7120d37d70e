"""State of an optimizer that is not on every rank: each keeps that of its own parameters, or a piece of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.distributed.tensor import DTensor

from unisono.engines.torch.guards import replicas
from unisono.engines.torch.state import sharded_tensors
from unisono.proof.recording.trace import Array, read_tensors, write_tensors
from unisono.runtime.communication.communicator import Communicator


def find_pieces(group: Communicator, state: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> set[str]:
    """The state that is a piece of its parameter along the first axis, where other ranks have the rest; collective.

    The pieces of all ranks are as long as the parameter. What every rank holds alike is no piece, however short it is:
    an optimizer of low rank keeps less than a parameter has.
    """
    owners = {name: parameters.get(name.removeprefix("optimizer/").rpartition("/")[0]) for name in state}
    shorter = {
        name: owner
        for name, owner in owners.items()
        if owner is not None and not isinstance(state[name], DTensor) and state[name].dim() == owner.dim()
        if owner.dim() and state[name].shape[1:] == owner.shape[1:] and len(state[name]) < len(owner)
    }
    mine = {name: [len(state[name]), replicas.digest(state[name])] for name in shorter}
    everyone = group.gather(mine, "lengths of the optimizer's state")
    held = {name: [rank[name] for rank in everyone if name in rank] for name in shorter}
    return {
        name
        for name, each in held.items()
        if sum(length for length, _ in each) == len(shorter[name])
        if len({digest for _, digest in each}) > 1 or not state[name].any()
    }


def gather_owned(
    group: Communicator, rank: int, folder: Path, step: int, state: Mapping[str, Tensor], pieces: set[str]
) -> dict[str, Array]:
    """The state that the first rank does not have, or has a piece of, as it is together; collective.

    The arrays go through files in the folder of the trace, not through `group`.
    """
    plain = {name: value for name, value in state.items() if not isinstance(value, DTensor)}
    everyone = group.gather({name: name in pieces for name in plain}, "the names of the optimizer's state")
    holders = {name: [r for r, held in enumerate(everyone) if name in held] for held in everyone for name in held}
    wanted = {name: ranks if everyone[ranks[0]][name] else ranks[:1] for name, ranks in holders.items()}
    wanted = {name: ranks for name, ranks in wanted.items() if ranks != [0]}
    if not wanted:
        return {}
    mine = {n: sharded_tensors.gather_array(v, keep=True) for n, v in plain.items() if rank in wanted.get(n, ())}
    write_tensors(folder, f"state of rank {rank}", step, {n: array for n, array in mine.items() if array is not None})
    group.barrier("the optimizer's state of every rank")
    files = [read_tensors(folder, f"state of rank {number}", step) for number in range(len(everyone))]
    return {name: np.concatenate([files[r][name] for r in ranks], axis=0) for name, ranks in wanted.items()}
