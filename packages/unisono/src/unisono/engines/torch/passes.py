"""The passes of a step: each micro-batch on the device, with its own random seed and the recurrent state of its rows.

A loss that depends on the whole global batch (`Totals.totals`, losses across samples) needs a first pass without
gradients over all micro-batches, with the same random draws as the second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.nested import map_leaves
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.cross_sample import TorchCrossSampleLoss
from unisono.engines.torch.numerics.gradients import local_gradients
from unisono.engines.torch.numerics.metric_reduction import sum_over_ranks
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.state.train_state import TrainState
from unisono.task import Batch, Context, Loss

_PAIR = ("sum", "count")  # of a metric


class Passes:
    """Runs passes with the context and the scales of the current step.

    Attributes:
        cross_sample: computes a loss across samples from the outputs of all processes; None for other losses.
        has_first_pass: whether a step has a pass over all micro-batches before the one with gradients.
        random: whether any pass has drawn random numbers or mixed rows so far.
    """

    def __init__(self, parts: EngineParts, state: TrainState, *, repeated: bool = False) -> None:
        task, self.random = parts.job.task, state.mixes_rows
        self._parts, self._state, self._parallel, self._task = parts, state, state.parallel, task
        self._features = parts.job.features
        self._seed, self._precision = parts.random_state.seed, parts.job.config.train.precision
        self.cross_sample: TorchCrossSampleLoss | None = None
        if self._features.cross_sample is not None:
            self.cross_sample = TorchCrossSampleLoss(
                parts.job, parts.random_state, self._prepare_micro_batch, repeated=repeated
            )
        # A process's only micro-batch still has its graph when the loss across samples is computed.
        self.has_first_pass = self._features.totals is not None or (
            self.cross_sample is not None and parts.job.split.passes > 1
        )

    # a step -------------------------------------------------------------------------------------------------------

    def begin(self, batches: Sequence[MicroBatch], context: Context, scales: Mapping[str, Tensor]) -> None:
        """Begin a step, with its first pass if the task needs one; collective."""
        self._context, self._scales = context, scales
        self._parts.recurrent.begin()
        if self.has_first_pass:
            with self._state.buffers.restore_on_exit(), torch.no_grad():
                totals = self._totals(batches)
            self._context = replace(context, totals=totals)
            self._parallel.reshard()
            if self.cross_sample is not None:
                self._compute_cross_sample_loss()
        self._parallel.begin(len(batches))

    def forward(self, micro: MicroBatch, batch: Batch | None = None) -> tuple[Tensor, Loss]:
        """The forward pass of a micro-batch: its part of the step's loss, scaled, and the unscaled sums to report."""
        seed = self._seed("dropout", self._context.step, micro.number)
        total, loss = self._scaled_loss(micro, batch)
        self.random = self.random or self._parts.random_state.was_used(seed)
        return total, loss

    def _scaled_loss(self, micro: MicroBatch, batch: Batch | None = None) -> tuple[Tensor, Loss]:
        scales = self._scales
        if micro.idle:
            scales = {name: torch.zeros_like(scale) for name, scale in scales.items()}
        batch, context = self._prepare_micro_batch(micro, self._context, batch)
        result: Any = self._run(micro, batch, context, scales)
        if self.cross_sample is None:
            return result  # type: ignore[no-any-return]
        if not self.has_first_pass:
            self.cross_sample.add_outputs(micro, result, batch)
            self._compute_cross_sample_loss()
        return self.cross_sample.surrogate_loss(micro, result)

    def _run(self, micro: MicroBatch, batch: Batch, context: Context, scales: Mapping[str, Tensor] | None) -> Any:
        """The wrapped module's result for a micro-batch; see `StepModule`."""
        if self._state.statistics is not None:
            self._state.statistics.idle = micro.idle
        with self._parts.observers.part("forward"), precision.autocast(self._precision, self._parts.device):
            return self._parallel.wrapped(batch, context, scales)

    def _prepare_micro_batch(
        self, micro: MicroBatch, context: Context, batch: Batch | None = None
    ) -> tuple[Batch, Context]:
        """A micro-batch on the device, and the context with the recurrent state of its rows."""
        batch = self._parts.transfer.to_device(micro.arrays) if batch is None else batch
        return batch, self._parts.recurrent.attach_to(context, micro, batch)

    def _totals(self, batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """The task's totals over all micro-batches of all ranks, except idle ones; collective.

        Integers are exact in the dtype of the sums, so they do not depend on the layout. For a loss across samples, the
        outputs are kept.
        """
        totals: dict[str, Tensor] = {}
        for micro in batches:
            self._seed("dropout", self._context.step, micro.number)
            batch, context = self._prepare_micro_batch(micro, self._context)
            result = self._run(micro, batch, context, None)
            if self.cross_sample is not None:
                self.cross_sample.add_outputs(micro, result, batch)
                result = self._features.compute_totals(result, batch, context)
            for name, value in sorted(result.items()):
                value = value.detach().to(self._parts.device, self._parts.reduction.dtype)
                value = torch.zeros_like(value) if micro.idle else value
                totals[name] = totals[name] + value if name in totals else value
        return sum_over_ranks(totals) if self._parts.job.process.world_size > 1 and totals else totals

    def _compute_cross_sample_loss(self) -> None:
        assert self.cross_sample is not None
        self.cross_sample.compute_loss(self._context, self._scales)
        self.random |= self.cross_sample.random

    # repeated passes ----------------------------------------------------------------------------------------------

    def repeat(self, micro: MicroBatch, see: Callable[[str, Tensor], None]) -> Loss:
        """Repeat a pass of the step to see its gradients (`local_gradients`); changes no buffer. Collective."""
        module = self._parallel.module
        with self._parallel.synchronise(last=True), self._state.buffers.restore_on_exit(), local_gradients(module, see):
            self._seed("dropout", self._context.step, micro.number)
            total, loss = self._scaled_loss(micro)
            self._parallel.begin(1)
            total.backward()
        return loss

    def used_parameters(self, batches: Sequence[MicroBatch]) -> set[str]:
        """The parameters that this rank's passes of the step use, found by repeating them; collective."""
        gradients = [parameter.grad for parameter in self._parallel.trainable]
        self._state.optimizer.zero_grad(set_to_none=True)
        used: set[str] = set()
        for micro in batches:
            self.repeat(micro, lambda name, _: used.add(name))
        for parameter, gradient in zip(self._parallel.trainable, gradients, strict=True):
            parameter.grad = gradient
        return used

    @torch.no_grad()
    def compute_row_loss(self, row: MicroBatch) -> Loss:
        """The sums of one row of a micro-batch, computed on its own; changes no buffer."""
        with self._state.buffers.restore_on_exit():
            self._seed("dropout", self._context.step, row.number)
            return self._scaled_loss(row)[1]

    @torch.no_grad()
    def check_sum(self, micro: MicroBatch, outputs: Any, loss: Loss) -> None:
        """Refuse a loss that is not a sum, of a task that leaves the counting of rows to us; see `rules.check_sum`."""
        if not rules.counts_by_default(micro.counts) or not self._features.has_local_loss:
            return
        batch, context = self._prepare_micro_batch(micro, self._context)

        def is_by_row(value: Any) -> bool:
            return isinstance(value, Tensor) and value.ndim > 0 and len(value) == micro.size

        def draw(value: Any) -> Any:
            if not (is_by_row(value) and value.is_floating_point()):
                return value
            generator = torch.Generator(value.device).manual_seed(0)
            return torch.empty_like(value).uniform_(0.1, 0.9, generator=generator)

        def sums(rows: Sequence[int], outputs: Any = outputs) -> Mapping[str, Any]:
            def take(value: Any) -> Any:
                return value[list(rows)] if is_by_row(value) else value

            carry = None if context.carry is None else map_leaves(take, context.carry)
            given = map_leaves(take, outputs), map_leaves(take, batch), replace(context, carry=carry)
            return self._task.loss(*given).sums

        def of_drawn(rows: Sequence[int]) -> Mapping[str, Any]:
            return sums(rows, map_leaves(draw, outputs))

        with precision.autocast(self._precision, self._parts.device):
            first = self._parts.job.process.is_first
            rules.check_sum(self._task, loss.sums, sums, of_drawn, micro.size, warns=first)

    # passes outside of steps --------------------------------------------------------------------------------------

    def evaluate(
        self, module: nn.Module, micro: MicroBatch, batch: Batch, context: Context, scales: Mapping[str, Tensor]
    ) -> Any:
        """The step module's result for a held-out micro-batch."""
        self._seed("eval", micro.number)
        with precision.autocast(self._precision, self._parts.device):
            return module(batch, self._prepare_micro_batch(micro, context, batch)[1], scales)

    def outputs(self, micro: MicroBatch, context: Context) -> Any:
        """The task's outputs for a micro-batch, computed with the unwrapped model."""
        return self._compute_outputs(micro, context)[0]

    def loss(self, micro: MicroBatch, context: Context) -> Loss:
        """The task's loss for a micro-batch, from the same outputs."""
        outputs, batch, context = self._compute_outputs(micro, context)
        with precision.autocast(self._precision, self._parts.device):
            return self._task.loss(outputs, batch, context)

    def report(self, micro: MicroBatch, context: Context) -> dict[str, Tensor | float]:
        """Sums and counts of metrics, sums of the loss, and totals, of a micro-batch; none of a loss across samples."""
        if self.cross_sample is not None:
            return {}
        outputs, batch, context = self._compute_outputs(micro, context)
        with precision.autocast(self._precision, self._parts.device):
            totals = self._features.compute_totals(outputs, batch, context) if context.training else {}
            loss = self._task.loss(outputs, batch, replace(context, totals=totals) if context.training else context)
        pairs = loss.metrics.items()
        numbers = {f"metric/{name} {part}": pair[i] for name, pair in pairs for i, part in enumerate(_PAIR)}
        numbers |= {f"loss/{name} sum": value for name, value in loss.sums.items()}
        return {**{f"total/{name}": value for name, value in totals.items()}, **numbers}

    def has_drawn(self, micro: MicroBatch) -> bool:
        """Whether the last of these passes, of this micro-batch, drew random numbers."""
        state = self._parts.random_state
        return state.was_used(state.seed_of("look", micro.number))

    def _compute_outputs(self, micro: MicroBatch, context: Context) -> tuple[Any, Batch, Context]:
        self._seed("look", micro.number)
        batch, context = self._prepare_micro_batch(micro, context)
        with precision.autocast(self._precision, self._parts.device):
            return self._task.outputs(self._state.module, batch, context), batch, context
