"""FSDP's collectives for one unit of a model: logged under the unit's name, then passed to the backend.

Other collectives are logged in the dispatcher, which calls Python for each of them; that would be slow for FSDP2, which
runs three for every unit. In FSDP's own hooks for custom communication, logging costs next to nothing. The unit's name
also identifies more than a line of code could: if ranks called two equal units in different orders, each rank would get
pieces of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

LogCall = Callable[[str, dist.ProcessGroup, Tensor, str, int], None]  # see `CollectiveHooks.note`


def log_units(model: nn.Module, note: LogCall) -> None:
    """Have `note` called before everything that FSDP sends for the units of a model, the outermost module."""
    for path, module in reversed(list(model.named_modules())):  # modules that share a unit: the first names it
        if isinstance(module, FSDPModule):
            site = f"FSDP unit {path.removeprefix('model.')}" if path else "the outermost FSDP unit"
            module.set_custom_all_gather(LoggedAllGather(site, note))
            module.set_custom_reduce_scatter(LoggedReduceScatter(site, note))


class _Unit:
    def __init__(self, site: str, note: LogCall) -> None:
        self._site, self._note = site, note

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class LoggedAllGather(_Unit, AllGather):
    """Gathers the parameters of a unit, and logs it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """See torch's `all_gather_into_tensor`."""
        self._note("_allgather_base_", group, output_tensor, self._site, -1)
        options: Any = AllgatherOptions()
        options.asyncOp = async_op
        backend: Any = group._get_backend(output_tensor.device)
        return _finish_work(backend._allgather_base(output_tensor, input_tensor, options), async_op)


class LoggedReduceScatter(_Unit, ReduceScatter):
    """Reduces the gradients of a unit, and logs it."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """See torch's `reduce_scatter_tensor`."""
        options: Any = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        self._note("_reduce_scatter_base_", group, input_tensor, self._site, options.reduceOp.op.value)
        backend: Any = group._get_backend(input_tensor.device)
        return _finish_work(backend._reduce_scatter_base(output_tensor, input_tensor, options), async_op)


def _finish_work(work: dist.Work, async_op: bool) -> dist.Work | None:
    """What torch's own functions return, after the wait unless the call is asynchronous."""
    if async_op:
        return work
    work.wait()
    return None
