"""What decides an update beside gradients and state: draws, what the optimizer keeps elsewhere, and other elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from unisono.data.loading.draws import find_drawing_lines, global_generator_states, moved_generators
from unisono.engines.observers import ModelView
from unisono.proof.probes.state import digest_value
from unisono.proof.recording.trace import Array, RunFacts
from unisono.runtime.text import join_names

_SET_BY_ENGINE = ("params", "lr", "weight_decay")  # of a group, before every update
_ROUNDING = 1e-9  # in fp64, the precision in which a task is tried


def probe_update(
    facts: RunFacts,
    view: ModelView,
    optimizer: Any,
    gradients: Mapping[str, Array],
    load: Callable[[], None],
    update: Callable[[Mapping[str, Array]], None],
) -> None:
    """Make the second update again, and once more with other gradients for the second half of every tensor.

    Args:
        facts: to write what was found into.
        view: of the model.
        optimizer: of torch.
        gradients: of that update, whole.
        load: restores parameters and state to those before it.
        update: makes one update from gradients.
    """
    if not gradients:
        return
    load()
    states, kept = global_generator_states(), _digest_kept(optimizer)
    update(gradients)
    now, once = _digest_kept(optimizer), _first_halves(view)
    if moved := moved_generators(states):
        load()
        lines = find_drawing_lines(lambda: update(gradients))
        facts.update_draws = join_names(f"{name} ({lines[name]})" if name in lines else name for name in moved)
    facts.kept_by_optimizer = join_names(name for name in now if now[name] != kept.get(name))
    if facts.update_draws or facts.kept_by_optimizer:
        return  # then two updates differ anyway
    load()
    update({name: _change_half(gradient) for name, gradient in gradients.items()})
    facts.coupled = join_names(name for name, value in _first_halves(view).items() if _differs(value, once[name]))


def _digest_kept(optimizer: Any) -> dict[str, int]:
    """A digest of what an optimizer keeps beside its state, and beside what is set before every update."""
    import torch

    known = vars(torch.optim.SGD([torch.zeros(1)], lr=0.0))
    found = {name: digest_value(value) for name, value in vars(optimizer).items() if name not in known}
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key not in _SET_BY_ENGINE}
        found |= {f"param_groups[{number}][{key!r}]": digest_value(value) for key, value in settings.items()}
    return found


def _first_halves(view: ModelView) -> dict[str, Array]:
    whole = view.whole("parameters")
    return {name: np.ravel(value)[: np.size(value) // 2].copy() for name, value in whole.items()}


def _differs(value: Array, other: Array) -> bool:
    return bool(np.abs(value - other).max(initial=0.0) > _ROUNDING * np.abs(other).max(initial=0.0))


def _change_half(gradient: Array) -> Array:
    changed = np.array(gradient)
    flat = changed.reshape(-1)
    flat[len(flat) // 2 :] *= 3
    return changed
