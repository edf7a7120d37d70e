"""The wrapped step module, and everything that differs between strategies within a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from unisono.engines import rules
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.gradients import OrderedSum
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parallel.wrap import StepModule
from unisono.engines.torch.parts import EngineParts
from unisono.runtime.errors import ConfigError
from unisono.runtime.fault_names import FaultName


class Parallel:
    """One process's part of a wrapped step module.

    Attributes:
        module: the step module itself.
        wrapped: the module in its wrapper; every pass goes through it.
        trainable: the parameters that are trained.
        is_sharded: whether a process has shards of parameters and gradients.
        gradient_factor: what losses are multiplied by; see `wrap.gradient_factor`.
        replicas: groups of ranks that hold copies of the same parameters.
    """

    def __init__(self, module: StepModule, parts: EngineParts) -> None:
        job, layout = parts.job, parts.job.config.layout
        self.module = module
        self.is_sharded = layout.strategy in ("fsdp", "hsdp")
        self.gradient_factor = wrap.gradient_factor(layout, job.process.world_size)
        self.replicas = wrap.replica_groups(layout, job.process.world_size)
        self._config, self._layout, self._process, self._passes = job.config, layout, job.process, job.split.passes
        self._device, self._comparison = parts.device, parts.comparison
        self.wrap()

    def wrap(self) -> None:
        """Wrap the module, and prepare what adds up its gradients."""
        world_size = self._process.world_size
        precision, timeout = self._config.train.precision, self._config.launch.timeout
        self.wrapped = wrap.wrap(self.module, self._layout, precision, self._device, world_size, timeout)
        self._comparison.watch(self.wrapped)
        self.trainable = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._ordered = None
        if self._layout.reduction == "ordered":
            self._ordered = OrderedSum(self.trainable, self._passes, world_size)
            if isinstance(self.wrapped, DistributedDataParallel):
                named = self._comparison.call_bucket_hook  # not through this object, which holds the wrapper
                self.wrapped.register_comm_hook(self._ordered, lambda ordered, bucket: named(ordered.hook, bucket))

    @property
    def finds_unused(self) -> bool:
        """Whether passes may leave parameters out."""
        return self._layout.find_unused_parameters

    def find_unused(self) -> bool:
        """Allow passes to leave parameters unused from now on; returns whether the wrapper was rebuilt for it.

        Raises:
            ConfigError: where FSDP cannot.
        """
        if self.finds_unused:
            return False
        if self.is_sharded and not wrap.SUPPORTS_UNUSED:
            raise ConfigError(
                "some parameters get no gradient, which FSDP supports only with torch 2.13 or newer; use "
                "layout.strategy=ddp, or freeze them"
            )
        self._layout = self._layout.model_copy(update={"find_unused_parameters": True})
        if isinstance(self.wrapped, DistributedDataParallel):
            self.wrap()
            return True
        return False

    # within a step ------------------------------------------------------------------------------------------------

    def begin(self, passes: int) -> None:
        """Begin accumulating the gradients of this many passes."""
        if self._ordered is not None:
            self._ordered.begin(passes)

    @contextmanager
    def synchronise(self, last: bool) -> Iterator[None]:
        """The context of one pass, forward and backward: whether its gradients are reduced over processes now."""
        wrapped = self.wrapped
        if isinstance(wrapped, DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
            return
        if isinstance(wrapped, FSDPModule):
            wrapped.set_is_last_backward(last)
            wrapped.set_requires_gradient_sync(last or not self._layout.defer_reduction)
            if self._layout.strategy == "hsdp":
                wrapped.set_requires_all_reduce(last)
        yield

    def end_pass(self) -> None:
        """Process the gradients of a pass."""
        if self._ordered is not None:
            self._ordered.end_pass()

    def gradients(self) -> list[Tensor]:
        """This process's part of every existing gradient."""
        return gradients.collect_gradients(self.trainable)

    def squared_norm(self, dtype: torch.dtype) -> Tensor:
        """This process's part of the squared norm of the step's gradient; not finite if any of its elements is not."""
        # Zero times NaN is NaN: that of any rank counts.
        return gradients.squared_norm(self.gradients(), dtype).to(self._device) * self.share_of_squares

    @property
    def share_of_squares(self) -> float:
        """What squares of this process's parts of tensors count in a sum over all processes."""
        if self.is_sharded:
            return (self._layout.shards or self._process.world_size) / self._process.world_size
        return float(self._process.is_first)  # every rank has the whole tensors, and the first one's count

    # around steps -------------------------------------------------------------------------------------------------

    def check_reduced(self, where: str) -> None:
        """Raise if passes did not use a parameter that DDP expects: what it leaves in `.grad` is not reduced.

        Raises:
            ConfigError: naming parameters without a gradient.
        """
        if not isinstance(self.wrapped, DistributedDataParallel):
            return
        try:
            self.wrapped._check_reducer_finalized()
        except RuntimeError as error:
            named = self.module.model.named_parameters()
            left_out = [name for name, p in named if p.requires_grad and p.grad is None] or ["torch does not say which"]
            raise ConfigError(
                f"{where}: a pass did not use parameters that the first pass used ({rules.format_names(left_out)}), so "
                "DDP did not reduce all gradients. Set layout.find_unused_parameters=true.",
                fault=FaultName.UNUSED_PARAMETERS,
            ) from error

    def reshard(self) -> None:
        """Put FSDP's parameters back into shards after a forward pass that no backward pass follows.

        The backward pass does it otherwise; without it the root's parameters would stay gathered, and what a checkpoint
        or a guard then finds under their names is not what is trained.
        """
        for module in self.wrapped.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def devices(self) -> int:
        """Number of devices that this process computes on."""
        return len(self.wrapped.device_ids) if isinstance(self.wrapped, nn.DataParallel) else 1
