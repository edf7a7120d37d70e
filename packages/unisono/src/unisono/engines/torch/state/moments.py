"""Adam's moments of training elsewhere, with which a run begins where names and shapes fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from unisono.engines import host_arrays
from unisono.engines.host_arrays import Array
from unisono.engines.state import ADAM_MOMENTS
from unisono.engines.torch.state import sharded_tensors
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import CheckpointError, ConfigError, format_examples, format_share
from unisono.runtime.untrusted import safe_paths

_REMEDY = "leave optim.moments out to begin with new moments"


class _File:
    """Moments of a safetensors file as arrays of a checkpoint, of which every process reads its own pieces.

    Args:
        opened: the file.
        names: of its tensors, by the names of a checkpoint.
    """

    def __init__(self, opened: Any, names: Mapping[str, str]) -> None:
        self._opened, self._names = opened, names
        self.shapes = {name: tuple(opened.get_slice(there).get_shape()) for name, there in names.items()}

    def covers(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return True

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Array:
        there = self._names[name]
        if not shape:
            return host_arrays.to_numpy(self._opened.get_tensor(there))
        piece = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        return host_arrays.to_numpy(self._opened.get_slice(there)[piece].contiguous())

    def dtype(self, name: str) -> np.dtype[Any]:
        first = tuple(min(1, size) for size in self.shapes[name])
        kind: np.dtype[Any] = self.read(name, (0,) * len(first), first).dtype
        return kind

    def fill(self, name: str, offset: tuple[int, ...], into: Array) -> None:
        into[...] = self.read(name, offset, into.shape)


class Moments:
    """Moments in a file (`NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`), of which only the header has been read.

    Args:
        path: a safetensors file, as `unisono import` writes it.

    Raises:
        CheckpointError: if it cannot be read.
        ConfigError: if it has no moments.
    """

    def __init__(self, path: Path) -> None:
        with wrap_native_errors(f"optim.moments={path} cannot be read", CheckpointError, _REMEDY):
            opened = _open(path)
            found: dict[str, dict[str, str]] = defaultdict(dict)
            for there in opened.keys():  # noqa: SIM118 - it is no dictionary
                name, _, entry = there.rpartition(".")
                found[name][entry] = there
            self._shapes = {
                name: tuple(opened.get_slice(entries["exp_avg"]).get_shape())
                for name, entries in found.items()
                if entries.keys() == ADAM_MOMENTS
            }
        self.path, self.opened = path, opened
        self._entries = {name: found[name] for name in self._shapes}
        if not self._entries:
            raise ConfigError(
                f"optim.moments={path} has no moments; make it with `unisono import DIR out=… moments={path.name}`"
            )

    def fit(
        self, parameters: Mapping[str, nn.Parameter], own: Collection[int]
    ) -> tuple[dict[str, dict[str, str]], list[str]]:
        """Whose they are.

        Args:
            parameters: of the model by name; their shapes are all that counts.
            own: the `id` of each that Adam updates.

        Returns:
            The entries of each parameter whose moments there are, and descriptions of moments that did not fit.

        Raises:
            ConfigError: if nothing fits, or parameters are numbers that do not fit.
        """
        entries, shapes = self._entries, self._shapes
        if all(name.isdigit() for name in entries) and not entries.keys() & parameters.keys():
            named = _names_by_number(shapes, parameters, self.path)
            entries = {named[number]: each for number, each in entries.items()}
            shapes = {named[number]: shape for number, shape in shapes.items()}
        wrong = {
            name: reason for name, shape in shapes.items() if (reason := _find_misfit(parameters.get(name), shape, own))
        }
        listed = [f"{name} ({reason})" for name, reason in wrong.items()]
        if len(wrong) == len(entries):
            raise ConfigError(f"optim.moments={self.path} fits no parameter: {format_examples(listed)}; {_REMEDY}")
        return {name: each for name, each in entries.items() if name not in wrong}, listed


def load_moments(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[str, list[str]]:
    """Begin with the moments of a file.

    Returns:
        What was taken, in words, and descriptions of what did not fit; parameters without moments begin with new ones.

    Raises:
        CheckpointError: if it cannot be read.
        ConfigError: if nothing in it fits, or its parameters are numbers that do not fit.
    """
    moments, parameters = Moments(path), dict(module.named_parameters())
    found, listed = moments.fit(parameters, _updated_by_adam(optimizer))
    fitting = {
        f"optimizer/{name}/{entry}": there for name, entries in found.items() for entry, there in entries.items()
    }
    reader = _File(moments.opened, fitting)
    sharded_tensors.init_optimizer_state(optimizer, module, reader)
    mine = sharded_tensors.optimizer_tensors(module, optimizer)
    sharded_tensors.load({name: mine[name] for name in fitting}, reader, kinds=("optimizer/",))
    new = [name for name, p in parameters.items() if p.requires_grad and name not in found]
    trained = sum(p.requires_grad for p in parameters.values())
    steps = {float(moments.opened.get_tensor(entries["step"])) for entries in found.values()}
    after = f"after {min(steps):g}" + (f" to {max(steps):g}" if len(steps) > 1 else "")
    said = f"moments {after} updates from {path}"
    if new:
        said += f", new ones for {format_share(new, trained, 'parameters')}"
    return said, listed


def _open(path: Path) -> Any:
    from safetensors import safe_open

    with safe_paths.open_regular(path) as source:
        return safe_open(safe_paths.path_of(source), framework="pt")


def _find_misfit(parameter: nn.Parameter | None, shape: tuple[int, ...], own: Collection[int]) -> str:
    """Why moments cannot be those of a parameter; empty if they can."""
    if parameter is None:
        return "not in the model"
    if not parameter.requires_grad:
        return "not trained"
    if tuple(parameter.shape) != shape:
        return f"{list(shape)} instead of {list(parameter.shape)}"
    return "" if id(parameter) in own else "not updated by Adam"


def _updated_by_adam(optimizer: torch.optim.Optimizer) -> set[int]:
    parts = getattr(optimizer, "parts", [optimizer])
    return {
        id(parameter)
        for part in parts
        if isinstance(part, torch.optim.Adam | torch.optim.AdamW)
        for group in part.param_groups
        for parameter in group["params"]
    }


def _names_by_number(
    shapes: Mapping[str, tuple[int, ...]], parameters: Mapping[str, nn.Parameter], path: Path
) -> dict[str, str]:
    """The parameter of each number: those of the model in their order, if all have the shapes.

    Raises:
        ConfigError: if one has not, or there are more or fewer.
    """
    numbers = sorted(shapes, key=int)
    other = [
        f"{number} ({list(shapes[number])} beside {list(parameter.shape)} of {name})"
        for number, (name, parameter) in zip(numbers, parameters.items(), strict=False)
        if shapes[number] != tuple(parameter.shape)
    ]
    if len(shapes) != len(parameters) or other or list(map(int, numbers)) != list(range(len(numbers))):
        detail = format_examples(other) if other else f"{len(shapes)} beside {len(parameters)} parameters"
        raise ConfigError(
            f"optim.moments={path} has moments by number, which are not those of this model's parameters in their "
            f"order: {detail}. Save them by name, with "
            f"torch.distributed.checkpoint.state_dict.get_optimizer_state_dict; or {_REMEDY}"
        )
    return dict(zip(numbers, parameters, strict=True))
