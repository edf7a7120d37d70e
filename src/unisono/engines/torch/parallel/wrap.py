"""One module, wrapped in the way of the layout: activation checkpointing, then compile, then DDP or FSDP2.

The wrapped module's forward is the task's `outputs` and, unless the loss crosses samples, `loss`, so nothing can go
round the wrapper. Each wrapper's own scaling of gradients is made explicit here, and nowhere else.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.config.schema.run import Layout
from unisono.engines.torch.guards import oom
from unisono.engines.torch.parallel import data_parallel
from unisono.engines.torch.parallel.activation_checkpointing import replayed
from unisono.protocols import cross_sample, totals
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, Loss, Task

Wrapped = nn.Module
KNOWS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13

# torch 2.13 renamed the switch; buffers are not broadcast before each forward pass.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: Any = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class Step(nn.Module):
    """The forward of one micro-batch: from its arrays to one scaled scalar, and the sums to report."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task = task

    def forward(self, batch: Batch | None, context: Context | None, scales: Mapping[str, Tensor] | None) -> Any:
        """The part of the global loss that these rows make up, times the wrapper's factor, and the unscaled sums.

        Without scales, what these rows contribute to the task's totals. Of a task whose loss crosses samples, always
        its outputs. Without a batch, a zero that depends on all parameters: of a process that has run out of memory.
        """
        if batch is None or context is None:
            return oom.zero([parameter for parameter in self.parameters() if parameter.requires_grad])
        outputs = self.task.outputs(self.model, batch, context)
        if cross_sample(self.task) is not None:
            return outputs
        if scales is None:
            return totals(self.task, outputs, batch, context)
        return scaled(self.task, outputs, batch, context, scales)


def scaled(
    task: Task, outputs: Any, batch: Batch, context: Context, scales: Mapping[str, Tensor]
) -> tuple[Tensor, Loss]:
    """A task's loss as one scaled scalar, and as the unscaled sums to report.

    Raises:
        ConfigError: for terms that are not those that were counted, and for what is no scalar.
    """
    name = type(task).__name__
    loss = task.loss(outputs, batch, context)
    if not loss.sums:
        raise ConfigError(f"{name}: loss() returned no term, so there is nothing to train on")
    if not (set(loss.sums) == set(scales) if context.training else set(loss.sums) <= set(scales)):
        raise ConfigError(
            f"{name}: loss() returned the terms {sorted(loss.sums)}, but counts() counted {sorted(scales)}; every term "
            "needs its count"
        )
    total = sum(loss.weights.get(term, 1.0) * (value * scales[term]) for term, value in loss.sums.items())
    assert isinstance(total, Tensor)
    if total.dim():
        shapes = {term: tuple(value.shape) for term, value in loss.sums.items() if value.dim()}
        raise ConfigError(f"{name}: loss() must return sums over the rows, scalars; got shapes {shapes}")
    return total, loss


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of its outermost `ModuleList`s (or `Sequential`s) that share a class.

    They are what is checkpointed, compiled and sharded one by one. An empty list means the model is one piece.
    """
    members = list(model.children())
    alike = len(members) > 1 and len({type(member) for member in members}) == 1
    if isinstance(model, (nn.ModuleList, nn.Sequential)) and alike and next(members[0].children(), None) is not None:
        return members
    return [block for member in members for block in blocks(member)]


def prepare(model: nn.Module, layout: Layout, precision: str) -> None:
    """Activation checkpointing and compilation, in place, block by block."""
    parts = blocks(model) or [model]
    every = layout.activation_checkpointing
    for number, part in enumerate(parts):
        recomputed = every > 0 and number % every == 0
        if layout.compile and not recomputed:
            part.compile()
        if recomputed:
            part.forward = replayed(part, torch.compile(part.forward) if layout.compile else part.forward, precision)


def wrap(step: Step, layout: Layout, precision: str, device: torch.device, world_size: int, timeout: float) -> Wrapped:
    """The step module in the wrapper of the strategy, on the device."""
    if layout.strategy in ("fsdp", "hsdp"):  # moves one unit at a time: the whole model need not fit
        _shard(step, layout, precision, device, world_size, timeout)
        return step
    step.to(device)
    if layout.strategy == "ddp":
        return DistributedDataParallel(
            step,
            bucket_cap_mb=layout.bucket_mb or bucket_mb(width(step), world_size),
            gradient_as_bucket_view=True,
            find_unused_parameters=layout.find_unused_parameters,
            **_NO_BUFFERS,
        )
    if layout.strategy == "dp" and len(devices := data_parallel.devices_of(device)) > 1:
        crosses = cross_sample(step.task) is not None
        return data_parallel.DataParallel(step, crosses, precision, device, devices)
    return step


def _shard(step: Step, layout: Layout, precision: str, device: torch.device, world_size: int, timeout: float) -> None:
    for name, parameter in step.model.named_parameters():
        if not parameter.dim() or parameter.is_complex():
            what, remedy = (
                ("is complex", "a last axis of real and imaginary parts")
                if parameter.is_complex()
                else ("has no axis", "the shape (1,)")
            )
            raise ConfigError(
                f"layout.strategy={layout.strategy}: the parameter '{name}' {what}, which torch's FSDP cannot shard; "
                f"use layout.strategy=ddp, or give it {remedy}"
            )
    shards = layout.shards or world_size
    if layout.strategy == "hsdp":
        mesh = init_device_mesh(device.type, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():  # they begin with torch's own deadline
            _set_pg_timeout(timedelta(seconds=timeout), group)
    else:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    # Inputs are not cast: a float label has to stay what it is, and autocast casts where arithmetic wants it.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False) if precision == "bf16" else full
    )
    # What a pass may leave out is no unit of its own: units are gathered in the order in which each process calls them,
    # and processes that call other experts would be given pieces of other experts.
    parts = [] if layout.find_unused_parameters else blocks(step.model)
    norms = [module for block in parts for module in block.modules() if _has_vectors_only(module)]
    if precision == "bf16" and norms:
        fully_shard(norms, mesh=mesh, mp_policy=full, reshard_after_forward=False)
    for block in parts:
        fully_shard(block, mesh=mesh, mp_policy=low)
    fully_shard(step, mesh=mesh, mp_policy=full)
    for module in step.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a factor is a PREMUL_SUM, which gloo does not have
            if KNOWS_UNUSED:  # zeros for what a process did not use; else it would reduce other parameters than others
                module.set_reduce_scatter_unused_params(True)


def refuse_left_out(wrapped: Wrapped, where: str) -> None:
    """Refuse a pass that left out a parameter which DDP counts on: what it then leaves in `.grad` is not reduced.

    Args:
        wrapped: by whatever wrapper.
        where: rank and step, for the error.

    Raises:
        ConfigError: naming parameters without a gradient.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        return
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        named = unwrapped(wrapped).model.named_parameters()
        left_out = [name for name, p in named if p.requires_grad and p.grad is None] or ["which ones, is not known"]
        raise ConfigError(
            f"{where}: a pass left parameters out that the first pass used ({', '.join(left_out[:4])}), so DDP did not "
            "reduce all gradients. Set layout.find_unused_parameters=true.",
            fault="Parameters are left out",
        ) from error


