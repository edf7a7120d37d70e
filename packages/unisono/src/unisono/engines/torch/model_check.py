"""One check of every model that a task builds, before any wrapper, optimizer or layout sees it.

Wrappers differ in what they accept: FSDP refuses parameters that are not contiguous, DDP those of lazy modules, fused
optimizers crash on views. A model that trains on one process must train on many, or be refused alike, so all layouts
get the same model: contiguous copies of what is only laid out differently, and a refusal of what cannot be trained.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from unisono.engines import rules
from unisono.runtime.errors import ConfigError

log = logging.getLogger(__name__)


def make_layoutable(model: nn.Module) -> None:
    """Make a new model one that every layout can train, in place: values, names and ties stay as they are.

    Raises:
        ConfigError: naming a parameter that no layout, or not every layout, can train, and the way out.
    """
    _refuse_sparse_gradients(model)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        _refuse(name, parameter, _owner(model, name))
    scattered = [name for name, parameter in named.items() if not parameter.is_contiguous()]
    for name in scattered:
        if (other := _find_shared(name, named)) is not None:
            raise ConfigError(
                f"the parameters '{name}' and '{other}' share memory, and one is a view of the other (as after `.t()` "
                "or slicing). Processes that hold shards would train them apart; use the same nn.Parameter in both "
                "places, and transpose or slice it in forward()"
            )
    for name in scattered:
        named[name].data = named[name].data.contiguous()  # the same Parameter, so whatever is tied to it stays so
    if scattered:
        log.info("copied %d parameters to be contiguous: %s", len(scattered), rules.format_names(scattered))


def check_trainable(model: nn.Module) -> None:
    """Refuse a model, with its adapters, in which nothing is trained.

    Raises:
        ConfigError: if no parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "the model has no trainable parameter: build() returned one without parameters, or with all of them frozen "
            "(requires_grad=False); leave at least one trainable, or set adapter=lora"
        )


def _refuse(name: str, parameter: Tensor, owner: str) -> None:
    if is_lazy(parameter):
        raise ConfigError(
            f"the parameter '{name}' of {owner} has no shape before the first batch; give the module its sizes "
            "(nn.Linear(in, out) for nn.LazyLinear(out)), or call the model once with an example in build()"
        )
    if parameter.layout is not torch.strided:
        raise ConfigError(f"the parameter '{name}' of {owner} is a sparse tensor; make it dense (`.to_dense()`)")
    if not parameter.numel():
        raise ConfigError(
            f"the parameter '{name}' of {owner} has no elements (shape {tuple(parameter.shape)}), so there is nothing "
            "to train; leave it out (None in its place), or make it a buffer"
        )
    if _overlaps_itself(parameter):
        raise ConfigError(
            f"the parameter '{name}' of {owner} is an expanded view: several of its elements are one number in memory. "
            "Make the smaller tensor the parameter and expand it in forward(), or give each element its own number "
            "with `.clone(memory_format=torch.contiguous_format)`"
        )


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"'{name or 'the model'}' is an {type(module).__name__} with sparse=True, whose gradients cannot be "
                "reduced over processes, clipped or checked; use sparse=False"
            )


def _owner(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name.rpartition(".")[0])).__name__


def _overlaps_itself(parameter: Tensor) -> bool:
    """Whether several elements are one number in memory, as of an expanded view or of `unfold`."""
    if parameter.is_contiguous():
        return False
    reach = 1  # elements from the first to the last of the dimensions so far, in memory
    for step, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1:
            if step == 0:
                return True
            if step < reach:  # may interleave, as windows do not
                places = torch.zeros(parameter.shape, dtype=torch.int64)
                for axis, (stride, length) in enumerate(zip(parameter.stride(), parameter.shape, strict=True)):
                    places += (stride * torch.arange(length)).reshape(
                        [-1 if a == axis else 1 for a in range(places.ndim)]
                    )
                return len(places.unique()) < places.numel()
            reach += step * (size - 1)
    return False


def _find_shared(name: str, named: dict[str, nn.Parameter]) -> str | None:
    """Another parameter that has memory in common with this one."""
    mine = named[name]
    if mine.is_meta:
        return None
    place = mine.untyped_storage().data_ptr()
    others = (n for n, p in named.items() if n != name and not p.is_meta)
    return next(
        (n for n in others if named[n].untyped_storage().data_ptr() == place and _overlap(mine, named[n])), None
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common, by marking those of the first."""
    if one.dtype != other.dtype:
        return True
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size(), dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset()).any())
