"""Who looks at a step without being part of it: guards, spike detection, profiling, the recorder of a proof.

An observer reads, and never changes a number: with all of them or none a run computes the same bits. It may refuse a
step, or have its update left out. Such a verdict is the same on every rank, because it follows from numbers that came
out of the one reduction that a step ends with; what a rank alone knows goes into that reduction as its votes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from unisono.data.loading.loader import MicroBatch
from unisono.engines.protocol import StepResult
from unisono.runtime.errors import UnisonoError
from unisono.task import Loss

Array = NDArray[Any]
Kind = Literal["parameters", "gradients", "optimizer state", "buffers", "EMA"]
_OFF: AbstractContextManager[Any] = nullcontext()


@dataclass(frozen=True)
class Verdict:
    """What an observer decides about a step, the same on every rank.

    Attributes:
        error: refuses the step: every rank raises it before the update.
        skip: why the update is left out.
        recompiled: what was compiled again, for the step's record.
    """

    error: UnisonoError | None = None
    skip: str = ""
    recompiled: str = ""


class Observer:
    """One observer; it overrides the points it needs. They are listed in the order in which a step comes to them."""

    def part(self, name: str) -> AbstractContextManager[Any] | None:
        """The context of a part of a step, if this observer has one for it.

        Args:
            name: `reduction`, `forward`, `backward`, `optimizer`; or `passes`, around all of a step.
        """
        return None

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """A step begins: `step` updates were made, `batches` are this process's micro-batches."""

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """A forward pass is done, and its backward pass is next, or is done with it where both are one program.

        Args:
            micro: the micro-batch.
            outputs: what the task returned; None where several devices made parts of it.
            loss: unscaled sums; None where the program of an engine does not give them apart.
        """

    def on_gradients(self) -> None:
        """All passes are done: the gradients of the step are there, reduced and not yet clipped.

        Raises:
            UnisonoError: for what this rank alone knows, and no other rank waits for.
        """

    def votes(self) -> Sequence[float]:
        """Numbers to add up over ranks in the step's reduction, which is next; as many in every step."""
        return ()

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> Verdict | None:
        """The step's result is known, and the update is next.

        Args:
            result: the same on every rank.
            votes: of all ranks, summed.
        """
        return None

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """The update is next: gradients are clipped. Not called where it is left out."""

    def on_step_end(self, step: int, result: StepResult) -> None:
        """The step is over; whether its update was made, `result.skipped` says."""


class Observers:
    """All observers of an engine, called in order; where several have a verdict, the first one counts."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Call this one too, from now on."""
        self._observers.append(observer)

    @property
    def read_outputs(self) -> bool:
        """Whether anybody wants to see what forward passes return."""
        return any(type(observer).on_forward is not Observer.on_forward for observer in self._observers)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """The contexts of a part of a step as one."""
        contexts = [context for observer in self._observers if (context := observer.part(name)) is not None]
        if len(contexts) < 2:
            return contexts[0] if contexts else _OFF
        stack = ExitStack()
        for context in contexts:
            stack.enter_context(context)
        return stack

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_step_begin(step, batches)

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_forward(micro, outputs, loss)

    def on_gradients(self) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_gradients()

    def votes(self) -> list[float]:
        """Those of all observers, one after the other."""
        votes = [list(observer.votes()) for observer in self._observers]
        self._counts = [len(own) for own in votes]
        return [vote for own in votes for vote in own]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepResult:
        """The result with everybody's verdicts in it.

        Raises:
            UnisonoError: that of the first observer that refuses the step.
        """
        first = 0
        for observer, count in zip(self._observers, self._counts, strict=True):
            verdict = observer.on_reduced(result, votes[first : first + count])
            first += count
            if verdict is None:
                continue
            if verdict.error is not None:
                raise verdict.error
            skipped, recompiled = result.skipped or verdict.skip, result.recompiled or verdict.recompiled
            result = replace(result, skipped=skipped, recompiled=recompiled)
        return result

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_update(step, scalars)

    def on_step_end(self, step: int, result: StepResult) -> None:
        """See `Observer`."""
        for observer in self._observers:
            observer.on_step_end(step, result)


class ModelView(Protocol):
    """The model of a run, as an observer sees it: by name, and whole whatever the layout."""

    module: Any  # the model itself, in the framework's own terms
    trainable: list[str]  # names of the parameters that are trained
    frozen: list[str]  # names of the others
    local_buffers: list[str]  # names of the buffers of which every process has its own
    size: int  # scalars in all parameters

    def whole(self, kind: Kind) -> dict[str, Array]:
        """Whole arrays by name, gathered on rank 0; the other ranks take part and get none. Collective."""

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient now."""

    def learning_rates(self) -> list[float]:
        """Of every parameter group, as the optimizer has them."""

    def differing_replicas(self) -> list[str]:
        """Parameters and averages of which ranks hold copies with other bits, each in a few words. Collective."""

    def digests(self) -> dict[str, Any]:
        """Of all that an evaluation may not change: by what it is, something to compare."""

    def flatten(self, outputs: Any) -> dict[str, Array]:
        """The computed arrays of what a task returned, by where they stand in it; parameters are left out."""

    def without_trace(self) -> AbstractContextManager[Any]:
        """The context of passes that do not count: buffers and random state are put back at its end."""

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        """What the task returns for a micro-batch in training, without gradients; within `without_trace`."""

    def perturb(self, size: float) -> None:
        """Change every parameter by a random relative change of at most this size, the same on every layout."""

    def update_from(self, gradients: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients, those not named being absent. No observer is called."""
