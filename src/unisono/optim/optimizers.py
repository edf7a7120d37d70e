"""Optimizers and their parameter groups. Built after the model is wrapped, from the parameters that will be updated."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unisono.config.schema import AdamW, OptimizerGroup, Sgd
from unisono.errors import ConfigError, nearest

_FUSED = ("cpu", "cuda", "xpu", "mps")
_NOT_DECAYED = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)  # however many axes their weights have


def build(config: OptimizerGroup, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer over a model's trainable parameters, grouped as the config says.

    Raises:
        ConfigError: for a pattern that matches no parameter, or a model with nothing to train.
    """
    groups = parameter_groups(config, model)
    how = _implementation(config, [parameter for group in groups for parameter in group["params"]])
    match config:
        case AdamW():
            return torch.optim.AdamW(
                groups, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, **how
            )
        case Sgd():
            return torch.optim.SGD(
                groups,
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                **how,
            )
    raise AssertionError(config)


def parameter_groups(config: OptimizerGroup, model: nn.Module) -> list[dict[str, Any]]:
    """Parameters that share their settings; each group knows its `lr_scale` and its own decay.

    Matrices decay; biases, norm weights and embeddings do not, unless `decay_all` or a pattern says so.
    """
    exempt = {
        id(p)
        for module in model.modules()
        if isinstance(module, _NOT_DECAYED)
        for p in module.parameters(recurse=False)
    }
    matched: set[str] = set()
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    names = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        names.append(name)
        bias = name.endswith("bias")  # those of stacked experts have two axes
        decays = config.decay_all or (parameter.dim() >= 2 and id(parameter) not in exempt and not bias)
        lr_scale, decay = 1.0, config.weight_decay if decays else 0.0
        for pattern in config.groups:
            if fnmatchcase(name, pattern.match):
                matched.add(pattern.match)
                lr_scale = pattern.lr_scale
                decay = decay if pattern.weight_decay is None else pattern.weight_decay
                break
        group = groups.setdefault(
            (lr_scale, decay), {"params": [], "weight_decay": decay, "own_decay": decay, "lr_scale": lr_scale}
        )
        group["params"].append(parameter)
    if not names:
        raise ConfigError("the model has no trainable parameter: every requires_grad is False")
    for pattern in config.groups:
        if pattern.match not in matched and not any(fnmatchcase(name, pattern.match) for name in names):
            raise ConfigError(f"optim.groups: '{pattern.match}' matches no parameter, {nearest(pattern.match, names)}")
    return list(groups.values())


def schedule(optimizer: torch.optim.Optimizer, scalars: Mapping[str, float], config: OptimizerGroup) -> None:
    """Set this step's learning rate, and weight decay if that is scheduled, in every group."""
    decay = scalars.get("weight_decay")
    for group in optimizer.param_groups:
        group["lr"] = scalars["lr"] * group["lr_scale"]
        if decay is not None and config.weight_decay:
            group["weight_decay"] = group["own_decay"] * decay / config.weight_decay


def _implementation(config: OptimizerGroup, parameters: list[nn.Parameter]) -> dict[str, bool]:
    """Which kernel updates the parameters; the same on every layout, since kernels round differently.

    torch has no fused SGD for sharded parameters (2.13), so SGD is foreach unless asked otherwise.
    """
    if config.implementation == "auto":
        fused = isinstance(config, AdamW) and all(p.device.type in _FUSED and p.is_floating_point() for p in parameters)
        return {"fused": True} if fused else {"foreach": True}
    if config.implementation == "fused" and isinstance(config, Sgd) and any(isinstance(p, DTensor) for p in parameters):
        raise ConfigError("optim.implementation=fused: torch has no fused SGD for sharded parameters; use foreach")
    return {"fused": config.implementation == "fused", "foreach": config.implementation == "foreach"}
