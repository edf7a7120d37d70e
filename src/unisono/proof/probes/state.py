"""Why a function gives something else the second time: what it draws from, what it remembers, what it overwrites."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unisono.data.loading.checksum import checksum
from unisono.data.loading.draws import describe_draws, global_generator_states, moved_generators
from unisono.runtime.text import join_names
from unisono.task import Task

TORCH = "torch's global generator"  # which is seeded for the model and its loss, by micro-batch
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
    kept_by_model = _digest_model(model)
    generators = global_generator_states()
    call()
    moved = [name for name in moved_generators(generators) if name not in seeded]
    after = digest_attributes(task)
    changed = [name for name in after if after[name] != attributes.get(name)]
    own = [name for name in changed if _is_generator(getattr(task, name, None))]
    found = []
    if moved:
        found.append(f"it draws from {describe_draws(moved, call)}, which no key seeds")
    if own:
        found.append(f"it draws from self.{', self.'.join(own[:3])}, which no key seeds")
    if kept := [name for name in changed if name not in own]:
        found.append(f"it changes self.{', self.'.join(kept[:3])}")
    if kept := [name for name, digest in _digest_model(model).items() if digest != kept_by_model.get(name)]:
        found.append(f"it changes {join_names(kept)} of the model, no buffer")
    if checksum(inputs) != before:
        found.append(f"it changes its inputs in place{_name_changed(inputs, call)}")
    return (
        " and ".join(found)
        or "no generator of the process moves, and no attribute of the task: a clock, or state kept elsewhere?"
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
    return {name: _digest(value) for name, value in vars(task).items()}


def find_kept(model: Any) -> dict[str, tuple[Any, str, Any]]:
    """Plain attributes of a torch module and those inside, neither parameters nor buffers, by their whole name.

    Each with the module that has it, its name there, and its value; none of what is no torch module.
    """
    if "torch" not in sys.modules or not isinstance(model, sys.modules["torch"].nn.Module):
        return {}
    known = {*vars(sys.modules["torch"].nn.Module())}
    return {
        f"{where}.{name}" if where else name: (part, name, value)
        for where, part in model.named_modules()
        for name, value in vars(part).items()
        if name not in known
    }


def _digest_model(model: Any) -> dict[str, int]:
    return {name: _digest(value) for name, (_, _, value) in find_kept(model).items()}


def _digest(value: Any) -> int:
    if isinstance(value, np.random.Generator):
        return hash(repr(value.bit_generator.state))
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.RandomState):
        return hash(repr(value.get_state(legacy=False)))
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Generator):
        return checksum(value.get_state())
    try:
        return checksum(value)
    except Exception:  # what has no digest is not watched
        return 0


def _digest_generators(task: Task) -> dict[str, int]:
    return {name: _digest(value) for name, value in vars(task).items() if _is_generator(value)}


def _is_generator(value: Any) -> bool:
    kinds: tuple[type, ...] = (np.random.Generator, np.random.RandomState, random.Random)
    return isinstance(value, (*kinds, sys.modules["torch"].Generator) if "torch" in sys.modules else kinds)


def _name_changed(inputs: Any, call: Callable[[], Any]) -> str:
    """Which of named inputs one more call changes."""
    if not isinstance(inputs, Mapping):
        return ""
    before = {name: checksum(value) for name, value in inputs.items()}
    call()
    changed = [str(name) for name, value in inputs.items() if checksum(value) != before[name]]
    return f" ('{changed[0]}')" if changed else ""
