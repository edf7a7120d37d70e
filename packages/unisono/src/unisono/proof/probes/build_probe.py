"""Does `build` give the same model a second time, and is the model still that after the first pass?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from unisono.data.loading.checksum import checksum
from unisono.engines.observers import ModelView
from unisono.proof.recording.trace import Array, RunFacts
from unisono.runtime.text import join_names
from unisono.task import Task


def probe_build(facts: RunFacts, view: ModelView, task: Task, seed: int) -> None:
    """Build the model twice more, with the seed of the run, and compare.

    Args:
        facts: to write what was found into.
        view: of the model, in fp64, after the first pass and before the first update.
        task: whose `build` it is.
        seed: of the run.
    """
    parameters, buffers = _build(task, seed)
    again = {**parameters, **buffers}
    for name, value in {name: value for both in _build(task, seed) for name, value in both.items()}.items():
        if name not in again or checksum(value) != checksum(again[name]):
            facts.unstable_build = f"build() with the same seed gives '{name}' other values the second time"
            facts.unrepeatable = facts.unrepeatable or facts.unstable_build
            return
    now = view.whole("parameters")
    changed = [n for n, value in parameters.items() if n in now and not np.array_equal(now[n], value)]
    if changed and not facts.changed_by_passes:
        facts.changed_by_passes = f"the first pass alone, before any update, changes {join_names(changed)}"


def find_overlapping(model: Any) -> list[list[str]]:
    """Groups of parameters of a torch model that are several, and have the same memory: `b.data = a.data`."""
    by_place: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        held = getattr(parameter, "_local_tensor", parameter)  # of this process, where it is sharded
        if held.numel():
            by_place.setdefault(held.data_ptr(), []).append(name)
    return [names for names in by_place.values() if len(names) > 1]


def _build(task: Task, seed: int) -> tuple[dict[str, Array], dict[str, Array]]:
    """Parameters and buffers of a new model, in its own dtype."""
    import torch

    from unisono.engines.torch.state.train_state import build_model

    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # of a build; later the run has made it fp64
    try:
        model = build_model(task.build, seed)
    finally:
        torch.set_default_dtype(kept)

    def arrays(named: Iterable[tuple[str, Any]]) -> dict[str, Array]:
        wide = ((name, t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64)) for name, t in named)
        return {name: np.atleast_1d(tensor.numpy()) for name, tensor in wide}

    return arrays(model.named_parameters()), arrays(model.named_buffers())
