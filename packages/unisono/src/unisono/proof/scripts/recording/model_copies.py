"""Copies of a model beside it: moving averages, teachers, targets. They are known by where the script holds them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from unisono.engines.torch.guards import replicas
from unisono.proof.scripts.recording.model_facts import find_living, plain_name
from unisono.runtime.code.source_files import is_user_file

_LEAST = 3  # tensors of a part of the model whose copy is told from a layer that has the same shapes by chance


class ModelCopies:
    """The copies of a model that are there with its second update, and that the script changes.

    What nobody changes is none of them but looks like one: the layer that a stack was copied from, another network of
    the same shapes.

    Args:
        gather: what every rank has of a value, which all of them give together.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        self._gather = gather
        self._first: dict[int, tuple[Tensor, int]] = {}  # by `id`, those of the first update, held so that ids last
        self._beside: dict[str, Tensor] = {}
        self._kept: dict[str, int] = {}  # digests of those that nobody has changed yet

    def find(self, model: nn.Module, step: int) -> dict[str, Tensor]:
        """Those that some rank has changed since the first update began; called with every update, from step 0."""
        if step == 0:
            found = find_copies(model)
            digests = replicas.digests(found)
            self._first = {id(one): (one, digests[name]) for name, one in found.items()}
            return {}
        if step == 1:
            self._beside = find_copies(model)
            everyone = self._gather(sorted(self._beside))
            if any(names != everyone[0] for names in everyone):  # gathering is for all
                self._beside = {n: one for n, one in self._beside.items() if not isinstance(one, DTensor)}
            ids = {name: id(one) for name, one in self._beside.items()}
            self._kept = {name: self._first[key][1] for name, key in ids.items() if key in self._first}
            self._first = {}
        now = replicas.digests({name: self._beside[name] for name in self._kept})
        changed = {name for names in self._gather([n for n in now if now[n] != self._kept[n]]) for name in names}
        self._kept = {name: digest for name, digest in self._kept.items() if name not in changed}
        return {name: one for name, one in self._beside.items() if name not in self._kept}


def find_copies(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of what is a copy of the model, or of a part of it, by names and shapes, and in no part of it.

    Of several copies, names begin with that of the variable that holds each. None at all if one has no such name: then
    nothing tells them apart in two runs.
    """
    known = {id(one) for one in (*model.modules(), *model.parameters())}
    shapes = {_shapes_of(part) for part in model.modules()}
    shapes = {shape for shape in shapes if len(shape) >= _LEAST} | {_shapes_of(model)}
    gc.collect()  # copies that nobody has any more
    found: list[tuple[nn.Module, dict[str, Tensor]]] = []
    living = [one for one in find_living(nn.Module) if id(one) not in known and any(True for _ in one.parameters())]
    for module in sorted(living, key=lambda one: -sum(1 for _ in one.parameters())):  # the whole before its parts
        if any(one.is_meta or nn.parameter.is_lazy(one) for one in module.parameters()):
            continue
        seen = {id(one) for _, copy in found for one in copy.values()}
        if not any(id(one) in known or id(one) in seen for one in module.parameters()) and _shapes_of(module) in shapes:
            found.append((module, {plain_name(name): one for name, one in module.named_parameters()}))
    if len(found) < 2:
        return found[0][1] if found else {}
    names = [_find_name(copy) for _, copy in found]
    if "" in names or len({*names}) < len(names):
        return {}
    return {f"{name}.{key}": value for name, (_, copy) in zip(names, found, strict=True) for key, value in copy.items()}


def _shapes_of(module: nn.Module) -> frozenset[tuple[str, tuple[int, ...]]]:
    if any(nn.parameter.is_lazy(one) for one in module.parameters()):
        return frozenset()
    return frozenset((plain_name(name), tuple(one.shape)) for name, one in module.named_parameters())


def _find_name(copy: Mapping[str, Tensor]) -> str:
    """The variable of the script that holds these parameters, in a module or an object with one; the first by name."""
    wanted = {id(one) for one in copy.values()}
    for variables in _list_variables():
        for name in sorted(name for name, value in variables.items() if _holds(value, wanted)):
            return name
    return ""


def _list_variables() -> Iterator[Mapping[str, Any]]:
    frame: Any = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            yield dict(frame.f_locals)
            yield dict(frame.f_globals)
        frame = frame.f_back


def _holds(value: Any, wanted: set[int]) -> bool:
    """Whether a variable is a module with just these parameters, or an object that keeps one."""
    held = [value]
    with suppress(Exception):  # what stands for other objects may compute something
        held += [] if issubclass(type(value), nn.Module) else vars(value).values()
    modules = (one for one in held if issubclass(type(one), nn.Module))
    return any(wanted == {id(parameter) for parameter in module.parameters()} for module in modules)
