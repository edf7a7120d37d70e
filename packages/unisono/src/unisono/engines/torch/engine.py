"""Assembles the torch engine from its parts: build, step, observe, save. The step itself is in `step`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import Observer, StepResult
from unisono.engines.protocol import EngineJob, ModelFacts
from unisono.engines.state import ArrayShard, StateReader
from unisono.engines.torch.devices import device_name, peak_memory
from unisono.engines.torch.evaluate import evaluate, read_outputs
from unisono.engines.torch.guards import oom
from unisono.engines.torch.guards.layer_norms import LayerNorms
from unisono.engines.torch.guards.non_finite import NonFiniteSearch
from unisono.engines.torch.guards.recompile_guard import RecompileGuard
from unisono.engines.torch.guards.replicas import UpdateGuard
from unisono.engines.torch.numerics import determinism, precision
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state import moments
from unisono.engines.torch.state.train_state import TrainState
from unisono.engines.torch.step import TrainStep
from unisono.engines.torch.view import TorchModelView
from unisono.optim import optimizers
from unisono.runtime.display.compiling import compiling
from unisono.task import Batch, Context

log = logging.getLogger(__name__)


def create(job: EngineJob) -> TorchEngine:
    """The engine of a job; see `unisono.engines.create_engine`."""
    return TorchEngine(job)


class TorchEngine:
    """One process's part of a torch run; see `unisono.engines.protocol.Engine`.

    Attributes:
        train_state: the model, its wrapper, its optimizer; from `setup` on.
        view: of the model; from `setup` on.
    """

    train_state: TrainState
    view: TorchModelView

    def __init__(self, job: EngineJob) -> None:
        self.communicator, self._job, self._parts = job.communicator, job, EngineParts(job)
        self.profiler = self._parts.profiler
        self._default_dtype, self._random = torch.get_default_dtype(), False

    @property
    def random(self) -> bool:
        """Whether a forward pass has drawn random numbers or mixed rows so far."""
        return self._passes.random if "_passes" in vars(self) else self._random

    def setup(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> ModelFacts:
        """Build, lay out, check and warm up; see `Engine.setup`."""
        job, parts = self._job, self._parts
        parts.comparison.start()
        kernels = rules.choose_kernels(job.task, job.communicator, parts.device.type, job.config.train.precision)
        if kernels:
            log.info("kernels: %s", ", ".join(f"{name} {kernel}" for name, kernel in kernels.items()))
        self.train_state = state = TrainState(parts)
        self._passes = Passes(parts, state)
        self._step = TrainStep(parts, state, self._passes)
        self.view = TorchModelView(parts, state, self._passes)
        for observer in self._guards():
            parts.observers.add(observer)
        naming: AbstractContextManager[None] = nullcontext()
        if job.config.layout.compile:
            naming = compiling(wrap.describe_blocks(state.module), shown=job.process.is_first)
        with self._computation("the others to warm up", "before the first step"), naming:
            self._warm_up(batches, scalars)
        parts.comparison.check("the warm-up")
        size = sum(parameter.numel() for parameter in state.parallel.trainable)
        updates = optimizers.describe_updates(job.config.optim, state.optimizer, state.module)
        frozen = sum(p.numel() for p in state.module.parameters() if not p.requires_grad)
        name = device_name(parts.device)
        return ModelFacts(size, name, kernels, tuple(updates), state.parallel.devices, frozen)

    def _guards(self) -> Iterator[Observer]:
        """The observers of every step, in the order in which they are called."""
        parts, state, train = self._parts, self.train_state, self._job.config.train
        yield parts.profiler
        yield parts.comparison
        yield RecompileGuard(self.communicator)
        yield NonFiniteSearch(parts, state, self._passes)
        yield parts.spikes
        if self._job.config.observe.norms:
            observe, share = self._job.config.observe, state.parallel.share_of_squares
            yield LayerNorms(state.module, share, parts.reduction.dtype, observe.log_every)
        if self._job.check_updates:
            dtype = precision.MASTER[train.precision]
            yield UpdateGuard(state.module, dtype, train.guard_every, state.check_replicas)

    def _warm_up(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> None:
        left_out = self._step.warm_up(batches, scalars)
        if left_out:
            log.warning(
                "%d parameters got no gradient in the first pass (%s); they stay unchanged unless a later batch uses "
                "them.",
                len(left_out),
                rules.format_names(left_out),
            )
            if self.train_state.parallel.find_unused():
                self._step.warm_up(batches, scalars)

    def observe(self, observer: Observer) -> None:
        """Call an observer at the points of every step; see `Engine.observe`."""
        self._parts.observers.add(observer)
        if self._parts.observers.read_outputs:
            self.train_state.parallel.module.recorded_outputs = []

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """See `Engine.incoming`."""
        return self._parts.transfer.incoming(steps)

    def step(self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update; see `Engine.step`."""
        with self._computation(f"the other processes in step {step + 1}", f"step {step + 1}"):
            return self._step(batches, step, scalars)

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Mapping[str, float], average: bool = False
    ) -> StepResult:
        """Loss and metrics over all rows together; see `Engine.evaluate`."""
        with self._computation("the other processes in the evaluation", f"evaluation after step {step}"):
            return evaluate(self._parts, self.train_state, self._passes, steps, step, scalars, average)

    def read_outputs(
        self, micro: MicroBatch, step: int, scalars: Mapping[str, float], read: Callable[[Any, Batch], Any]
    ) -> Any:
        """What a function makes of the task's outputs for rows; see `Engine.read_outputs`."""
        with self._computation("the other processes with the same rows", f"rows after step {step}"):
            context = Context(step, training=False, scalars=scalars)
            return read_outputs(self._parts, self.train_state, self._passes, micro, context, read)

    @contextmanager
    def _computation(self, waiting_for: str, where: str) -> Iterator[None]:
        """The context of all computation: sets the precision and turns low-level errors into clear ones."""
        with (
            precision.promotion(self._job.config.train.precision),
            precision.without_tf32(self._job.config.train.precision),
            determinism.only_deterministic(self._job.config.layout, where),
            self._parts.comparison.waiting(waiting_for),
            oom.translate_oom(f"rank {self._job.process.rank}, {where}", self._job.split),
        ):
            yield

    def peak_memory(self) -> int | None:
        """See `Engine.peak_memory`."""
        return peak_memory(self._parts.device)

    def check_replicas(self, updates: int) -> None:
        """Check that replicas are identical; see `Engine.check_replicas`."""
        self.train_state.check_replicas(updates)

    def state(self) -> list[ArrayShard]:
        """The pieces that this process saves; see `Engine.state`."""
        return self.train_state.shards()

    def load(self, reader: StateReader, weights_only: bool = False) -> None:
        """Load a saved state; see `Engine.load`."""
        self.train_state.load(reader, weights_only)

    def load_moments(self, path: Path) -> str:
        """Begin with moments of Adam; see `Engine.load_moments`."""
        state = self.train_state
        said, wrong = moments.load_moments(path, state.module, state.optimizer)
        if wrong:
            log.warning("optim.moments=%s: %d do not fit: %s", path, len(wrong), rules.format_names(wrong))
        return said

    def close(self) -> None:
        """Release the model before the process group: gloo's threads must not outlive the tensors they reduce."""
        torch.set_default_dtype(self._default_dtype)
        self._parts.comparison.close()
        self._random, state = self.random, vars(self).pop("train_state", None)
        parts = [vars(self).pop(name, None) for name in ("_passes", "_step", "view")]
        for part in (getattr(state, "parallel", None), state, *parts):
            if part is not None:  # emptied, since observers may still refer to it
                vars(part).clear()
        gc.collect()
