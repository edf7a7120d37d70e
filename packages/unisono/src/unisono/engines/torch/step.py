"""One update, top to bottom: count, scale, forward and backward per micro-batch, reduce, check, clip, update.

Counts of the whole global batch are known before the first backward, each term is scaled once, each wrapper's own
division is undone once, and there is one norm of the whole gradient. Random draws do not depend on which process
computes, and results do not depend on observers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import StepResult
from unisono.engines.rules import MetricSums
from unisono.engines.torch.numerics import gradients
from unisono.engines.torch.numerics.gradients import local_gradients
from unisono.engines.torch.numerics.unused_parameters import UnusedParameters
from unisono.engines.torch.parallel.backward_hooks import report_wait
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
from unisono.runtime import heartbeat
from unisono.runtime.errors import ConfigError
from unisono.task import Context


class TrainStep:
    """The step of one process; called once per global batch."""

    def __init__(self, parts: EngineParts, state: TrainState, passes: Passes) -> None:
        self._parts, self._observers = parts, parts.observers
        self._state, self._parallel, self._passes = state, state.parallel, passes
        self._unused = UnusedParameters(state.parallel, parts.device)
        self._names: rules.ReportNames | None = None

    def __call__(self, batches: Sequence[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update; see `Engine.step`."""
        observers = self._observers
        observers.on_step_begin(step, batches)
        with observers.part("reduction"), heartbeat.phase("wait", f"the counts of step {step + 1}"):
            counts = self._parts.reduction.counts(batches)
        scales = rules.loss_scales(counts, self._parallel.gradient_factor, torch.where)
        self._passes.begin(batches, Context(step, training=True, scalars=scalars), scales)
        with self._unused.track_passes(), observers.part("passes"):
            sums = self._accumulate(batches, step)
        result = self._reduce(batches, sums, counts, step)
        self._parts.recurrent.commit()
        if result.skipped:
            self._state.optimizer.zero_grad(set_to_none=True)
        else:
            self._update(result.grad_norm, step, scalars)
        observers.on_step_end(step, result)
        return result

    def _accumulate(self, batches: Sequence[MicroBatch], step: int) -> MetricSums:
        """Forward and backward of every micro-batch; the gradients are reduced with the last one."""
        sums = self._parts.reduction.sums()
        sums.names = self._names
        for micro, batch in self._parts.transfer.prefetch(batches):
            last = micro is batches[-1]
            undone = self._state.buffers.restore_idle_on_exit() if micro.idle else nullcontext()
            with self._parallel.synchronise(last), undone:
                total, loss = self._passes.forward(micro, batch)
                self._observers.on_forward(micro, self._parallel.module.take_outputs(), loss)
                with self._observers.part("backward"), report_wait(total, self._parts.job.process, last, step):
                    total.backward()
            self._parallel.end_pass()
            sums.add(micro, loss)
            self._parts.recurrent.add(micro, loss.carry)
        self._parallel.check_reduced(f"rank {self._parts.job.process.rank}, step {step + 1}")
        return sums

    def _reduce(
        self, batches: Sequence[MicroBatch], sums: MetricSums, counts: Mapping[str, Tensor], step: int
    ) -> StepResult:
        """The step's result, unless an observer refuses the step."""
        self._observers.on_gradients()
        squares, flags = self._parallel.squared_norm(self._parts.reduction.dtype), self._unused.flags()
        self._parts.transfer.look_ahead()
        with self._observers.part("reduction"), heartbeat.phase("wait", f"the sums of step {step + 1}"):
            votes = self._observers.votes()
            result, votes, used = self._parts.reduction.reduce(sums, counts, squares, votes, flags)
        result = self._observers.on_reduced(result, votes)
        self._unused.drop_unused_zeros(used, lambda: self._passes.used_parameters(batches), step)
        return result

    def _update(self, norm: float, step: int, scalars: Mapping[str, float]) -> None:
        with self._observers.part("optimizer"):
            gradients.clip_gradients(self._parallel.gradients(), norm, scalars.get("clip_norm"))
            self._observers.on_update(step, scalars)
            self._state.update(step, scalars)

    # before the first step ----------------------------------------------------------------------------------------

    def warm_up(self, batches: Sequence[MicroBatch], scalars: Mapping[str, float]) -> list[str]:
        """Run and discard a forward and backward pass over the first micro-batch; returns the unused parameters.

        DDP orders its buckets, and therefore its sums, by the first backward pass. Since every start runs this pass, a
        resumed run sums in the same order as an uninterrupted one.

        Raises:
            ConfigError: if the loss does not train the model, or names depend on the rows.
        """
        name, used = type(self._parts.job.task).__name__, set[str]()
        first, batches = batches[0], batches if self._passes.cross_sample else batches[:1]
        module = self._parallel.module
        with self._state.buffers.restore_on_exit(), local_gradients(module, lambda name, _: used.add(name)):
            scales = rules.loss_scales(
                self._parts.reduction.counts(batches), self._parallel.gradient_factor, torch.where
            )
            self._passes.begin(batches, Context(0, training=True, scalars=scalars), scales)
            with self._parallel.synchronise(last=True), module.record_outputs() as recorded:
                total, loss = self._passes.forward(first)
                if not total.requires_grad:
                    raise ConfigError(f"{name}: the loss does not depend on any trainable parameter")
                self._parallel.begin(1)
                total.backward()
            if len(recorded) == 1:  # more of them if several devices computed a part each
                self._passes.check_sum(first, recorded[0], loss)
        self._parallel.end_pass()
        self._state.optimizer.zero_grad(set_to_none=True)
        if not used:
            raise ConfigError(
                f"{name}: the loss does not use any parameter of the model that build() returned; outputs() must "
                "compute with the model that it receives"
            )
        sums = self._parts.reduction.sums()
        sums.add(first, loss)
        self._names = sums.names
        rules.check_names(self._parts.job.communicator, self._names, "the first step")
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        left_out = sorted(name.removeprefix("model.") for name in trained - used)
        self._passes.random, everywhere = rules.gather_first_pass(
            self._parts.job.communicator, left_out, self._passes.random
        )
        return everywhere
