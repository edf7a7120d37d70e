"""What a task's functions are tried with: a few rows, on one process, in a step that is made up or has ended."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from unisono.data.loading.checksum import checksum
from unisono.data.loading.draws import restore_global_generators
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines.observers import ModelView
from unisono.proof.recording.trace import Array
from unisono.task import Task


@dataclass(frozen=True)
class Trial:
    """A micro-batch, and all that a pass over it needs.

    Attributes:
        view: of the model.
        task: whose functions are tried.
        micro: a micro-batch of the run.
        scalars: of the step.
        floor: relative difference that is rounding.
        samples: of its rows, where these cannot be cut out of its arrays, as of a stream; else None.
    """

    view: ModelView
    task: Task
    micro: MicroBatch
    scalars: Mapping[str, float]
    floor: float
    samples: Sequence[Any] | None = None

    @contextmanager
    def undone(self) -> Iterator[None]:
        """A context after which the model, and the generators of the process, are as they were."""
        with self.view.without_side_effects(), restore_global_generators():
            yield

    def copy(self, arrays: Mapping[str, Any] | None = None) -> MicroBatch:
        """The micro-batch with arrays of its own, which a task may change; with these, if some are given."""
        return replace(self.micro, arrays=copy.deepcopy(dict(self.micro.arrays if arrays is None else arrays)))

    def take(self, rows: Sequence[int]) -> MicroBatch:
        """Some of its rows."""
        if self.samples is None:
            arrays = take_rows(self.micro.arrays, self.micro.size, rows)
        else:
            arrays = self.task.collate(copy.deepcopy([self.samples[row] for row in rows]))
        return replace(self.micro, arrays=arrays, rows=self.micro.rows[list(rows)])

    def with_samples(self, samples: Sequence[Any]) -> Trial:
        """The same that collates some rows anew, if its arrays cannot be cut by row, and these samples make them."""
        arrays = self.micro.arrays
        if self.can_take or len(samples) != self.micro.size:
            return self
        again = self.task.collate(copy.deepcopy(list(samples)))
        same = again.keys() == arrays.keys() and all(checksum(again[name]) == checksum(arrays[name]) for name in again)
        return replace(self, samples=samples) if same else self

    @property
    def can_take(self) -> bool:
        """Whether some of its rows can be had by themselves."""
        return self.samples is not None or all(is_per_row(a, self.micro.size) for a in self.micro.arrays.values())

    def draws(self) -> bool:
        """Whether a pass over the micro-batch draws random numbers; it may mark in a buffer that it was made."""
        with self.undone():
            return self.view.draws(self.micro, self.scalars)

    def outputs(self, micro: MicroBatch) -> dict[str, Array]:
        """Of a pass in training mode, by name."""
        return self.view.flatten(self.view.outputs(micro, self.scalars))

    def sums(self, micro: MicroBatch) -> dict[str, float]:
        """Of the loss; empty if a micro-batch has none of its own."""
        return self.view.sums(micro, self.scalars)

    @property
    def model(self) -> Any:
        """The torch module; None in JAX."""
        module = getattr(self.view, "module", None)
        return module if hasattr(module, "named_modules") else None

    def with_same_buffers(self) -> Trial:
        """The same with passes that all begin with the buffers that the model has now."""

        def restoring(call: Callable[..., Any]) -> Callable[..., Any]:
            def restored(*arguments: Any, **named: Any) -> Any:
                with self.view.without_side_effects():
                    return call(*arguments, **named)

            return restored

        view = copy.copy(self.view)
        for name in ("outputs", "sums", "carry", "draws"):
            setattr(view, name, restoring(getattr(view, name)))
        return replace(self, view=view)


def is_per_row(array: Any, rows: int) -> bool:
    """Whether an array has one entry for each row."""
    return getattr(array, "ndim", 0) > 0 and len(array) == rows


def take_rows(arrays: Mapping[str, Any], count: int, places: Sequence[int]) -> dict[str, Any]:
    """Copies of the rows at these places, of arrays that have one for each of `count`; others as they are."""
    chosen = list(places)
    return {name: array[chosen] if is_per_row(array, count) else array for name, array in arrays.items()}
