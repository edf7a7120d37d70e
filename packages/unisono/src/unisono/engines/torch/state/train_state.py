"""The model of a run as laid out on one process, with everything that is trained, saved and loaded with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.engines.state import ArrayShard, StateReader
from unisono.engines.torch import model_check
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.lora import Adapter
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.batch_norm import BatchStatistics
from unisono.engines.torch.numerics.buffers import Buffers
from unisono.engines.torch.numerics.ema import MovingAverage
from unisono.engines.torch.parallel import wrap
from unisono.engines.torch.parallel.parallel import Parallel
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.state import sharded_tensors
from unisono.optim import optimizers
from unisono.runtime.errors import ConfigError
from unisono.runtime.rng import key


class TrainState:
    """The model from the task's `build`, laid out and checked; creating it is collective.

    Attributes:
        module: the model, including adapters.
        parallel: its wrapper.
        optimizer: of its trainable parameters.
        average: the moving average of its weights.
        buffers: its buffers.
        statistics: batch normalisation statistics shared by all processes; None if each has its own.
        mixes_rows: whether the result for a row depends on the other rows of its micro-batch.
    """

    def __init__(self, parts: EngineParts) -> None:
        job, config = parts.job, parts.job.config
        self._job, self._recurrent, self._spikes = job, parts.recurrent, parts.spikes
        self._last_compared: int | None = None  # number of updates at the last comparison of replicas
        self.module = module = build_model(job.task.build, config.run.seed)
        self._adapter = Adapter(config.adapter, module, config.run.seed)
        if config.train.precision == "fp64":  # after the build, so that initial weights equal those of other precisions
            torch.set_default_dtype(torch.float64)
        precision.to_master(module, config.train.precision)
        self._adapter.narrow_base(module, config.train.precision)
        module.train()
        model_check.check_trainable(module)
        replicas.check_initial_weights(job.communicator, module)
        self.statistics = None
        if config.layout.sync_batch_norm:
            self.statistics = BatchStatistics(module, job.process.world_size)
            self.statistics.warn_of_accumulation(job.split.passes)
        synchronised = self.statistics.layers if self.statistics else frozenset[str]()
        # With synchronised layers, the configuration determines which rows are normalised together.
        normalising = (part for part in module.modules() if isinstance(part, _BatchNorm) and part.training)
        self.mixes_rows = not synchronised and any(True for _ in normalising)  # a frozen one normalises nothing
        self.buffers = Buffers(module, job.process, synchronised)
        wrap.checkpoint_and_compile(module, config.layout, config.train.precision)
        self.parallel = Parallel(wrap.StepModule(job.task, module), parts)
        blocks = wrap.find_blocks(module)
        self.optimizer = optimizers.build_optimizer(config.optim, module, blocks, job.task.optimizer)
        self._with_first_state = {*self.optimizer.state}  # parameters for which it keeps something before any update
        self.average = MovingAverage(config.ema, module)
        replicas.check_optimizer(self.optimizer, module)
        replicas.check_dtype(module, precision.MASTER[config.train.precision])

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from the current gradients and clear them; `step` updates were made before."""
        optimizers.apply_schedule(self.optimizer, scalars, self._job.config.optim)
        self.optimizer.step()
        self.average.update(step + 1)
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def copies(self) -> dict[str, Tensor]:
        """All that replicas have the same bits of, by name: parameters, their average and the optimizer's state."""
        return dict(self.module.named_parameters()) | self.average.named_tensors | self.optimizer_tensors()

    def check_replicas(self, updates: int) -> None:
        """Check that replicas are identical; see `Engine.check_replicas`."""
        if self._last_compared != updates:
            replicas.check_copies(self._job.communicator, self.copies, self.parallel.replicas, updates)
            replicas.check_buffers(self._job.communicator, self.buffers.shared, updates)
            self._last_compared = updates

    def shards(self) -> list[ArrayShard]:
        """The pieces that this process saves; see `Engine.state`."""
        process, by_first = self._job.process, self.buffers.names_saved_by_rank_0
        named = self._named_tensors() | self.average.named_tensors
        shards = sharded_tensors.shards({n: value for n, value in named.items() if n not in by_first}, process)
        own = dict(self.buffers.own)
        if process.is_first:
            own |= {name: value for name, value in named.items() if name in by_first}
            shards += [*self._spikes.shards(), *self._adapter.shards()]
        shards += [ArrayShard(name, tuple(v.shape), (0,) * v.dim(), v.detach().cpu()) for name, v in own.items()]
        return [*shards, *self._recurrent.shards()]

    def load(self, reader: StateReader, weights_only: bool = False) -> None:
        """Load a saved state; see `Engine.load`."""
        self._adapter.check_base(reader)
        if weights_only:
            weights = self._adapter.select_saved(sharded_tensors.model_tensors(self.module))
            sharded_tensors.load(weights, reader, kinds=("model/",))
            self.average.load(reader)
            return
        saved = {name.rpartition("/")[0] for name in reader.shapes}
        for name, parameter in self.module.named_parameters():
            if f"optimizer/{name}" not in saved and parameter not in self._with_first_state:
                self.optimizer.state.pop(parameter, None)  # it got its first gradient after this state was saved
        sharded_tensors.init_optimizer_state(self.optimizer, self.module, reader)
        sharded_tensors.load(self._named_tensors(), reader)
        self.average.load(reader)
        own = self.buffers.own
        if own and all(name in reader.shapes for name in own):  # saved by at least as many processes
            sharded_tensors.load(own, reader, kinds=(f"rank-{self._job.process.rank}/",))
        self._recurrent.load(reader)
        self._spikes.load(reader)

    def _named_tensors(self) -> dict[str, Tensor]:
        return self._adapter.select_saved(sharded_tensors.model_tensors(self.module)) | self.optimizer_tensors()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state by name."""
        return sharded_tensors.optimizer_tensors(self.module, self.optimizer)


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """Number of parameters of a model, without allocating it.

    Args:
        build: creates the model, with all its tensors on the device `meta`.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def build_model(build: Callable[[], Any], seed: int) -> nn.Module:
    """Build the model on the CPU, in its own dtype.

    Raises:
        ConfigError: if the result is not a torch module, or has a parameter that not every layout can train.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "init"))
        model = build()
    if not isinstance(model, nn.Module):
        owner = type(getattr(build, "__self__", build)).__name__
        raise ConfigError(f"{owner}.build returned a {type(model).__name__}, not a torch module")
    model_check.make_layoutable(model)
    return model
