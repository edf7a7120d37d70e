"""Errors of a step: non-finite numbers, out of memory, lost peers, differing kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from unisono.config.batch_split import BatchSplit
from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import StepResult
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.errors import DeadlineError, NonFiniteError

_PEER_ERRORS = ("Gloo", "gloo", "Connection", "oordination", "NCCL", "DEADLINE_EXCEEDED", "UNAVAILABLE")


def not_finite_error(
    group: Communicator,
    batches: Sequence[MicroBatch],
    parameters: Sequence[str],
    found: Sequence[Any],
    result: StepResult,
    step: int,
    *,
    by_term: bool,
) -> NonFiniteError:
    """The error for a step that is not finite, with what is wrong in which micro-batches; collective.

    Args:
        group: all processes.
        batches: of this process.
        parameters: names of what is trained.
        found: finite terms, rows and gradients of every micro-batch of the global batch.
        result: of the step.
        step: updates made before.
        by_term: whether the first of these are terms; else they are outputs.
    """
    terms, rows, gradients = found
    own = []
    for micro in batches:
        wrong = [
            f"term '{name}'" for name, good in zip(sorted(result.terms), terms[micro.number], strict=False) if not good
        ]
        if not by_term:
            wrong = [] if terms[micro.number].all() else [rules.OUTPUTS]
        wrong = wrong or [
            f"gradient of '{name}'" for name, good in zip(parameters, gradients[micro.number], strict=True) if not good
        ]
        if wrong:
            alone = [int(row) for row, good in zip(micro.rows, rows[micro.number], strict=False) if not good]
            own.append((micro.number, [] if micro.idle else alone or micro.rows.tolist(), wrong))
    nothing = (
        "No micro-batch gives it by itself. Either their sum overflows, or the loss multiplies by a mask what is not "
        "finite: XLA makes that 0 in one program and NaN in another, so write jnp.where(mask, x, 0) instead of x * mask"
    )
    return rules.non_finite_error(group, result, step, own, nothing)


def raise_known_error(
    error: jax.errors.JaxRuntimeError, place: ProcessInfo, split: BatchSplit, what: str, where: str
) -> None:
    """Raise a clearer error for a known JAX error.

    Raises:
        MemoryExhaustedError: where a device ran out of memory.
        DeadlineError: where another process is gone.
    """
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "RESOURCE_EXHAUSTED" in text:
        raise rules.out_of_memory_error(f"rank {place.rank}, {where}", split, first) from error
    if place.world_size > 1 and any(mark in text for mark in _PEER_ERRORS):
        raise DeadlineError(
            f"rank {place.rank} waited for {what}, but not all arrived: one is gone or stuck. Look at the logs of the "
            f"other ranks. JAX: {first}"
        ) from error
