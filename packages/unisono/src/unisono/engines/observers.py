"""Observers watch a step without being part of it: guards, spike detection, profiling, the recorder of a proof.

An observer only reads: a run computes the same bits with and without observers. It may reject a step, or have its
update skipped. Such a verdict is the same on every rank, because it is computed from the results of the step's final
reduction; what only one rank knows enters that reduction as votes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from unisono.data.loading.micro_batch import MicroBatch
from unisono.runtime.errors import UnisonoError
from unisono.task import Loss

Array = NDArray[Any]
ArrayGroup = Literal["parameters", "gradients", "optimizer state", "buffers", "EMA"]
_NULL_CONTEXT: AbstractContextManager[Any] = nullcontext()


WEIGHT_FLOPS = "weight_flops"  # of `Task.work`


@dataclass(frozen=True)
class StepResult:
    """The result of one update or evaluation over the whole global batch, equal on every rank.

    Attributes:
        loss: Σ weight · sum / count over the terms.
        terms: each term's sum / count.
        metrics: each metric's sum / count.
        work: units of `Task.work`, summed.
        grad_norm: of the whole gradient before clipping; 0 in evaluation.
        skipped: why the update was skipped; empty if it was made.
        recompiled: what was recompiled in this step, on which ranks and why; normally empty.
        norms: of gradients (before clipping) and weights (before the update) by layer, if `observe.norms` asks for
            them in this step.
    """

    loss: float
    terms: Mapping[str, float]
    metrics: Mapping[str, float]
    work: Mapping[str, float]
    grad_norm: float = 0.0
    skipped: str = ""
    recompiled: str = ""
    norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float]:
        """Values to report: the loss, its terms if there are several, and the metrics."""
        terms = {f"loss/{name}": value for name, value in self.terms.items() if len(self.terms) > 1}
        return {"loss": self.loss, **terms, **self.metrics}

    def flops(self, *, adapters: bool) -> float:
        """FLOPs of both passes as the task counts them; 0 where it does not, or not what frozen weights need.

        Args:
            adapters: whether only adapters are trained, so that no other weight needs a gradient.
        """
        whole, of_weights = self.work.get("flops", 0.0), self.work.get(WEIGHT_FLOPS)
        if not adapters:
            return whole
        return 0.0 if of_weights is None else whole - of_weights

    @property
    def is_finite(self) -> bool:
        """Whether loss and gradient are finite, so that an update may be made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class StepVerdict:
    """An observer's decision about a step, the same on every rank.

    Attributes:
        error: rejects the step: every rank raises it before the update.
        skip: why the update is skipped; empty if it is not.
        recompiled: what was recompiled, for the step's record.
        norms: by layer, for the step's record.
    """

    error: UnisonoError | None = None
    skip: str = ""
    recompiled: str = ""
    norms: Mapping[str, float] = field(default_factory=dict)


class Observer:
    """Base class of observers; override the hooks you need. They are listed in calling order."""

    def part(self, name: str) -> AbstractContextManager[Any] | None:
        """A context manager around a part of a step, or None.

        Args:
            name: `reduction`, `forward`, `backward`, `optimizer`; or `passes`, around all of a step.
        """
        return None

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """A step begins: `step` updates have been made, `batches` are this process's micro-batches."""

    def on_forward(self, micro: MicroBatch, outputs: Any, loss: Loss | None) -> None:
        """A forward pass is done. Its backward pass is next, or already done if both are one program.

        Args:
            micro: the micro-batch.
            outputs: what the task returned; None if several devices each computed a part of it.
            loss: unscaled sums; None if the engine does not return them separately.
        """

    def on_gradients(self) -> None:
        """All passes are done; the step's gradients are reduced but not yet clipped.

        Raises:
            UnisonoError: for a fault that only this rank knows of, while no other rank waits for it.
        """

    def votes(self) -> Sequence[float]:
        """Numbers to sum over ranks in the step's reduction, which is next; equally many in every step."""
        return ()

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        """The step's result is known; the update is next.

        Args:
            result: the same on every rank.
            votes: of all ranks, summed.
        """
        return None

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """The update is next; gradients are clipped. Not called if the update is skipped."""

    def on_step_end(self, step: int, result: StepResult) -> None:
        """The step is over; `result.skipped` says whether its update was skipped."""