def reduces(wrapped: Wrapped) -> bool:
    """Whether the pass that is being made has DDP reduce its gradients in the backward pass."""
    return isinstance(wrapped, DistributedDataParallel) and wrapped.require_backward_grad_sync


def _has_vectors_only(module: nn.Module) -> bool:
    """Whether a module's own parameters are vectors, as a norm's are: what autocast leaves in fp32.

    Under bf16 FSDP gathers the matrices of blocks in bf16, which is how autocast multiplies with them anyway; all else
    is gathered in fp32, so that a run in bf16 computes the same on every strategy.
    """
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() <= 1 for parameter in own)


def replicas(layout: Layout, world_size: int) -> list[range]:
    """Ranks that hold the same parameters."""
    if layout.strategy == "hsdp":
        assert layout.shards is not None
        return [range(first, world_size, layout.shards) for first in range(layout.shards)]
    return [range(world_size)] if layout.strategy == "ddp" else []


def gradient_factor(layout: Layout, world_size: int) -> float:
    """What a loss must be multiplied with so that the wrapper's reduced gradient is the sum over processes.

    DDP divides by the number of processes and has no setter for it; FSDP2 is told to divide by one; the ordered
    reduction adds without dividing.
    """
    return float(world_size) if layout.strategy == "ddp" and layout.reduction == "fast" else 1.0


@contextmanager
def synchronising(wrapped: Wrapped, layout: Layout, last: bool) -> Iterator[None]:
    """The context of one pass, forward and backward: whether its gradients are reduced over processes now."""
    if isinstance(wrapped, DistributedDataParallel) and not last:
        with wrapped.no_sync():
            yield
        return
    if isinstance(wrapped, FSDPModule):
        wrapped.set_is_last_backward(last)
        wrapped.set_requires_gradient_sync(last or not layout.defer_reduction)
        if layout.strategy == "hsdp":
            wrapped.set_requires_all_reduce(last)
    yield


def shard_again(wrapped: Wrapped) -> None:
    """Put FSDP's parameters back into shards after a forward pass that no backward pass follows.

    The backward pass does it otherwise; without it the root's parameters would stay gathered, and what a checkpoint or
    a guard then finds under their names is not what is trained.
    """
    for module in wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def width(model: nn.Module) -> int:
    """The width of a model, in features: the smaller side that most of its matrices' elements share."""
    sizes: Counter[int] = Counter()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            sizes[min(parameter.shape)] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else 1


def bucket_mb(width: int, world_size: int) -> float:
    """Bucket size of DDP in MB: larger for wider models and larger worlds, between 10 and 250.

    A transformer block has about 12·width² parameters; 25 MB is torch's default for models of moderate width.
    """
    size = 25.0 * (1.0 + 12.0 * width**2 / 1e8)
    return min(250.0, max(10.0, size * 1.5 if world_size > 32 else size))


def unwrapped(wrapped: Wrapped) -> Step:
    """The step module inside a wrapper."""
    inner: Any = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    assert isinstance(inner, Step)
    return inner
