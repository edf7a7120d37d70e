"""The recorder: an observer that writes down, at each point of a step, what layouts have to agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.loading.loader import MicroBatch
from unisono.engines.nested import leaves
from unisono.engines.observers import ModelView, Observer
from unisono.engines.protocol import StepResult
from unisono.proof.recording.output_digest import Sketch, distance, row_differs, sketches
from unisono.proof.recording.trace import Array, StepFacts, write_tensors
from unisono.runtime.communicator import Group
from unisono.task import Loss


class Recorder(Observer):
    """Writes the trace of a run: gradients before and after clipping, and the state after every update.

    Args:
        view: of the model.
        communicator: of all processes; rank 0 writes.
        folder: of the trace.

    Attributes:
        steps: the facts of every step so far.
    """

    def __init__(self, view: ModelView, communicator: Group, folder: Path) -> None:
        self._view, self._communicator, self._folder = view, communicator, folder
        self.steps: list[StepFacts] = []

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """See `Observer`."""
        self._batches, self._is_clean = batches, not self._view.has_gradients()
        self._outputs: list[dict[str, Sketch]] = []

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """Keep sketches of what the task returned."""
        self._outputs.append({} if outputs is None else sketches(self._view.flatten(outputs)))

    def on_gradients(self) -> None:
        """Keep the raw gradients; collective."""
        self._raw = self._view.whole("gradients")

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the gradients; collective."""
        clipped = self._view.whole("gradients")
        # FSDP has zeros where no process had a gradient; the engine has taken them away by now.
        self.write("raw gradients", step, {name: value for name, value in self._raw.items() if name in clipped})
        self.write("clipped gradients", step, clipped)

    def on_step_end(self, step: int, result: StepResult) -> None:
        """Write what the update made, and gather the facts of the step; collective."""
        differing = self._view.differing_replicas()
        for kind in ("optimizer state", "parameters", "buffers", "EMA"):
            self.write(kind, step, self._view.whole(kind))
        own = [
            [micro.number, micro.rows.tolist(), content(micro), outputs]
            for micro, outputs in zip(self._batches, self._outputs, strict=True)
            if not micro.idle
        ]
        mine = [own, self._view.learning_rates(), dict(result.metrics), self._is_clean]
        everyone = self._communicator.gather(mine, "the facts of a step")
        numbered = sorted((entry for rank in everyone for entry in rank[0]), key=lambda entry: entry[0])
        self.steps.append(
            StepFacts(
                rows=[row for entry in numbered for row in entry[1]],
                by_rank=[[row for entry in rank[0] for row in entry[1]] for rank in everyone],
                samples=[entry[2] for entry in numbered],
                outputs=[entry[3] for entry in numbered],
                replicas=differing,
                loss=result.loss,
                terms=dict(result.terms),
                grad_norm=result.grad_norm,
                lr=[rank[1] for rank in everyone],
                metrics=[rank[2] for rank in everyone],
                clean=all(rank[3] for rank in everyone),
            )
        )

    def write(self, moment: str, step: int | None, values: Mapping[str, Array]) -> None:
        """Write the arrays of a moment, if there are any; on rank 0."""
        if self._communicator.rank == 0 and values:
            write_tensors(self._folder, moment, step, values)


def content(micro: MicroBatch) -> str:
    """A digest of the arrays of a micro-batch."""
    digest = hashlib.sha256()
    for name, array in sorted(leaves(micro.arrays)):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def probe(view: ModelView, micro: MicroBatch, scalars: Mapping[str, float], floor: float) -> tuple[str, bool]:
    """Make a forward pass twice, and once for each of the first rows with copies of it in place of the others.

    Args:
        view: of the model.
        micro: whose rows they are.
        scalars: of the first step.
        floor: relative difference that is rounding.

    Returns:
        Why the pass cannot be repeated, empty if it can; and whether a row depends on those beside it.
    """
    count = micro.size

    def outputs(arrays: Mapping[str, Any]) -> dict[str, Array]:
        return view.flatten(view.outputs(replace(micro, arrays=dict(arrays)), scalars))

    def copies(row: int) -> dict[str, Any]:
        return {n: a[[row] * count] if _is_by_row(a, count) else a for n, a in micro.arrays.items()}

    with view.without_trace():
        once, again = outputs(micro.arrays), outputs(micro.arrays)
        alike = [(row, outputs(copies(row))) for row in range(min(count, 4)) if count > 1]
    size, name = distance(sketches(once), sketches(again))
    why = f"the same weights, rows and seeds gave another {name} in a second forward pass" if size > floor else ""
    return why, any(row_differs(once, others, row, count, floor) for row, others in alike)


def _is_by_row(array: Any, rows: int) -> bool:
    return getattr(array, "ndim", 0) > 0 and len(array) == rows
