"""A model's and an optimizer's tensors as pieces of named arrays, for checkpoints that any layout can read."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unisono.engines.state import ArrayShard, StateReader, check_arrays
from unisono.engines.torch.state import saved_tensors
from unisono.optim.sharded import gather_full, local
from unisono.runtime.communication.communicator import ProcessInfo, usable_cores
from unisono.runtime.errors import CheckpointError

_MAX_PARALLEL_READS = 4  # tensors read at a time; each needs host memory if its target is on a device


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and persistent buffers by checkpoint name; tied ones once, under their first name."""
    result: dict[str, Tensor] = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {
        name: value for name, value in model.state_dict().items() if name not in aliases and isinstance(value, Tensor)
    }
    return result | {f"model/{name}": value for name, value in buffers.items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's tensors by their names in a checkpoint."""
    result: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                result[f"optimizer/{name}/{entry}"] = value
    return result


def shards(tensors: Mapping[str, Tensor], process: ProcessInfo) -> list[ArrayShard]:
    """The pieces this process saves: one of several copies, with the work divided among the ranks."""
    result = []
    for number, (name, tensor) in enumerate(tensors.items()):
        finite = isinstance(tensor, nn.Parameter) or not name.startswith("model/")  # a mask may be full of -inf
        tensor = tensor.detach()
        offset = local_piece(tensor)[1]
        if _saves_piece(tensor, number, process) and (local(tensor).numel() or not tensor.numel()):
            result.append(ArrayShard(name, tuple(tensor.shape), offset, local(tensor), finite))
    return result


def load(tensors: Mapping[str, Tensor], reader: StateReader, kinds: tuple[str, ...] = ("model/", "optimizer/")) -> None:
    """Read saved values into tensors, each process its own pieces.

    Args:
        tensors: by their names in the checkpoint.
        reader: of the checkpoint.
        kinds: prefixes of saved names that must be in `tensors`.

    Raises:
        CheckpointError: if an array is missing, unexpected, or has another shape.
    """
    saved = {name: shape for name, shape in reader.shapes.items() if name.startswith(kinds)}
    check_arrays({name: tuple(tensor.shape) for name, tensor in tensors.items()}, saved)

    def fill_one(name: str) -> None:
        with torch.no_grad():  # the grad mode is per thread
            saved_tensors.read_into(reader, name, local_piece(tensors[name])[1], local(tensors[name]))

    with ThreadPoolExecutor(min(_MAX_PARALLEL_READS, usable_cores())) as threads:
        for _ in threads.map(fill_one, tensors):
            pass


def init_optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module, reader: StateReader) -> None:
    """Create the optimizer's state tensors that a checkpoint has values for, laid out like their parameters.

    Tensors with a parameter's shape are zero until `load` fills them.
    """
    parameters = dict(model.named_parameters())
    for full, shape in reader.shapes.items():
        if not full.startswith("optimizer/"):
            continue
        name, _, entry = full.removeprefix("optimizer/").rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"the checkpoint has optimizer state for '{name}', which the model does not have")
        parameter = parameters[name]
        group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
        if group is None:
            raise CheckpointError(f"the checkpoint has optimizer state for '{name}', which is not trained here")
        on_device = group.get("fused") or group.get("capturable")
        if shape == tuple(parameter.shape) and entry != "step":
            value = optimizer.state[parameter].get(entry)
            if value is None or value.shape != parameter.shape or value.dtype != parameter.dtype:
                value = torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)
        else:  # replicated; a step counter stays on the CPU unless the optimizer's kernel reads it
            device = local(parameter).device if shape or on_device else "cpu"
            value = saved_tensors.read_tensor(reader, full, (0,) * len(shape), shape).to(device)
            if entry == "step" and group.get("fused"):  # fp64 runs saved it as float64, which a fused kernel misreads
                value = value.to(torch.float32)
        optimizer.state[parameter][entry] = value


def local_piece(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and offset of this process's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim()
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def gather_array(tensor: Tensor, keep: bool) -> NDArray[Any] | None:
    """The whole tensor, gathered if it is sharded, as an array of at least one dimension.

    Gathering is collective; a process that does not `keep` the result participates and gets None. Half precision is
    converted to fp32, since NumPy has no bf16.
    """
    tensor = gather_full(tensor.detach())
    if not keep:
        return None
    tensor = tensor.cpu()
    result = (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()
    return np.atleast_1d(result)


def _saves_piece(tensor: Tensor, number: int, process: ProcessInfo) -> bool:
    """Whether this process saves its piece, rather than another process with the same piece."""
    if not isinstance(tensor, DTensor):
        return number % process.world_size == process.rank
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        assert isinstance(placement, Replicate | Sharded)
        if isinstance(placement, Replicate) and coordinate[axis] != number % tensor.device_mesh.size(axis):
            return False
    return True
