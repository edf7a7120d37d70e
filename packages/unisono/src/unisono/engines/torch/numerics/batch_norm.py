"""Batch normalisation over the rows of all processes (`layout.sync_batch_norm`).

torch's own SyncBatchNorm refuses the CPU. Each layer keeps its class, parameters and buffers, so checkpoints are the
same with the switch and without it; only what its forward computes in training is another. Processes gather three
numbers per channel (count, mean, squares about the mean) and add them up as Chan, Golub & LeVeque (1979) do, so counts
may differ from process to process, and no small variance is lost beside a large mean. There is one exchange in the
forward pass and one in the backward pass of every layer.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.runtime.errors import ConfigError

log = logging.getLogger(__name__)

_HALF_DTYPES = (torch.float16, torch.bfloat16)


class BatchStatistics:
    """The batch statistics of a model that all processes share.

    Args:
        model: before it is wrapped and compiled; its layers are changed in place.
        world_size: number of processes; of a single one nothing is changed.

    Attributes:
        idle: whether the rows of the current pass count nothing, because another pass has them too.
        layers: their names.

    Raises:
        ConfigError: for a layer whose forward is not torch's, which cannot be exchanged for another.
    """

    def __init__(self, model: nn.Module, world_size: int) -> None:
        self.idle = False
        self.world_size = world_size
        found = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
        self.layers = frozenset(found)
        for name, module in found.items():
            if type(module).forward is not _BatchNorm.forward:
                raise ConfigError(
                    f"layout.sync_batch_norm: the layer '{name}' is a {type(module).__name__}, whose forward is not "
                    "that of torch's BatchNorm1d, 2d or 3d; use one of these, or remove the setting"
                )
            if world_size > 1:
                module.forward = partial(_forward, module, self)  # type: ignore[method-assign]

    def warn_of_accumulation(self, passes: int) -> None:
        """Warn if statistics are not those of the global batch, so that no run on one process would have the same."""
        if self.layers and passes > 1:
            log.warning(
                "batch statistics (layout.sync_batch_norm) cover the rows that all processes compute at the "
                "same time, one of %d parts of the global batch. They depend on this layout, and no run on one process "
                "reproduces them. Use one micro-batch per process to get those of the whole global batch.",
                passes,
            )

    def combine(self, mean: Tensor, squares: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Statistics of all rows, from those of this process's rows; collective.

        Args:
            mean: per channel, (channels,).
            squares: the sum of squared distances from it, (channels,).
            count: values per channel.

        Returns:
            The number of values per channel, a scalar; their mean; and their squares about it. Equal in every bit on
            all processes, since all add the same numbers in the same order.
        """
        own = torch.cat([mean.new_full((1,), count), mean, squares])
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own)
        counts, means, sums = torch.stack(parts).split([1, len(mean), len(mean)], dim=1)  # (ranks, 1 or channels)
        total = counts.sum()
        middle = (counts * means).sum(0) / total.clamp(min=1)
        return total, middle, (sums + counts * (means - middle).square()).sum(0)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(module: _BatchNorm, shared: BatchStatistics, x: Tensor) -> Tensor:
    """What `module` computes of x, (rows, channels, …), with the statistics of all processes where it is training."""
    if not module.training:  # running statistics; or, where none are kept, those of the micro-batch, as ever
        return _BatchNorm.forward(module, x)
    module._check_input_dim(x)
    kind = torch.float32 if x.dtype in _HALF_DTYPES else x.dtype
    count = 0 if shared.idle else x.numel() // x.shape[1]
    with torch.no_grad():
        if count:
            variance, mean = torch.var_mean(x.to(kind), _reduced_axes(x), correction=0)
        else:
            variance = mean = x.new_zeros(x.shape[1], dtype=kind)
        total, mean, squares = shared.combine(mean, variance * count, count)
        # If no process has a row that counts, the result is discarded and only has to be finite.
        variance = torch.where(total > 0, squares / total.clamp(min=1), 1.0)
        _update_running_statistics(module, total, mean, squares)
    inputs = x, module.weight, module.bias, mean, variance, total, module.eps, shared.idle
    outputs: Tensor = _Normalise.apply(*inputs)  # type: ignore[no-untyped-call]
    return outputs


def _update_running_statistics(module: _BatchNorm, total: Tensor, mean: Tensor, squares: Tensor) -> None:
    """Renew running statistics, as one process with all rows would; nothing where there is no row."""
    if not module.track_running_stats:
        return
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    any_rows = total > 0
    module.num_batches_tracked.add_(any_rows)
    if module.momentum is None:
        share = 1.0 / module.num_batches_tracked.clamp(min=1).to(mean.dtype)
    else:
        share = mean.new_full((), module.momentum)
    share = torch.where(any_rows, share, 0.0)
    unbiased = squares / (total - 1).clamp(min=1)
    module.running_mean.copy_((1 - share) * module.running_mean + share * mean)
    module.running_var.copy_((1 - share) * module.running_var + share * unbiased)


class _Normalise(torch.autograd.Function):
    """Normalises by statistics of all processes; the backward pass sums their gradients over all rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        total: Tensor,
        eps: float,
        idle: bool,
    ) -> Tensor:
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.idle = idle
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse, total = ctx.saved_tensors
        shape = (1, -1, *[1] * (x.dim() - 2))
        wide = gradient.to(mean.dtype)
        standard = (x.to(mean.dtype) - mean.view(shape)) * inverse.view(shape)
        sums = wide.sum(_reduced_axes(x)), (wide * standard).sum(_reduced_axes(x))
        for_x = for_weight = for_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            for_weight = sums[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            for_bias = sums[0].to(mean.dtype if weight is None else weight.dtype)
        if ctx.needs_input_grad[0]:
            # Every process takes part, an idle one with zeros: its gradient is zero, but for rows that are no numbers.
            added = torch.cat([torch.zeros_like(part) if ctx.idle else part for part in sums])
            dist.all_reduce(added)
            if not ctx.idle:  # else the statistics do not depend on these rows
                of_mean, of_scale = (part.view(shape) for part in (added / total.clamp(min=1)).chunk(2))
                wide = wide - of_mean - standard * of_scale
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            for_x = (wide * scale.view(shape)).to(x.dtype)
        return for_x, for_weight, for_bias, None, None, None, None, None


def _reduced_axes(x: Tensor) -> list[int]:
    """All axes except the channels."""
    return [0, *range(2, x.dim())]
