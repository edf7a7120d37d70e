"""What is read of a model as a script has wrapped it, by the names that its parts have without any wrapper."""

from __future__ import annotations

import gc
import inspect
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.engines.torch.guards import replicas
from unisono.runtime.errors import ConfigError

# What DDP, torch.compile, Fabric, activation checkpointing and FSDP put into the names of parameters.
_WRAPPERS = re.compile(
    r"(?<![^./])(?:module|_orig_mod|_forward_module|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)


def describe_replaced(optimizer: torch.optim.Optimizer) -> str:
    """In words, that backward passes have reached other parameters, of the same shapes, than an optimizer holds."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    modules = [found for found in gc.get_objects() if issubclass(type(found), nn.Module)]
    reached = {id(p): p for module in modules for p in module.parameters() if p.grad is not None}
    shapes = [sorted(tuple(parameter.shape) for parameter in each) for each in (held, reached.values())]
    if shapes[0] != shapes[1]:
        return ""
    return f"none of its {len(held)} parameters got a gradient, and as many others, of the same shapes, did"


def by_plain_name(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
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


def digest_plain(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Digests of the tensors that every rank holds whole."""
    return {name: replicas.digest(value) for name, value in tensors.items() if not isinstance(value, DTensor)}


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
    return {
        _WRAPPERS.sub("", name)
        for name, module in model.named_modules()
        if not module.training and _depends_on_mode(module)
    }


def _depends_on_mode(module: nn.Module) -> bool:
    """Whether its forward pass reads `training`; a dropout of nothing does so for nothing."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    idle = getattr(module, "p", getattr(module, "dropout", None)) == 0
    return code is not None and "training" in code.co_names and not idle
