"""The model as observers see it: by name and whole, on any layout; see `unisono.engines.observers.ModelView`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import Array, ArrayGroup
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.numerics import precision
from unisono.engines.torch.numerics.buffers import restore_modes_on_exit
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state import sharded_tensors
from unisono.engines.torch.state.train_state import TrainState
from unisono.runtime import rng
from unisono.task import Context, Loss


class TorchModelView:
    """The model of one process.

    Attributes:
        step: of the context that its passes are given.
    """

    draws_backward = False
    step = 0

    def __init__(self, parts: EngineParts, state: TrainState, passes: Passes) -> None:
        self._job, self._random_state, self._state, self._passes = parts.job, parts.random_state, state, passes
        self.module = state.module
        named = list(self.module.named_parameters())
        self.trainable = [name for name, parameter in named if parameter.requires_grad]
        self.frozen = [name for name, parameter in named if not parameter.requires_grad]
        self.local_buffers = sorted(state.buffers.local)
        self.size = sum(parameter.numel() for _, parameter in named)

    def whole(self, kind: ArrayGroup) -> dict[str, Array]:
        """Whole arrays by name, on rank 0; collective."""
        keep = self._job.process.is_first
        found = {name: sharded_tensors.gather_array(value, keep) for name, value in self._tensors(kind).items()}
        return {name: value for name, value in found.items() if value is not None}

    def _tensors(self, kind: ArrayGroup) -> dict[str, Tensor]:
        match kind:
            case "parameters":
                return dict(self.module.named_parameters())
            case "gradients":
                return {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
            case "optimizer state":
                return self._state.optimizer_tensors()
            case "buffers":
                return dict(self.module.named_buffers())
            case "EMA":
                return self._state.average.tensors

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient now."""
        return any(parameter.grad is not None for parameter in self.module.parameters())

    def learning_rates(self) -> list[float]:
        """The optimizer's learning rate of every parameter group."""
        return [float(group["lr"]) for group in self._state.optimizer.param_groups]

    def find_differing_replicas(self) -> list[str]:
        """Parameters, the optimizer's state and averages whose copies differ between ranks; collective."""
        state = self._state
        return replicas.find_differing(
            self._job.communicator, state.copies, state.parallel.replicas, "the digests of replicas"
        )

    def digests(self) -> dict[str, Any]:
        """Mode of every module, and digests of tensors and of the random state."""
        module = self.module
        tensors = [*module.parameters(), *module.buffers(), *self._state.average.tensors.values()]
        return {
            "training mode": [part.training for part in module.modules()],
            "parameters and buffers": [replicas.digest(tensor) for tensor in tensors],
            "random state": [replicas.digest(state) for state in self._random_state.current()],
        }

    def flatten(self, outputs: Any) -> dict[str, Array]:
        """The computed tensors of a nested structure by name, in double precision; parameters are left out."""
        found = {}
        for path, leaf in tree_flatten_with_path(outputs)[0]:
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter | DTensor):
                leaf = leaf.detach()
                if leaf.is_floating_point() or leaf.is_complex():
                    leaf = leaf.to(torch.complex128 if leaf.is_complex() else torch.float64)
                found[keystr(path) or "output"] = leaf.cpu().resolve_conj().resolve_neg().numpy()
        return found

    @contextmanager
    def without_side_effects(self) -> Iterator[None]:
        """The context of passes without side effects; see `ModelView`."""
        kind = self._job.config.train.precision
        with (
            self._state.buffers.restore_on_exit(),
            self._random_state.restore_on_exit(),
            precision.promotion(kind),
            precision.without_tf32(kind),
        ):
            yield

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        """What the task returns for a micro-batch in training; see `ModelView`."""
        found = self._passes.outputs(micro, Context(self.step, training=True, scalars=scalars))
        return tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf,
            found,
        )

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        """The sums of the task's loss for a micro-batch; see `ModelView`."""
        if not self._job.features.has_local_loss:
            return {}
        loss = self._passes.loss(micro, Context(self.step, training=True, scalars=scalars))
        return {name: float(torch.as_tensor(value).detach()) for name, value in loss.sums.items()}

    def carry(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Array]:
        """The state that the task's loss returns for the rows of a micro-batch; see `ModelView`."""
        if not self._job.features.has_local_loss or self._job.features.recurrent is None:
            return {}
        left = self._passes.loss(micro, Context(self.step, training=True, scalars=scalars)).carry or {}
        return {name: rows.detach().cpu().numpy() for name, rows in left.items()}

    def report(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> dict[str, float]:
        """What a micro-batch alone adds: to metrics (`metric/NAME sum`), the loss (`loss/NAME sum`), `total/NAME`."""
        with restore_modes_on_exit(self.module), torch.set_grad_enabled(training):
            self.module.train(training)
            numbers = self._passes.report(micro, Context(self.step, training, scalars))
        found = {name: torch.as_tensor(value).detach() for name, value in numbers.items()}
        return {name: float(value) for name, value in found.items() if value.numel() == 1}

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        """Whether the model, or a loss that is computed by micro-batch, draws; see `ModelView`."""
        by_batch = self._job.features.has_local_loss
        with restore_modes_on_exit(self.module), torch.set_grad_enabled(training):
            self.module.train(training)
            (self._passes.loss if by_batch else self._passes.outputs)(micro, Context(self.step, training, scalars))
        return self._passes.has_drawn(micro)

    def random_digest(self) -> int:
        """Of the generators of the CPU and of the device."""
        return hash(tuple(replicas.digest(state) for state in self._random_state.current()))

    def find_differing_buffers(self) -> list[str]:
        """Buffers that are not statistics of one process; collective."""
        everyone = [range(self._job.process.world_size)]
        return replicas.find_differing(
            self._job.communicator, self._state.buffers.shared, everyone, "the digests of buffers"
        )

    def term_gradients(self, loss: Loss) -> dict[str, dict[str, Array]]:
        """The gradient of every term's sum on this process; see `ModelView`."""
        parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        if self._job.process.world_size > 1 or self._job.features.cross_sample:
            return {}
        result = {}
        for term, value in loss.sums.items():
            if isinstance(value, Tensor) and value.requires_grad:
                before = self._random_state.current()
                with self._random_state.restore_on_exit():  # a hook may draw, and the backward pass is yet to come
                    found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
                    now = self._random_state.current()
                self.draws_backward |= any(not torch.equal(a, b) for a, b in zip(before, now, strict=True))
                gradients = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
                result[term] = {name: np.atleast_1d(g.cpu().numpy()) for name, g in gradients.items()}
        return result

    @torch.no_grad()
    def perturb(self, size: float, step: int = 0) -> None:
        """Change every parameter by a random relative change of at most this size, another one in every step."""
        for name, parameter in self.module.named_parameters():
            generator = rng.generator(self._job.config.run.seed, "perturb", name, step)
            change = torch.from_numpy(generator.uniform(-size, size, parameter.shape)).to(parameter)
            parameter.mul_(1 + change)

    def update_from(self, gradients: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients; complex ones are given as pairs of real numbers, as in traces."""
        for name, parameter in self.module.named_parameters():
            parameter.grad = None
            if name in gradients:
                whole = torch.from_numpy(gradients[name])
                whole = torch.view_as_complex(whole) if parameter.is_complex() else whole
                whole = whole.to(parameter.dtype).reshape(parameter.shape)
                if isinstance(parameter, DTensor):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    parameter.grad = distribute_tensor(whole, mesh, placements, src_data_rank=None)
                else:
                    parameter.grad = whole.to(parameter.device)
        self._state.update(step, scalars)
