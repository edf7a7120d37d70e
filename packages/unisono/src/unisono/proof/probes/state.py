"""Why a function gives something else the second time: what it draws from, what it remembers, what it overwrites."""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np

from unisono.data.loading.checksum import checksum
from unisono.data.loading.draws import describe_draws, global_generator_states, moved_generators
from unisono.runtime.text import join_names
from unisono.task import Task

TORCH = "torch's global generator"  # which is seeded for the model and its loss, by micro-batch
_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_NOT_COPIED = object()
_TOSSES = 16  # of a coin, which falls alike all the time once in 65536


def describe_state(
    task: Task, call: Callable[[], Any], inputs: Any, seeded: tuple[str, ...] = (TORCH,), model: Any = None
) -> str:
    """What a call that is not repeatable draws from, changes in its task or model, or in its inputs; in words.

    Args:
        task: whose function is called.
        call: calls it once.
        inputs: that it is given, arrays and nested structures of them.
        seeded: generators that are seeded for the call, so that it may draw from them.
        model: a torch module whose plain attributes are watched as well.
    """
    attributes, before = digest_attributes(task), checksum(inputs)
    kept_by_model = digest_model(model)
    generators, others = global_generator_states(), _digest_globals(task, model)
    call()
    moved = [name for name in moved_generators(generators) if name not in seeded]
    after = digest_attributes(task)
    changed = [name for name in after if after[name] != attributes.get(name)]
    own = [name for name in changed if _is_generator(getattr(task, name, None))]
    elsewhere = [name for name, digest in _digest_globals(task, model).items() if digest != others.get(name)]
    found = []
    if moved:
        found.append(f"it draws from {describe_draws(moved, call)}, which no key seeds")
    if own:
        found.append(f"it draws from self.{', self.'.join(own[:3])}, which no key seeds")
    if elsewhere:
        found.append(f"it draws from {', '.join(elsewhere[:3])}, which no key seeds")
    if kept := [name for name in changed if name not in own]:
        found.append(f"it changes self.{', self.'.join(kept[:3])}")
    if kept := [name for name, digest in digest_model(model).items() if digest != kept_by_model.get(name)]:
        quoted = join_names(f"'{name}'" for name in kept)
        found.append(f"it changes {quoted} of the model, no buffer")
    if checksum(inputs) != before:
        found.append(f"it changes its inputs in place{_name_changed(inputs, call)}")
    return (
        " and ".join(found)
        or "no known generator moves, and no attribute of the task: a clock, or state or a generator kept elsewhere?"
    )


def repeat_call(task: Task, call: Callable[[], Any], is_same: Callable[[Any], bool]) -> Any:
    """What a call gives the second time; the first that is not the same, if it draws from what nobody seeds.

    A layer that is left out by the toss of a coin gives the same twice in half of all cases. So where a generator of
    the process, or one that the task keeps, has moved, there are more repeats.

    Args:
        task: whose function is called.
        call: calls it once.
        is_same: whether it gave what it gave before.
    """
    generators, own = global_generator_states(), _digest_generators(task)
    again = call()
    draws = [n for n in moved_generators(generators) if n != TORCH] or _digest_generators(task) != own
    for _ in range(_TOSSES if draws else 0):
        if not is_same(again):
            break
        again = call()
    return again


def digest_attributes(task: Task) -> dict[str, int]:
    """A digest of everything that a task keeps, by attribute."""
    return {name: digest_value(value) for name, value in vars(task).items()}


@contextmanager
def restore_state(task: Task, model: Any = None) -> Iterator[None]:
    """A context after which a task and its model keep what they kept before, as far as that can be copied.

    Otherwise the run whose task is tried goes on with other counters than those that it is compared with.

    Args:
        task: all of whose attributes are restored.
        model: a torch module, whose parameters are restored, and what it keeps beside these and buffers: a counter, a
            generator. Nothing changes one in JAX in place.
    """
    kept = [*((task, name, value) for name, value in vars(task).items()), *find_kept(model).values()]
    before = [(owner, name, _copy(value), digest_value(value)) for owner, name, value in kept]
    own = {*vars(task)}
    parameters = [(p, p.detach().clone()) for p in model.parameters()] if _is_of_torch(model, "nn.Module") else []
    try:
        yield
    finally:
        for parameter, values in parameters:  # an evaluation may have changed them
            parameter.data.copy_(values)
        for owner, name, value, digest in before:
            changed = name not in vars(owner) or digest_value(vars(owner)[name]) != digest
            if changed and value is not _NOT_COPIED:
                vars(owner)[name] = value
        for name in {*vars(task)} - own:
            if isinstance(getattr(type(task), name, None), _PLAIN):
                delattr(task, name)  # what began as an attribute of the class, or as none