class Observers:
    """All observers of an engine, called in order; the first verdict counts."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        """Add an observer; it is called from now on."""
        self._observers.append(observer)

    @property
    def read_outputs(self) -> bool:
        """Whether any observer reads what forward passes return."""
        return any(type(observer).on_forward is not Observer.on_forward for observer in self._observers)

    def part(self, name: str) -> AbstractContextManager[Any]:
        """The contexts of a part of a step as one."""
        contexts = [context for observer in self._observers if (context := observer.part(name)) is not None]
        if len(contexts) < 2:
            return contexts[0] if contexts else _NULL_CONTEXT
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
        """The votes of all observers, concatenated."""
        votes = [list(observer.votes()) for observer in self._observers]
        self._counts = [len(own) for own in votes]
        return [vote for own in votes for vote in own]

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepResult:
        """The result with all verdicts applied.

        Raises:
            UnisonoError: from the first observer that rejects the step.
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
            norms = {**result.norms, **verdict.norms}
            result = replace(result, skipped=skipped, recompiled=recompiled, norms=norms)
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
    """The model of a run as observers see it: arrays by name, whole on any layout."""

    module: Any  # the model itself, in the framework's own terms
    trainable: list[str]  # names of the parameters that are trained
    frozen: list[str]  # names of the others
    local_buffers: list[str]  # names of the buffers that differ by process
    size: int  # scalars in all parameters
    draws_backward: bool  # whether a backward pass of `term_gradients` has drawn random numbers

    def whole(self, kind: ArrayGroup) -> dict[str, Array]:
        """Whole arrays by name, gathered on rank 0; other ranks take part and get nothing. Collective."""

    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient now."""

    def learning_rates(self) -> list[float]:
        """The optimizer's learning rate of every parameter group."""

    def find_differing_replicas(self) -> list[str]:
        """Parameters and averages whose copies differ between ranks, one short description each. Collective."""

    def digests(self) -> dict[str, Any]:
        """Digests, by name, of everything that an evaluation must not change."""

    def flatten(self, outputs: Any) -> dict[str, Array]:
        """The computed arrays in a task's outputs, by path; parameters are left out."""

    def without_side_effects(self) -> AbstractContextManager[Any]:
        """A context for passes without side effects: buffers and random state are restored on exit."""

    def outputs(self, micro: MicroBatch, scalars: Mapping[str, float]) -> Any:
        """Outputs for a micro-batch in training mode, detached; use within `without_side_effects`."""

    def sums(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, float]:
        """The loss sums for a micro-batch, used like `outputs`; empty if a micro-batch has none of its own."""

    def carry(self, micro: MicroBatch, scalars: Mapping[str, float]) -> dict[str, Array]:
        """The state that rows at their first step leave for the next, used like `outputs`; empty if none is known."""

    def draws(self, micro: MicroBatch, scalars: Mapping[str, float], training: bool = True) -> bool:
        """Whether the passes of a micro-batch draw random numbers; use within `without_side_effects`."""

    def random_digest(self) -> int:
        """A digest of the state of the generators that the passes draw from; 0 where there are none."""

    def find_differing_buffers(self) -> list[str]:
        """Buffers that should be copies and differ between ranks, one short description each. Collective."""

    def term_gradients(self, loss: Loss) -> dict[str, dict[str, Array]]:
        """By term, the gradient of its unscaled sum, for a pass whose backward is next; empty if unknown.

        The random state is restored on exit.
        """

    def perturb(self, size: float, step: int = 0) -> None:
        """Change every parameter by a random relative amount of at most `size`, the same on every layout."""

    def update_from(self, gradients: Mapping[str, Array], step: int, scalars: Mapping[str, float]) -> None:
        """Make one update from whole gradients; unnamed parameters have none. No observer is called."""
