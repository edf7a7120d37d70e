"""Which modules are the model that a script trains: those that hold what its optimizers hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.proof.scripts.recording.model_facts import find_living, held_parameters


def find_model(optimizers: Sequence[torch.optim.Optimizer]) -> nn.Module:
    """The modules that hold what the optimizers train, wrapped as they are: one, or a list of several."""
    left = {id(parameter): parameter for parameter in held_parameters(*optimizers)}
    place = {key: number for number, key in enumerate(left)}  # the same in every run, as the order of objects is not
    modules = find_living(nn.Module)
    inner = {id(child) for module in modules for child in module._modules.values()}
    holders = [
        (len(held), -min(place[key] for key in held), not isinstance(module, DistributedDataParallel), module)
        for module in modules
        if id(module) not in inner and (held := _held_by(module) & set(left))
    ]
    chosen: list[nn.Module] = []
    for *_, module in sorted(holders, key=lambda holder: (*holder[:3], type(holder[3]).__qualname__), reverse=True):
        if held := _held_by(module) & set(left):
            chosen.append(module)
            left = {key: value for key, value in left.items() if key not in held}
    if trained := [one for one in left.values() if one.requires_grad]:  # others are its own: numbers of rows, say
        chosen.append(nn.ParameterList(trained))
    return chosen[0] if len(chosen) == 1 else nn.ModuleList(chosen)


def _held_by(module: nn.Module) -> set[int]:
    """What an optimizer may hold of a module, by `id`: that of sparse embeddings holds buffers, of integers too."""
    return {id(one) for one in (*module.parameters(), *module.buffers())}
