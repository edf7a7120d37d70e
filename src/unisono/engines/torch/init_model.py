"""A task's model as its `build` makes it: under a keyed seed, so that its first weights are the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.runtime.errors import ConfigError
from unisono.runtime.rng import key


def count_parameters(build: Callable[[], nn.Module]) -> int:
    """How many parameters a model has, without giving it memory.

    Args:
        build: makes the model; every tensor that it creates is on the device `meta`.
    """
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def built(build: Callable[[], Any], seed: int) -> nn.Module:
    """The model, on the CPU, in the dtype that its code gives it.

    Args:
        build: a task's method, or what makes the same model.
        seed: of the run.

    Raises:
        ConfigError: if it is no torch module.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "init"))
        model = build()
    if not isinstance(model, nn.Module):
        owner = type(getattr(build, "__self__", build)).__name__
        raise ConfigError(f"{owner}.build returned a {type(model).__name__}, not a torch module")
    return model
