"""Which modules are the model that a script trains: those that hold what its optimizers hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unisono.proof.scripts.recording.model_facts import find_living, held_parameters


class TrainedModules:
    """The modules of a script that its optimizers train, as far as they are known yet."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._members: set[int] = set()  # modules that hold trained parameters, by `id`, and these parameters
        self._trained: set[int] = set()
        self._kept: list[Any] = []  # models whose ids are held, which must not be given to others

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One is made."""
        self._optimizers.append(weakref.ref(optimizer))

    def list_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that the script still holds."""
        return [one for reference in self._optimizers if (one := reference()) is not None]

    def add(self, model: nn.Module) -> None:
        """A model is recorded from now on."""
        self._kept.append(model)
        self._members |= {id(module) for module in model.modules() if next(module.parameters(), None) is not None}
        self._trained |= {id(parameter) for parameter in model.parameters()}

    def __contains__(self, module: nn.Module) -> bool:
        """Whether it is a recorded model, or a part of one."""
        return id(module) in self._members

    def find_later(self, module: nn.Module) -> nn.Module | None:
        """The models of optimizers that came later, if a module that is in none of the known ones is theirs."""
        own = {id(parameter) for parameter in module.parameters()} - self._trained
        optimizers = self.list_optimizers() if own else []
        later = [one for one in optimizers if own & {id(parameter) for parameter in held_parameters(one)}]
        return find_model(later) if later else None

    def is_trained(self, module: nn.Module) -> bool:
        """Whether it has parameters that are trained, or will be."""
        held = self._trained or {id(parameter) for parameter in held_parameters(*self.list_optimizers())}
        return any(id(parameter) in held for parameter in module.parameters())


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


def is_redirected(module: nn.Module) -> bool:
    """Whether Lightning calls its training step through this; on one process it calls that step alone."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return getattr(vars(inner).get("forward"), "__qualname__", "").startswith("_ForwardRedirection.")


def is_transformed() -> bool:
    """Whether this runs inside of `torch.func.vmap`, `grad` and the like, whose tensors have no values to read."""
    return torch._C._functorch.peek_interpreter_stack() is not None
