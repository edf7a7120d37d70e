"""One module, wrapped in the way of the layout: activation checkpointing, then compile, then DDP or FSDP2.

The wrapped module's forward is the task's `outputs` and, unless the loss crosses samples, `loss`, so nothing can bypass
the wrapper. Each wrapper's own scaling of gradients is switched off here, or made explicit by `gradient_factor`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.config.schema.layout import Layout
from unisono.engines import rules
from unisono.engines.torch.parallel import data_parallel
from unisono.engines.torch.parallel.activation_checkpointing import checkpoint_forward
from unisono.protocols import resolve_features
from unisono.runtime.errors import ConfigError
from unisono.task import Batch, Context, Task

SUPPORTS_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # since torch 2.13

# torch 2.13 renamed the switch; buffers are not broadcast before each forward pass.
_HAS_FORWARD_SYNC = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFER_BROADCAST: Any = {"forward_sync_buffers" if _HAS_FORWARD_SYNC else "broadcast_buffers": False}


class StepModule(nn.Module):
    """The forward of one micro-batch: from its arrays to one scaled scalar, and the sums to report.

    Attributes:
        recorded_outputs: what the task returned in passes with gradients; None where nobody wants to see it.
        reader: what a pass computes of the task's outputs in place of the loss; None for the loss.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.task, self.features = task, resolve_features(task)
        self.recorded_outputs: list[Any] | None = None
        self.reader: Callable[[Any, Batch], Any] | None = None

    def forward(self, batch: Batch, context: Context, scales: Mapping[str, Tensor] | None) -> Any:
        """The part of the global loss that these rows make up, times the wrapper's factor, and the unscaled sums.

        Without scales, these rows' part of the task's totals. Of a task whose loss crosses samples, always its outputs.
        """
        outputs = self.task.outputs(self.model, batch, context)
        if self.reader is not None:
            return self.reader(outputs, batch)
        if self.recorded_outputs is not None and torch.is_grad_enabled():
            self.recorded_outputs.append(outputs)
        if self.features.cross_sample is not None:
            return outputs
        if scales is None:
            return self.features.compute_totals(outputs, batch, context)
        return rules.scaled_loss(self.task, outputs, batch, context, scales)

    @contextmanager
    def record_outputs(self) -> Iterator[list[Any]]:
        """A context with the outputs of the passes with gradients in it."""
        before, self.recorded_outputs = self.recorded_outputs, []
        try:
            yield self.recorded_outputs
        finally:
            self.recorded_outputs = before

    def take_outputs(self) -> Any:
        """What the task returned in the last pass; None where nobody wants to see it, or devices made parts of it."""
        seen, self.recorded_outputs = self.recorded_outputs, None if self.recorded_outputs is None else []
        return seen[0] if seen is not None and len(seen) == 1 else None


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: members of its outermost `ModuleList`s (or `Sequential`s) that share a class.

    They are what is checkpointed, compiled and sharded one by one. An empty list means the model is one piece.
    """
    members = list(model.children())
    alike = len(members) > 1 and len({type(member) for member in members}) == 1
    if isinstance(model, (nn.ModuleList, nn.Sequential)) and alike and next(members[0].children(), None) is not None:
        return members
    return [block for member in members for block in find_blocks(member)]


def describe_blocks(model: nn.Module) -> str:
    """What is compiled of a model, e.g. "24 × LlamaDecoderLayer"."""
    own = (  # FSDP gives a module a class of its own
        next(kind for kind in type(part).__mro__ if not issubclass(kind, FSDPModule))
        for part in find_blocks(model) or [model]
    )
    kinds = Counter(kind.__name__ for kind in own)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in kinds.items())


def find_units(model: nn.Module) -> list[nn.Module]:
    """What FSDP gathers by itself: the blocks, and modules that ask for it by an attribute `fsdp_unit = True`.

    Every process has to call such a module equally often in a pass, so it is not one that a loop over data calls.
    """
    asking = [module for module in model.modules() if getattr(module, "fsdp_unit", False)]
    return list(dict.fromkeys([*find_blocks(model), *reversed(asking)]))  # inner ones first


def checkpoint_and_compile(model: nn.Module, layout: Layout, precision: str) -> None:
    """Activation checkpointing and compilation, in place, block by block."""
    parts = find_blocks(model) or [model]
    every = layout.activation_checkpointing
    for number, part in enumerate(parts):
        recomputed = every > 0 and number % every == 0
        if layout.compile and not recomputed:
            part.compile()
        if recomputed:
            part.forward = checkpoint_forward(
                part, torch.compile(part.forward) if layout.compile else part.forward, precision
            )


def wrap(
    step: StepModule,
    layout: Layout,
    precision: str,
    device: torch.device,
    world_size: int,
    timeout: float,
) -> nn.Module:
    """Wrap the step module as the strategy requires, on the device."""
    if layout.strategy in ("fsdp", "hsdp"):  # moves one unit at a time: the whole model need not fit
        # What a pass may leave out is no unit of its own: units are gathered in the order in which each process calls
        # them, and processes that call other experts would be given pieces of other experts.
        units = [] if layout.find_unused_parameters else find_units(step.model)
        _shard_module(step, units, layout, precision, device, world_size, timeout)
        return step
    if any(tensor.device.type != device.type for tensor in (*step.parameters(), *step.buffers())):
        step.to(device)  # which fake tensors refuse, also where there is nothing to move
    if layout.strategy == "ddp":
        return DistributedDataParallel(
            step,
            bucket_cap_mb=layout.bucket_mb or ddp_bucket_mb(model_width(step), world_size),
            gradient_as_bucket_view=True,
            find_unused_parameters=layout.find_unused_parameters,
            **_NO_BUFFER_BROADCAST,
        )
    if layout.strategy == "dp" and len(devices := data_parallel.device_indices(device)) > 1:
        crosses = step.features.cross_sample is not None
        return data_parallel.DataParallel(step, crosses, precision, device, devices)
    return step


def _shard_module(
    step: StepModule,
    units: list[nn.Module],
    layout: Layout,
    precision: str,
    device: torch.device,
    world_size: int,
    timeout: float,
) -> None:
    """Shard the module in place; `units` are gathered one by one, and the rest with the module."""
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
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"layout.strategy={layout.strategy}: the parameter '{name}' has a hook on its gradient, and "
                "torch's FSDP puts others in the place of all parameters, so the hook would never be called; use "
                "layout.strategy=ddp, or do in the model's forward pass, or in the optimizer, what it does"
            )
    shards = layout.shards or world_size
    if layout.strategy == "hsdp":
        mesh = init_device_mesh(device.type, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
        for group in mesh.get_all_groups():  # they begin with torch's own deadline
            _set_pg_timeout(timedelta(seconds=timeout), group)
    else:
        mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    # Pages can be pinned for a device alone; on a CPU the shards are in the host's memory anyway.
    place = CPUOffloadPolicy(pin_memory=device.type != "cpu") if layout.offload else OffloadPolicy()
    # Inputs are not cast: a float label has to stay what it is, and autocast casts where arithmetic wants it.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    low = full
    if precision == "bf16":
        low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if norms := [module for unit in units for module in unit.modules() if _has_vectors_only(module)]:
            fully_shard(norms, mesh=mesh, mp_policy=full, reshard_after_forward=False, offload_policy=place)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=low, offload_policy=place)
    fully_shard(step, mesh=mesh, mp_policy=full, offload_policy=place)
    for module in step.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a factor is a PREMUL_SUM, which gloo does not have
            if SUPPORTS_UNUSED:  # zeros for what a process left out; else it would reduce other parameters than others
                module.set_reduce_scatter_unused_params(True)


def _has_vectors_only(module: nn.Module) -> bool:
    """Whether a module's own parameters are vectors, as a norm's are: what autocast leaves in fp32.

    Under bf16 FSDP gathers the matrices of blocks in bf16, which is how autocast multiplies with them anyway; all else
    is gathered in fp32, so that a run in bf16 computes the same on every strategy.
    """
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.dim() <= 1 for parameter in own)


def replica_groups(layout: Layout, world_size: int) -> list[range]:
    """Groups of ranks that hold copies of the same parameters."""
    if layout.strategy == "hsdp":
        assert layout.shards is not None
        return [range(first, world_size, layout.shards) for first in range(layout.shards)]
    return [range(world_size)] if layout.strategy == "ddp" else []


def gradient_factor(layout: Layout, world_size: int) -> float:
    """What a loss must be multiplied by so that the wrapper's reduced gradient is the sum over processes.

    DDP divides by the number of processes and has no setter for it; FSDP2 is set to divide by one; the ordered
    reduction adds without dividing.
    """
    return float(world_size) if layout.strategy == "ddp" and layout.reduction == "fast" else 1.0


def model_width(model: nn.Module) -> int:
    """The width of a model, in features: the smaller side that most of its matrices' elements share."""
    sizes: Counter[int] = Counter()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            sizes[min(parameter.shape)] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else 1


def ddp_bucket_mb(width: int, world_size: int) -> float:
    """Bucket size of DDP in MB: larger for wider models and larger worlds, between 10 and 250.

    A transformer block has about 12·width² parameters; 25 MB is torch's default for models of moderate width.
    """
    size = 25.0 * (1.0 + 12.0 * width**2 / 1e8)
    return min(250.0, max(10.0, size * 1.5 if world_size > 32 else size))
