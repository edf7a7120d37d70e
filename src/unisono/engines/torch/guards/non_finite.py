"""Where the first number of a step that is not finite came from: which rank, micro-batch, rows, term or gradient.

It is found out by making the passes again, which are what they were: their randomness is replayed and their buffers
are put back. Every process makes equally many, since under FSDP each of them is collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from unisono.data.loading.loader import MicroBatch
from unisono.engines.protocol import StepResult
from unisono.runtime.communicator import Group
from unisono.runtime.errors import NonFiniteError
from unisono.task import Loss

OUTPUTS = "outputs"  # all that was computed across samples followed from them
See = Callable[[str, Tensor], None]


def refuse(
    group: Group,
    batches: Sequence[MicroBatch],
    again: Callable[[MicroBatch, See], Loss],
    rows_of: Callable[[MicroBatch], list[int]],
    step: int,
    result: StepResult,
    crosses: bool,
) -> NoReturn:
    """Stop every rank with what is wrong in which micro-batches; collective.

    Args:
        group: all processes.
        batches: of this process.
        again: makes the pass of a micro-batch again, shows its gradients as the backward pass makes them, and returns
            its loss.
        rows_of: rows of a micro-batch that are wrong when they are computed alone, as far as that can be known.
        step: updates made before.
        result: of the step, whose loss or gradient is not finite.
        crosses: whether the loss crosses samples, and `rows_of` tells of outputs.

    Raises:
        NonFiniteError: always.
    """
    found = []
    finite: dict[str, bool] = {}

    def see(name: str, gradient: Tensor) -> None:
        finite[name] = finite.get(name, True) and bool(torch.isfinite(gradient).all())

    for micro in batches:
        finite.clear()
        loss = again(micro, see)
        terms = [f"term '{name}'" for name, term in loss.sums.items() if not bool(torch.isfinite(term))]
        wrong = terms or [f"gradient of '{name}'" for name, good in finite.items() if not good]
        alone = rows_of(micro)
        wrong = [OUTPUTS] if alone and crosses else wrong
        if wrong and not micro.idle:
            rows = [int(micro.rows[row]) for row in alone] or micro.rows.tolist()
            found.append([group.rank, micro.number, rows, wrong[:3]])
    what = "gradient" if math.isfinite(result.loss) else "loss"
    raise NonFiniteError(f"step {step + 1}: the {what} is not finite, {at_fault(group, found)}")


def rows_alone(micro: MicroBatch, count: int, loss_of: Callable[[MicroBatch], Loss]) -> list[int]:
    """Rows of a micro-batch whose loss is not finite when they are computed alone.

    Args:
        micro: whose arrays can be cut by row.
        count: passes to make, the same for every process.
        loss_of: makes a pass of one row.
    """
    wrong = set()
    for row in (turn % len(micro.rows) for turn in range(count)):
        if not all(bool(torch.isfinite(term)) for term in loss_of(micro.one(row)).sums.values()):
            wrong.add(row)
    return sorted(wrong)


def at_fault(group: Group, own: list[list[Any]]) -> str:
    """What of which micro-batches is not finite, in words; collective.

    Args:
        group: all processes.
        own: rank, number, source rows, and what is wrong, of each such micro-batch of this process.
    """
    everyone = [entry for entries in group.gather(own, "where the step is not finite") for entry in entries]
    everyone = [entry for entry in everyone if entry[3] == [OUTPUTS]] or everyone
    where = "; ".join(
        f"rank {rank}, micro-batch {number}, source rows {rows}: {', '.join(what)}"
        for rank, number, rows, what in everyone
    )
    where = where or "No micro-batch alone is at fault: the sum overflows"
    return f"and the parameters were left as they were. {where}"
