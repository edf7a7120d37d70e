"""Is a forward pass the same each time, and does a row depend on the rows beside it? And does an evaluation draw?"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.data.loading.draws import find_drawing_lines, restore_global_generators
from unisono.data.loading.loader import MicroBatch
from unisono.engines.observers import ModelView
from unisono.proof.probes.state import TORCH, describe_state
from unisono.proof.recording.output_digest import build_sketches, mixed_rows, row_differs, sketch_distance
from unisono.proof.recording.recorder import is_per_row
from unisono.proof.recording.trace import Array
from unisono.task import Task

_FEW = 16  # rows, each of which a pass is made for where they are mixed
_ROUNDING = 1e-4  # what kernels that add in another order each time stay below


@dataclass(frozen=True)
class ModelProbe:
    """What a few forward passes say of a model.

    Attributes:
        unrepeatable: why the pass cannot be repeated, empty if it can.
        unstable: the same where it is more than rounding, and no buffer that the pass reads and changes.
        neighbours: whether a row depends on those beside it.
        mixed: what it returns with the numbers of other rows in a row's place; empty for nothing.
    """

    unrepeatable: str = ""
    unstable: str = ""
    neighbours: bool = False
    mixed: str = ""


def probe_model(
    view: ModelView, task: Task, micro: MicroBatch, scalars: Mapping[str, float], floor: float
) -> ModelProbe:
    """Make a forward pass twice, and once for each of the first rows with copies of it in place of the others.

    Args:
        view: of the model.
        task: whose model it is.
        micro: whose rows they are.
        scalars: of the first step.
        floor: relative difference that is rounding.
    """
    count = micro.size

    def outputs(arrays: Mapping[str, Any] = micro.arrays) -> dict[str, Array]:
        return view.flatten(view.outputs(replace(micro, arrays=copy.deepcopy(dict(arrays))), scalars))

    def copies(row: int) -> dict[str, Any]:
        return {n: a[[row] * count] if is_per_row(a, count) else a for n, a in micro.arrays.items()}

    with view.without_side_effects(), restore_global_generators():
        once, again = outputs(), outputs()
        size, name = sketch_distance(build_sketches(once), build_sketches(again))
        if size > floor:
            said = f"a second forward pass with the same weights, rows and seeds gave another {name}"
            if buffers := _changed_buffers(view, outputs):
                return ModelProbe(f"{said}: it reads a buffer that it changes ({', '.join(buffers[:3])})")
            said = f"{said}; {describe_state(task, outputs, micro.arrays)}"
            return ModelProbe(said, said if size > _ROUNDING else "")
        alike = [(row, outputs(copies(row))) for row in range(min(count, 4)) if count > 1]
        neighbours = any(row_differs(once, others, row, count, floor) for row, others in alike)
        mixed = ""
        if neighbours and count <= _FEW:
            alike += [(row, outputs(copies(row))) for row in range(len(alike), count)]
            by_row = {
                n: np.stack([others[n][row] for row, others in alike]) for n, a in once.items() if is_per_row(a, count)
            }
            mixed = mixed_rows(once, by_row, floor)
    return ModelProbe(neighbours=neighbours, mixed=mixed)


def _changed_buffers(view: ModelView, outputs: Any) -> list[str]:
    """The buffers that a pass changes, if passes that begin with the same ones are the same."""
    with view.without_side_effects():
        before = {name: buffer.copy() for name, buffer in view.whole("buffers").items()}
        once = build_sketches(outputs())
        after = view.whole("buffers")
        changed = [name for name in after if not np.array_equal(before[name], after[name])]
    with view.without_side_effects():
        again = build_sketches(outputs())
    return changed if sketch_distance(once, again)[0] == 0 else []


def probe_evaluation(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float]) -> str:
    """Where the evaluation of a held-out micro-batch draws random numbers; empty if it does not."""
    with view.without_side_effects(), restore_global_generators():
        if not view.draws(micro, scalars, training=False):
            return ""
        line = find_drawing_lines(lambda: view.draws(micro, scalars, training=False)).get(TORCH, "")
    return f"outputs() or loss() draws in evaluation{f' ({line})' if line else ''}"
