"""The recorder: an observer that writes down, at each point of a step, what layouts have to agree on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.nested import leaves
from unisono.engines.observers import ModelView, Observer, StepResult
from unisono.proof.recording.gradient_sample import sample_elements
from unisono.proof.recording.output_digest import Sketch, build_sketches
from unisono.proof.recording.trace import Array, Part, StepFacts, write_tensors
from unisono.runtime.communication.communicator import Communicator
from unisono.task import Loss, expand_counts


class Recorder(Observer):
    """Writes the trace of a run: gradients before and after clipping, and the state after every update.

    Args:
        view: of the model.
        communicator: of all processes; rank 0 writes.
        folder: of the trace.
        of_terms: whether to keep what each micro-batch adds to the gradient, by term of the loss.
        reference: folder of the trace that this one has to equal, if there is one.

    Attributes:
        steps: the facts of every step so far.
    """

    def __init__(
        self,
        view: ModelView,
        communicator: Communicator,
        folder: Path,
        of_terms: bool = False,
        reference: Path | None = None,
    ) -> None:
        self._view, self._communicator, self._folder, self._of_terms = view, communicator, folder, of_terms
        self._reference = reference
        self.steps: list[StepFacts] = []
        self._last_draws: list[int] = []

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """See `Observer`."""
        self._batches, self._is_clean = batches, not self._view.has_gradients()
        self._outputs: list[dict[str, Sketch]] = []
        self._losses: list[Loss | None] = []
        self._draws: list[list[int]] = []
        self._term_gradients: dict[str, Array] = {}

    @contextmanager
    def _watch_draws(self) -> Iterator[None]:
        before = self._view.random_digest()
        yield
        self._last_draws = [before, self._view.random_digest()]

    def part(self, name: str) -> AbstractContextManager[Any] | None:
        """Keep digests of the random state around a forward pass; the last one before `on_forward` counts."""
        return self._watch_draws() if name == "forward" else None

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """Keep sketches of what the task returned, its sums, and the gradients of these where they are asked for."""
        self._outputs.append({} if outputs is None else build_sketches(self._view.flatten(outputs)))
        self._losses.append(loss)
        self._draws.append(self._last_draws)
        if self._of_terms and loss is not None and not micro.idle:
            for term, gradients in self._view.term_gradients(loss).items():
                sample = sample_elements(gradients)
                self._term_gradients |= {f"{term}/{micro.number}/{name}": value for name, value in sample.items()}

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
        differing, buffers = self._view.find_differing_replicas(), self._view.find_differing_buffers()
        for kind in ("optimizer state", "parameters", "buffers", "EMA"):
            self.write(kind, step, self._view.whole(kind))
        self.write("term gradients", step, self._term_gradients)
        rank = self._communicator.rank
        own = [
            [micro.number, micro.rows.tolist(), content_digest(micro), outputs, _part(micro, rank, loss), draws]
            for micro, outputs, loss, draws in zip(self._batches, self._outputs, self._losses, self._draws, strict=True)
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
                draws=[entry[5] for entry in numbered],
                buffers=buffers,
                parts=[Part(**entry[4]) for entry in numbered if entry[4]],
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
            write_tensors(self._folder, moment, step, values, self._reference)


def content_digest(micro: MicroBatch) -> str:
    """A digest of the arrays of a micro-batch."""
    digest = hashlib.sha256()
    for name, array in sorted(leaves(micro.arrays)):
        digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _part(micro: MicroBatch, rank: int, loss: Loss | None) -> dict[str, Any]:
    """What a micro-batch adds to the step, as a `Part` is made of it; empty where the engine does not tell."""
    if loss is None:
        return {}
    metrics = {f"metric/{name}": pair for name, pair in loss.metrics.items()}
    sums = {name: _as_number(value) for name, value in loss.sums.items()}
    weights = {name: float(loss.weights.get(name, 1.0)) for name in sums}
    sums |= {name: _as_number(pair[0]) for name, pair in metrics.items()}
    counts = {**expand_counts(micro.counts, loss.sums), **{name: _as_number(pair[1]) for name, pair in metrics.items()}}
    return asdict(Part(micro.number, rank, micro.size, sums, counts, weights))


def _as_number(value: Any) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)
