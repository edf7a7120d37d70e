"""Five faults of one study of recursive models on many devices, which its authors met one after the other.

Runs on one device were right, losses fell on many, and the accuracies could not be repeated. Each is made here as it
was there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from packages.unisono.tests.tasks import TransformerTask
from tests.proofs.zoo.making import fault
from unisono.data.loading.loader import Loader
from unisono.engines import rules
from unisono.engines.torch.engine import TorchEngine
from unisono.engines.torch.parallel.parallel import Parallel


def average(module: nn.Module) -> None:
    """The mean over ranks in place of every parameter, which was meant as a broadcast."""
    with torch.no_grad():
        for parameter in module.parameters():
            dist.all_reduce(parameter)
            parameter /= dist.get_world_size()


@fault("initial weights averaged over seeds", "Initialisation depends on the layout", TransformerTask, "build")
def averaged_weights(original: Any, self: Any) -> nn.Module:
    """Their spread shrinks by the root of the number of ranks."""

    torch.manual_seed(dist.get_rank())
    model: nn.Module = original(self)
    average(model)
    return model


@fault("gradients averaged, loss divided by the global batch", "All gradients are scaled by N", rules, "loss_scales")
def divided_twice(original: Any, counts: Any, factor: float, where: Any) -> Any:
    return original(counts, 1.0, where)


@fault("buffers drawn on each rank", "Initialisation depends on the rank", Parallel, "wrap")
def buffers_by_rank(original: Any, self: Parallel) -> None:
    original(self)
    with torch.no_grad():
        for buffer in self.module.buffers():
            buffer.mul_(1 + 0.1 * dist.get_rank())


@fault("checkpoint averaged with random weights", "The state was not carried on", TorchEngine, "load", resumed=1)
def mixed_checkpoint(original: Any, self: TorchEngine, reader: Any) -> None:
    """Rank 0 alone loads it, and the mean over ranks is taken for a broadcast."""

    original(self, reader)
    module = self.train_state.parallel.module
    if dist.get_rank():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(std=0.02)
    average(module)


@fault("one device of two computes", "Rows are dropped", Loader, "steps")
def one_device(original: Any, self: Loader, first: int = 0) -> Any:
    """The rows were dealt out to all devices of a host, and one process drives the first."""

    for batches in original(self, first):
        yield [replace(micro, idle=True) for micro in batches] if dist.get_rank() else batches
