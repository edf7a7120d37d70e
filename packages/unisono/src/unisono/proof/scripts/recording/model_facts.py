"""What is read of a model and an optimizer as a script has wrapped them, by names as without any wrapper."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unisono.data.loading.checksum import checksum
from unisono.data.loading.draws import host_generator_states
from unisono.engines.torch.guards import replicas
from unisono.runtime.errors import ConfigError

T = TypeVar("T")

# What DDP, torch.compile, Fabric, activation checkpointing and FSDP put into the names of parameters.
_WRAPPERS = re.compile(
    r"(?<![^./])(?:module|_orig_mod|_forward_module|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)


def find_living(kind: type[T]) -> list[T]:
    """The objects of a class that this process has; `isinstance` would ask proxies, which may compute something."""
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def held_parameters(*optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """What optimizers hold, in their order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def find_scratch(model: nn.Module, held: set[int]) -> set[int]:
    """Buffers that optimizers hold and that no checkpoint has, by `id`: each rank's rows of a sparse embedding."""
    found = {id(one) for one in model.buffers()} & held
    return found - {id(value) for value in model.state_dict(keep_vars=True).values()} if found else found


def describe_replaced(optimizer: torch.optim.Optimizer) -> str:
    """In words, that backward passes have reached other parameters, of the same shapes, than an optimizer holds.

    Those that it holds are in no module then; else they are those of another model.
    """
    held, modules = held_parameters(optimizer), find_living(nn.Module)
    models = [module for module in modules if not isinstance(module, nn.ParameterList)]  # which a recorder has made
    if {id(parameter) for parameter in held} & {id(one) for module in models for one in module.parameters()}:
        return ""
    reached = {id(p): p for module in modules for p in module.parameters() if p.grad is not None}
    shapes = [sorted(tuple(parameter.shape) for parameter in each) for each in (held, reached.values())]
    if shapes[0] != shapes[1]:
        return ""
    return f"none of its {len(held)} parameters got a gradient, and as many others, of the same shapes, did"


def has_rate_by_loss() -> bool:
    """Whether there is a `ReduceLROnPlateau`: a learning rate that depends on the losses."""
    return bool(find_living(torch.optim.lr_scheduler.ReduceLROnPlateau))


def plain_name(name: str) -> str:
    """The name of a parameter as it is without any wrapper."""
    return _WRAPPERS.sub("", name)


def by_plain_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors by the names that they have without any wrapper.

    Raises:
        ConfigError: if two of them would have the same.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = plain_name(name)
        if plain in result:
            raise ConfigError(f"two tensors would be called '{plain}', one of them '{name}'; rename that submodule")
        result[plain] = tensor
    return result


def digest_plain(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Digests of the tensors that every rank holds whole."""
    return {name: replicas.digest(value) for name, value in tensors.items() if not isinstance(value, DTensor)}


def computes_in_pieces(model: nn.Module) -> bool:
    """Whether ranks share the work on each row: parameters are in pieces that no `fully_shard` puts together."""
    whole = {id(p) for module in model.modules() if isinstance(module, FSDPModule) for p in module.parameters()}
    sharded = {id(p): sum(one.is_shard() for one in p.placements) for p in model.parameters() if isinstance(p, DTensor)}
    return any(count > (key in whole) for key, count in sharded.items())


def local_statistics(model: nn.Module) -> list[str]:
    """Buffers of batch normalisation that each process computes from its own rows."""
    layers = {
        name: layer for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    }  # fmt: skip
    buffers = (f"{name}.{buffer}" for name, layer in layers.items() for buffer, _ in layer.named_buffers())
    return [_WRAPPERS.sub("", name) for name in buffers]


def evaluating_modules(model: nn.Module) -> set[str]:
    """The modules that are in evaluation mode, of those that compute otherwise there."""
    modules = (name for name, module in model.named_modules() if not module.training and _depends_on_mode(module))
    return {_WRAPPERS.sub("", f"{name}.").removesuffix(".") for name in modules}  # `module` itself, too


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether its forward pass reads `training`; a dropout of nothing does so for nothing."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    idle = getattr(module, "p", getattr(module, "dropout", None)) == 0
    return code is not None and "training" in code.co_names and not idle


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside of the wrappers of Accelerate and Fabric, which keep it as `optimizer`."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"a {type(optimizer).__name__} is not a torch.optim.Optimizer and cannot be recorded")
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError("ZeroRedundancyOptimizer keeps its state in pieces that cannot be recorded; use fully_shard")
    return optimizer


def generator_digests(host: bool) -> list[int]:
    """Digests of the states of torch's generators, and of Python's and NumPy's."""
    states = [torch.get_rng_state()]
    if (device := torch.accelerator.current_accelerator(check_available=True)) is not None:
        states.append(getattr(torch, device.type).get_rng_state())  # `get_device_module` may be redirected to the CPU
    return [*(replicas.digest(state) for state in states), *(host_generators() if host else [])]


def name_generators() -> dict[str, int]:
    """Digests of the states of torch's generator of the CPU, and of Python's and NumPy's, by name."""
    return dict(
        zip(("torch", "python", "numpy"), (replicas.digest(torch.get_rng_state()), *host_generators()), strict=False)
    )


def host_generators() -> list[int]:
    """The same of Python's and NumPy's global generators alone."""
    return [checksum(state) for state in host_generator_states().values()]
