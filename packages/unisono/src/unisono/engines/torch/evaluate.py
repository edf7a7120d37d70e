"""Loss and metrics over all rows together, without side effects on training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import StepResult
from unisono.engines.torch.numerics.buffers import restore_modes_on_exit
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
from unisono.runtime import heartbeat
from unisono.task import Batch, Context


def evaluate(
    parts: EngineParts,
    state: TrainState,
    passes: Passes,
    steps: Iterable[list[MicroBatch]],
    step: int,
    scalars: Mapping[str, float],
    average: bool,
) -> StepResult:
    """See `Engine.evaluate`. How rows are divided into `steps` (global batches) only affects losses across samples."""
    cross_sample, context = passes.cross_sample, Context(step, training=False, scalars=scalars)
    sums, seen = parts.reduction.sums(), list[MicroBatch]()
    with _evaluation(parts, state, average) as module:
        for batches in steps if cross_sample else [chain.from_iterable(steps)]:
            for micro, batch in parts.transfer.prefetch(batches):
                ones = dict.fromkeys(micro.counts, torch.ones((), device=parts.device))
                result = passes.evaluate(module, micro, batch, context, ones)
                if cross_sample is None:
                    sums.add(micro, result[1])
                else:
                    cross_sample.add_outputs(micro, result, batch)
                seen.append(replace(micro, arrays={}))
            for micro, loss in cross_sample.compute_loss(context, ones) if cross_sample else ():
                sums.add(micro, loss)
    parts.comparison.check(f"the evaluation after step {step}")
    rules.check_names(parts.job.communicator, sums.names, "the evaluation")
    with heartbeat.phase("wait", "the sums of the evaluation"):
        return parts.reduction.reduce(sums, parts.reduction.counts(seen))[0]


def read_outputs(
    parts: EngineParts,
    state: TrainState,
    passes: Passes,
    micro: MicroBatch,
    context: Context,
    read: Callable[[Any, Batch], Any],
) -> Any:
    """See `Engine.read_outputs`."""
    step_module = state.parallel.module
    with _evaluation(parts, state, average=False) as module:
        step_module.reader = read
        try:
            return passes.evaluate(module, micro, parts.transfer.to_device(micro.arrays), context, {})
        finally:
            step_module.reader = None


@contextmanager
def _evaluation(parts: EngineParts, state: TrainState, average: bool) -> Iterator[nn.Module]:
    """The context of passes without side effects on training, with the module to call."""
    parallel = state.parallel
    # DDP's wrapper does nothing for a pass without a backward pass; FSDP's gathers the parameters.
    module = parallel.module if parts.job.config.layout.strategy == "ddp" else parallel.wrapped
    with (
        state.average.swap_in() if average else nullcontext(),
        state.buffers.restore_on_exit(),
        restore_modes_on_exit(module),
        parts.random_state.restore_on_exit(),
        torch.no_grad(),
    ):
        module.eval()
        state.buffers.copy_from_first()
        try:
            yield module
        finally:
            parallel.reshard()
