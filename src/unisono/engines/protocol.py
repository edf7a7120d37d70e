"""The engine protocol: all that the loop, evaluation and proofs know of a framework.

An engine of another framework is a module `unisono.engines.<name>.engine` with a function `create(job)`, see
`unisono.engines.create_engine`; what it has in common with the others is in `rules` and `observers`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from unisono.config.batch_split import Split
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import MicroBatch
from unisono.engines.state import Reader, Shard
from unisono.runtime.communicator import Group, Place
from unisono.task import Task

if TYPE_CHECKING:
    from unisono.engines.observers import ModelView, Observer

PREFIX = "unisono/"  # of the names of parts in a trace


@dataclass(frozen=True)
class Job:
    """What an engine is given: one process's part of a run.

    Attributes:
        task: what to train.
        config: concrete, i.e. with no `auto` left in `layout`.
        process: this one.
        communicator: of all processes; whoever starts the process starts and stops it.
        split: of the global batch.
        rows_of: the rank whose rows of the global batch this process computes, if not its own.
        guarded: whether updates are checked (`train.guard_every`); a proof compares them by itself.
    """

    task: Task
    config: RunConfig
    process: Place
    communicator: Group
    split: Split
    rows_of: int | None = None
    guarded: bool = True


class Profiler(Protocol):
    """A recorder of what a process does in its steps; off until it is started."""

    def part(self, name: str) -> AbstractContextManager[Any]:
        """The context of a part of a step; parts may lie inside of each other."""

    def start(self) -> None:
        """Record from now on."""

    def stop(self, path: Path | None) -> None:
        """Stop if it runs, and write a Chrome trace in gzip if there is a path."""


@dataclass(frozen=True)
class StepResult:
    """What one update, or one evaluation, came to, over the whole global batch and equal on every rank.

    Attributes:
        loss: Σ weight · sum / count over the terms.
        terms: each term's sum / count.
        metrics: each metric's sum / count.
        work: units of `Task.work`, summed.
        grad_norm: of the whole gradient before clipping; 0 in evaluation.
        skipped: why the update was left out; empty if it was made.
        recompiled: what was compiled again in this step, on which ranks and why; empty as it should be.
    """

    loss: float
    terms: Mapping[str, float]
    metrics: Mapping[str, float]
    work: Mapping[str, float]
    grad_norm: float = 0.0
    skipped: str = ""
    recompiled: str = ""

    @property
    def values(self) -> dict[str, float]:
        """What is reported: the loss, its terms where there are several, and the metrics."""
        terms = {f"loss/{name}": value for name, value in self.terms.items() if len(self.terms) > 1}
        return {"loss": self.loss, **terms, **self.metrics}

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are numbers that an update may be made from."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class Facts:
    """What an engine knows about the model once it is laid out.

    Attributes:
        parameters: number of trainable scalars, over all processes.
        device: its maker's name for it, e.g. `NVIDIA H200`, or `cpu`.
        kernels: which the task has chosen for it, by setting.
        updates: what the optimizer does to which parameters, a line per parameter group.
        devices: how many each process computes on.
    """

    parameters: int
    device: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    devices: int = 1


class Engine(Protocol):
    """One process's part of the computation. Every method but `state` and `observe` is collective."""

    communicator: Group

    @property
    def random(self) -> bool:
        """Whether a forward pass of this process drew random numbers so far, or mixed rows (batch norm).

        The micro-batch is then part of the mathematics.
        """

    @property
    def profiler(self) -> Profiler:
        """Of this process."""

    @property
    def view(self) -> ModelView:
        """Of the model, for observers; from `setup` on."""

    def setup(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> Facts:
        """Build, lay out, check and warm up, with the `batches` and `scalars` of step 0 even when a run is resumed."""

    def observe(self, observer: Observer) -> None:
        """Call an observer at the points of every step from now on."""

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same micro-batches; their way to the device may begin before `step` is called with them."""

    def step(self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update. `scalars` holds the scheduled values, `lr` among them.

        Raises:
            NonFiniteError: on every rank, before the update, if the loss or the gradient is not finite.
            SpikeError: on every rank, if too many updates in a row would be left out.
            MemoryExhaustedError: on the rank that ran out of memory; the others wait for it until their deadline.
        """

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Mapping[str, float], average: bool = False
    ) -> StepResult:
        """The loss and metrics of all rows together; leaves weights, mode, buffers and random state as they were.

        With the model's weights, or with their moving average in their place.
        """

    def check_replicas(self, updates: int) -> None:
        """Check, after so many updates, that processes which hold copies of something hold the same bits.

        Raises:
            GuardError: on every rank, naming the first array that differs and the ranks.
        """

    def state(self) -> list[Shard]:
        """The pieces of the state that this process has to save; those of all processes make it whole."""

    def load(self, reader: Reader, weights_only: bool = False) -> None:
        """Load a saved state. Every array must be there, with its shape, and no other.

        Or the weights and their moving average alone, where no update is to follow.
        """

    def close(self) -> None:
        """Release processes and memory."""
