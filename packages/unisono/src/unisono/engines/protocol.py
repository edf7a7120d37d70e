"""The engine protocol: everything that the loop, evaluation and proofs know about a framework.

An engine for another framework is a module `unisono.engines.<name>.engine` with a function `create(job)`, see
`unisono.engines.create_engine`; code shared by all engines is in `rules` and `observers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import ModelView, Observer, StepResult
from unisono.engines.state import ArrayShard, StateReader
from unisono.protocols import TaskFeatures, resolve_features
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.task import Batch, Task

TRACE_PREFIX = "unisono/"  # of the region names in a trace


@dataclass(frozen=True)
class EngineJob:
    """The input of an engine: one process's part of a run.

    Attributes:
        task: what to train.
        config: resolved, i.e. with no `auto` left in `layout`.
        process: this process.
        communicator: of all processes; started and stopped by the caller.
        split: of the global batch.
        rows_of_rank: the rank whose rows of the global batch this process computes; None for its own.
        check_updates: whether updates are checked (`train.guard_every`); a proof compares them itself.
    """

    task: Task
    config: RunConfig
    process: ProcessInfo
    communicator: Communicator
    split: BatchSplit
    rows_of_rank: int | None = None
    check_updates: bool = True

    @cached_property
    def features(self) -> TaskFeatures:
        """What the task can do beyond the methods that every task has."""
        return resolve_features(self.task)


class Profiler(Protocol):
    """A profiler of one process; off until started."""

    def part(self, name: str) -> AbstractContextManager[Any]:
        """A context manager around a part of a step; parts may be nested."""

    def start(self) -> None:
        """Record from now on."""

    def stop(self, path: Path | None) -> None:
        """Stop if running, and write a gzipped Chrome trace if a path is given."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model once it is laid out.

    Attributes:
        parameters: number of trainable scalars, over all processes.
        frozen: number of scalars that are not trained, such as those of a base with adapters.
        device: product name, e.g. `NVIDIA H200`, or `cpu`.
        kernels: chosen by the task, by setting.
        updates: how each parameter group is updated, one line per group.
        devices: number of devices per process.
        moments: which of the optimizer's it begins with, in words; empty for new ones, and for a resumed run.
    """

    parameters: int
    device: str
    kernels: Mapping[str, str] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    devices: int = 1
    frozen: int = 0
    moments: str = ""


class Engine(Protocol):
    """One process's part of the computation. Every method but `state` and `observe` is collective."""

    communicator: Communicator

    @property
    def random(self) -> bool:
        """Whether any forward pass of this process has drawn random numbers or mixed rows (batch norm).

        The micro-batch is then part of the mathematics.
        """

    @property
    def profiler(self) -> Profiler:
        """The profiler of this process."""

    @property
    def view(self) -> ModelView:
        """A view of the model for observers; available after `setup`."""

    def setup(self, batches: list[MicroBatch], scalars: Mapping[str, float]) -> ModelFacts:
        """Build, lay out, check and warm up, with `batches` and `scalars` of step 0, even for a resumed run."""

    def observe(self, observer: Observer) -> None:
        """Call an observer at the points of every step from now on."""

    def incoming(self, steps: Iterator[list[MicroBatch]]) -> Iterator[list[MicroBatch]]:
        """The same micro-batches; copying them to the device may start before `step` is called with them."""

    def step(self, batches: list[MicroBatch], step: int, scalars: Mapping[str, float]) -> StepResult:
        """One update. `scalars` holds the scheduled values, `lr` among them.

        Raises:
            NonFiniteError: on every rank, before the update, if the loss or the gradient is not finite.
            SpikeError: on every rank, if too many updates in a row would be skipped.
            MemoryExhaustedError: on the rank that ran out of memory; the others wait for it until their deadline.
        """

    def evaluate(
        self, steps: Iterable[list[MicroBatch]], step: int, scalars: Mapping[str, float], average: bool = False
    ) -> StepResult:
        """The loss and metrics of all rows together; weights, mode, buffers and random state stay unchanged.

        Uses the model's weights, or their moving average if `average` is set.
        """

    def read_outputs(
        self, micro: MicroBatch, step: int, scalars: Mapping[str, float], read: Callable[[Any, Batch], Any]
    ) -> Any:
        """What `read(outputs, batch)` makes of the task's outputs for rows, as an evaluation computes them.

        All processes call it together, each with rows of the same shape, so that layouts which shard can gather.

        Raises:
            ConfigError: in JAX, which compiles what it computes.
        """

    def peak_memory(self) -> int | None:
        """Peak bytes of this process so far, on its accelerator if it has one; None if unknown. Not collective."""

    def check_replicas(self, updates: int) -> None:
        """Check, after `updates` updates, that all copies of the same array hold the same bits.

        Raises:
            GuardError: on every rank, naming the first array that differs and the ranks.
        """

    def state(self) -> list[ArrayShard]:
        """The pieces of the state that this process saves; together, all processes save all of it."""

    def load(self, reader: StateReader, weights_only: bool = False) -> None:
        """Load a saved state. Exactly the expected arrays must be present, with their shapes.

        With `weights_only`, load only the weights and their moving average; no update may follow.
        """

    def load_moments(self, path: Path) -> str:
        """Begin with the moments of Adam in a file, where names and shapes fit; what does not is warned of.

        Returns:
            What was taken, in words.

        Raises:
            CheckpointError: if it cannot be read.
            ConfigError: if none of them fits; in JAX, whose moments have other names.
        """

    def close(self) -> None:
        """Release processes and memory."""
