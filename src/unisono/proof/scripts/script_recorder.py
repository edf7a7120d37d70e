"""A recorder for training scripts that are not ours: a few lines in the script, and its run leaves a trace.

The learning rate, the gradients of the update, the optimizer's state and the parameters are taken where the optimizer
makes its update, by hooks that torch has for it; the script only says what it alone knows. Recording changes neither a
number of the script nor its random state.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from unisono.engines.torch import sharded_tensors
from unisono.engines.torch.guards import replicas
from unisono.engines.torch.numerics.gradients import local
from unisono.engines.torch.parallel.process_group import TorchCommunicator
from unisono.proof.recording.trace import Array, Facts, StepFacts, write_facts, write_tensors
from unisono.runtime import rng
from unisono.runtime.communicator import Alone, Group, Place
from unisono.runtime.errors import ConfigError

# What DDP, torch.compile, Fabric, activation checkpointing and FSDP put into the names of parameters.
_WRAPPERS = re.compile(
    r"(?<![^./])(?:module|_orig_mod|_forward_module|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)


@dataclass(frozen=True)
class World:
    """One process of a comparison, as the script sees it.

    The variables that torchrun sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …) are set too, so a script may
    start its processes' group as it always does.

    Attributes:
        rank: number of this process among all, from 0.
        size: number of processes.
        local_rank: number of this process on its host; it chooses the device.
        folder: of the trace.
        timeout: seconds that the run may take.
        perturbed: size of the relative change of the initial weights, in the run that measures rounding.
    """

    rank: int
    size: int
    local_rank: int
    folder: Path
    timeout: float
    perturbed: float = 0.0

    def records(self, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None) -> Records:
        """Begin to record; all processes call it, when everything is wrapped and nothing is trained.

        Args:
            model: as the script trains it: wrapped by DDP, `fully_shard`, Accelerate or Fabric, or by nothing.
            optimizer: torch's, or the wrapper that Accelerate or Fabric has put around it.
            ema: a model that holds a moving average of the parameters, if there is one.

        Raises:
            ConfigError: for what cannot be recorded.
        """
        return Records(self, model, optimizer, ema)


class Records:
    """What a run does, step by step; made by `World.records`."""

    def __init__(
        self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None
    ) -> None:
        self._world, self._model, self._ema = world, model, ema
        self._optimizer = _innermost(optimizer)
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ConfigError(
                "FullyShardedDataParallel keeps parameters in flat pieces that cannot be recorded; shard the model "
                "with torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        self._group = _group(world)
        self._facts = Facts(optimizer=type(self._optimizer).__name__, evaluation_left=None)
        self._rates: list[float] | None = None  # of the update that no call of `step` has recorded yet
        self._norm: float | None = None
        self._clean: bool | None = None  # not known until a backward pass has reached a leaf
        self._random = False
        self._generators: list[int] = []
        self._begin(_named(model.named_parameters()))
        self._optimizer.register_step_pre_hook(self._before_update)
        model.register_forward_pre_hook(lambda *_: self._before_forward())
        model.register_forward_hook(lambda *_: self._after_forward())
        for parameter in model.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_hook(self._before_accumulation)

    def gradients(self) -> None:
        """Record the gradients as they are; to be called before they are clipped, in a script that clips them."""
        self._write_gradients("raw gradients")

    def step(
        self,
        rows: Iterable[int] | Tensor | None = None,
        loss: float | Tensor | None = None,
        metrics: Mapping[str, float | Tensor] | None = None,
    ) -> None:
        """Record an update; all processes call it, once, after `optimizer.step()`.

        Args:
            rows: sample ids of the rows of the global batch that this process computed in all its micro-batches.
            loss: as the script reports it for the whole global batch; None on a process that reports none.
            metrics: the same, by name.

        Raises:
            ConfigError: if the optimizer made no update.
        """
        if self._rates is None:
            raise ConfigError(
                f"records.step() of step {self._number + 1} was called, but the optimizer that is recorded made no "
                "update since the one before: call it once per update (where a library accumulates, with the last "
                "micro-batch alone: `if accelerator.sync_gradients`), and give world.records() the optimizer "
                "that makes the updates"
            )
        mine = [
            [] if rows is None else [int(row) for row in torch.as_tensor(_listed(rows)).flatten().tolist()],
            self._rates,
            None if loss is None else float(loss),
            None if metrics is None else {name: float(value) for name, value in metrics.items()},
            self._clean,
            self._random,
        ]
        everyone = self._group.gather(mine, "the facts of a step")
        by_rank, rates, losses, reported, clean, random = (list(told) for told in zip(*everyone, strict=True))
        self._facts.random |= any(random)
        self._facts.steps.append(
            StepFacts(
                rows=sorted(row for rank in by_rank for row in rank),
                by_rank=by_rank,
                loss=next((value for value in losses if value is not None), None),
                terms={},
                grad_norm=self._norm,
                lr=rates,
                metrics=[values for values in reported if values is not None],
                clean=None if None in clean else all(clean),
                replicas=self._differing(),
            )
        )
        number = self._number - 1
        self._write("parameters", number, _named(self._model.named_parameters()))
        self._write("buffers", number, _named(self._model.named_buffers()))
        self._write(
            "optimizer state", number, _named(sharded_tensors.optimizer_tensors(self._model, self._optimizer).items())
        )
        if self._ema is not None:
            self._write("EMA", number, _named(self._ema.named_parameters()))
        self._rates = self._norm = self._clean = None

    def evaluation(self, values: Mapping[str, float | Tensor]) -> None:
        """Record what an evaluation after the last step came to; a second call checks that evaluation repeats."""
        if self._facts.evaluation_again:
            raise ConfigError("records.evaluation() is called once, or twice to check that evaluation repeats")
        told = self._group.gather({name: float(value) for name, value in values.items()}, "the evaluation")
        if self._facts.evaluation:
            self._facts.evaluation_again = told
        else:
            self._facts.evaluation = told

    def close(self) -> None:
        """Write the facts; called when the script has returned.

        Raises:
            ConfigError: if nothing was recorded.
        """
        if not self._facts.steps:
            raise ConfigError("no update was recorded: call records.step() after every optimizer.step()")
        if self._world.rank == 0:
            write_facts(self._world.folder, self._facts)

    @property
    def _number(self) -> int:
        """Steps that are recorded, which is also the number of the one under way, from 0."""
        return len(self._facts.steps)

    def _begin(self, parameters: Mapping[str, Tensor]) -> None:
        if self._world.perturbed:
            size = self._world.perturbed
            with torch.no_grad():
                for name, parameter in parameters.items():
                    change = rng.generator(0, "perturb", name).uniform(-size, size, local(parameter).shape)
                    local(parameter).mul_(1 + torch.from_numpy(change).to(local(parameter)))
        for name, parameter in parameters.items():
            (self._facts.trainable if parameter.requires_grad else self._facts.frozen).append(name)
        if self._world.size > 1:
            self._facts.per_process = sorted(_local_statistics(self._model))
        self._write("initial parameters", None, parameters)

    # what torch calls --------------------------------------------------------------------------------------------

    def _before_update(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(value is not None for value in (*arguments[1:], *named.values())):
            raise ConfigError(
                f"optimizer.step() of step {self._number + 1} was given a closure, so its gradients are not there yet "
                "when the update begins and cannot be recorded; call backward() before step() without a closure"
            )
        if self._rates is not None:
            raise ConfigError(
                f"the optimizer makes a second update, and step {self._number + 1} is not recorded yet: call "
                "records.step() after every optimizer.step()"
            )
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._write_gradients("raw gradients" if self._norm is None else "clipped gradients")

    def _before_accumulation(self, _: Tensor) -> None:
        """Of the first leaf that a backward pass reaches: what it finds there was left by the step before."""
        if self._clean is None:
            left = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            self._clean = not any(bool(local(gradient).any()) for gradient in left)

    def _before_forward(self) -> None:
        if self._model.training:
            self._generators = _generators()

    def _after_forward(self) -> None:
        self._random |= self._model.training and self._generators != _generators()

    # tensors -----------------------------------------------------------------------------------------------------

    def _write_gradients(self, moment: str) -> None:
        parameters = _named(self._model.named_parameters())
        mine = [name for name, parameter in parameters.items() if parameter.grad is not None]
        everyone = {name for names in self._group.gather(mine, "the names of gradients") for name in names}
        gradients: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
            elif name in everyone and isinstance(parameter, DTensor):  # gathering is for all
                gradients[name] = torch.zeros_like(parameter)
        whole = self._write(moment, self._number, gradients)
        if moment == "raw gradients":
            self._norm = math.sqrt(sum(float(np.square(np.abs(g), dtype=np.float64).sum()) for g in whole.values()))

    def _write(self, moment: str, step: int | None, values: Mapping[str, Tensor]) -> dict[str, Array]:
        """Gather whole tensors, which is collective, and write them on rank 0, which alone gets them."""
        gathered = {name: sharded_tensors.whole(value, keep=self._world.rank == 0) for name, value in values.items()}
        whole = {name: value for name, value in gathered.items() if value is not None}
        if self._world.rank == 0:
            write_tensors(self._world.folder, moment, step, whole)
        return whole

    def _differing(self) -> list[str]:
        """Parameters of which some ranks hold the same piece with other bits."""
        parameters = _named(self._model.named_parameters())
        mine = {name: [*sharded_tensors.piece(value), replicas.digest(value)] for name, value in parameters.items()}
        everyone = self._group.gather(mine, "the digests of parameters")
        result = []
        for name in dict.fromkeys(name for rank in everyone for name in rank):
            pieces: dict[str, dict[int | None, list[int]]] = {}  # ranks by what they hold of each piece
            for rank, held in enumerate(everyone):
                shape, offset, digest = held.get(name, [None, None, None])
                pieces.setdefault(f"{shape} at {offset}", {}).setdefault(digest, []).append(rank)
            for sides in pieces.values():
                if len(sides) > 1:
                    result.append(f"'{name}' is not the same on ranks {' and '.join(map(str, sides.values()))}")
                    break
        return result


def _group(world: World) -> Group:
    """All processes, over gloo, whatever the script's own backend.

    Raises:
        ConfigError: if the script has not joined its processes yet, or has joined others.
    """
    joined = dist.get_world_size() if dist.is_initialized() else 1
    if joined != world.size:
        raise ConfigError(
            f"the script was started on {world.size} processes, but world.records() finds a group of {joined}: call "
            "torch.distributed.init_process_group(), or make an Accelerator or a Fabric of all processes, before it"
        )
    if world.size == 1:
        return Alone()
    place = Place(world.rank, world.size, world.local_rank, world.size, "unisono")
    channel = dist.new_group(backend="gloo", timeout=timedelta(seconds=world.timeout))
    return TorchCommunicator(place, world.timeout, channel)


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of the wrappers of Accelerate and Fabric, which keep it as `optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is no torch.optim.Optimizer, and cannot be recorded")
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError("ZeroRedundancyOptimizer keeps its state in pieces that cannot be recorded; use fully_shard")
    return optimizer


def _named(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by the names that they have without any wrapper.

    Raises:
        ConfigError: if two of them would have the same.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = _WRAPPERS.sub("", name)
        if plain in result:
            raise ConfigError(f"two tensors would be called '{plain}', one of them '{name}'; rename that submodule")
        result[plain] = tensor
    return result


def _local_statistics(model: nn.Module) -> list[str]:
    """Buffers of batch normalisation that each process computes from its own rows."""
    layers = {
        name: layer for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    }  # fmt: skip
    buffers = (f"{name}.{buffer}" for name, layer in layers.items() for buffer, _ in layer.named_buffers())
    return [_WRAPPERS.sub("", name) for name in buffers]


def _generators() -> list[int]:
    """Digests of the states of torch's generators."""
    states = [torch.get_rng_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module(torch.accelerator.current_accelerator()).get_rng_state())
    return [replicas.digest(state) for state in states]


def _listed(rows: Iterable[int] | Tensor) -> Any:
    return rows.detach().cpu() if isinstance(rows, Tensor) else list(rows)