def digest_kept(task: Task, model: Any, caches: bool = True) -> dict[str, int]:
    """A digest of everything that a task and a torch model keep, by the words for it in a sentence.

    Args:
        task: all of whose attributes are digested.
        model: without parameters and buffers.
        caches: also what the model keeps that is neither a number nor a word, nor a model itself: in a list, say, which
            hides its parameters from checkpoints.
    """
    of_task = {f"self.{name}": digest for name, digest in digest_attributes(task).items()}
    found = {name: value for name, (_, _, value) in find_kept(model).items()}
    kept = {n: v for n, v in found.items() if caches or isinstance(v, _PLAIN) or _holds_modules(v)}
    return of_task | {f"'{name}' of the model": digest_value(value) for name, value in kept.items()}


def _holds_modules(value: Any) -> bool:
    inside = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return any(_is_of_torch(one, "nn.Module") for one in inside)


def _is_of_torch(value: Any, kind: str) -> bool:
    """Whether it is of this class of torch, which is not imported to see that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, attrgetter(kind)(torch))


def find_kept(model: Any) -> dict[str, tuple[Any, str, Any]]:
    """Plain attributes of a torch module and those inside, neither parameters nor buffers, by their whole name.

    Each with the module that has it, its name there, and its value; none of what is no torch module.
    """
    if not _is_of_torch(model, "nn.Module"):
        return {}
    known = {*vars(sys.modules["torch"].nn.Module())}
    return {
        f"{where}.{name}" if where else name: (part, name, value)
        for where, part in model.named_modules()
        for name, value in vars(part).items()
        if name not in known
    }


def _copy(value: Any) -> Any:
    """A copy of what is small and stands for itself, else `_NOT_COPIED`."""
    if isinstance(value, _PLAIN):
        return value
    is_known = isinstance(value, np.ndarray | list | dict | set | deque) or _is_of_torch(value, "Tensor")
    if not (is_known and _size(value) < 1e6) and not _is_generator(value):
        return _NOT_COPIED
    try:
        return copy.deepcopy(value)
    except Exception:  # an open file, a graph: it stays as it is
        return _NOT_COPIED


def _size(value: Any) -> int:
    """Bytes of an array; a guess for what is nested."""
    return int(value.nbytes) if hasattr(value, "nbytes") else 1000 * len(value)


def digest_model(model: Any) -> dict[str, int]:
    """A digest of everything that a torch model keeps beside parameters and buffers, by its whole name."""
    return {name: digest_value(value) for name, (_, _, value) in find_kept(model).items()}


def digest_value(value: Any) -> int:
    """A digest of a generator's state, or of a value; 0 of what has none, which is not watched."""
    if isinstance(value, np.random.Generator):
        return hash(repr(value.bit_generator.state))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.RandomState):
        return hash(repr(value.get_state(legacy=False)))
    if _is_of_torch(value, "Generator"):
        return checksum(value.get_state())
    try:
        return checksum(value)
    except Exception:  # what has no digest is not watched
        return 0


def _digest_generators(task: Task) -> dict[str, int]:
    return {name: digest_value(value) for name, value in vars(task).items() if _is_generator(value)}


def _digest_globals(task: Task, model: Any) -> dict[str, int]:
    """A digest of every generator among the global names of the modules that task and model were written in."""
    modules = dict.fromkeys(type(one).__module__ for one in (task, model) if one is not None)
    return {
        f"{name} of {module}": digest_value(value)
        for module in modules
        for name, value in vars(sys.modules.get(module, object)).items()
        if _is_generator(value)
    }


def _is_generator(value: Any) -> bool:
    of_numpy = isinstance(value, np.random.Generator | np.random.RandomState)
    return of_numpy or isinstance(value, random.Random) or _is_of_torch(value, "Generator")


def _name_changed(inputs: Any, call: Callable[[], Any]) -> str:
    """Which of named inputs one more call changes."""
    if not isinstance(inputs, Mapping):
        return ""
    before = {name: checksum(value) for name, value in inputs.items()}
    call()
    changed = [str(name) for name, value in inputs.items() if checksum(value) != before[name]]
    return f" ('{changed[0]}')" if changed else ""
