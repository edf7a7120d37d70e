"""Finds where a step first became non-finite: which rank, micro-batch, rows, term or gradient.

The passes are repeated exactly as they were: their randomness is replayed and their buffers
are restored. Every process runs equally many, since under FSDP each pass is collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from unisono.data.loading.micro_batch import MicroBatch
from unisono.engines import rules
from unisono.engines.observers import Observer, StepResult, StepVerdict
from unisono.engines.torch.parts import EngineParts
from unisono.engines.torch.passes import Passes
from unisono.engines.torch.state.train_state import TrainState
from unisono.task import Loss


class NonFiniteSearch(Observer):
    """Refuses a step whose loss or gradient is not finite, and says where that began."""

    def __init__(self, parts: EngineParts, state: TrainState, passes: Passes) -> None:
        self._communicator = parts.job.communicator
        self._state, self._passes, self._recurrent = state, passes, parts.recurrent

    def on_step_begin(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """See `Observer`."""
        self._step, self._batches = step, batches

    def on_reduced(self, result: StepResult, votes: Sequence[float]) -> StepVerdict | None:
        """Refuse the step if it is not finite; collective then."""
        if result.is_finite:
            return None
        self._state.optimizer.zero_grad(set_to_none=True)
        found = []
        mine = max(len(micro.rows) for micro in self._batches)
        self._most_rows = max(self._communicator.gather(mine, "the rows of the largest micro-batches"))
        for micro in self._batches:
            what, rows = self._search(micro)
            if what and not micro.idle:
                rows = [int(micro.rows[row]) for row in rows] or micro.rows.tolist()
                found.append((micro.number, rows, what))
        nothing = "No single micro-batch is at fault: the sum overflows"
        return StepVerdict(rules.non_finite_error(self._communicator, result, self._step, found, nothing))

    def _search(self, micro: MicroBatch) -> tuple[list[str], list[int]]:
        """What is not finite in a micro-batch, and in which rows if that can be determined; collective."""
        finite: dict[str, bool] = {}

        def see(name: str, gradient: Tensor) -> None:
            finite[name] = finite.get(name, True) and bool(torch.isfinite(gradient).all())

        loss = self._passes.repeat(micro, see)
        terms = [f"term '{name}'" for name, term in loss.sums.items() if not bool(torch.isfinite(term))]
        what = terms or [f"gradient of '{name}'" for name, good in finite.items() if not good]
        if self._passes.cross_sample is not None:
            rows = [] if micro.idle else self._passes.cross_sample.rows_not_finite(micro)
            return [rules.OUTPUTS] if rows else what, rows
        # If rows are normalised together or have a state, a row computed alone gives a different result.
        together = any(isinstance(module, _BatchNorm) for module in self._state.module.modules())
        if together or self._recurrent or not micro.by_row:
            return what, []
        rows = find_bad_rows(micro, self._most_rows, self._passes.compute_row_loss)
        self._state.parallel.reshard()
        return what, rows


def find_bad_rows(micro: MicroBatch, count: int, loss_of: Callable[[MicroBatch], Loss]) -> list[int]:
    """Rows of a micro-batch whose loss is not finite when computed alone; runs `count` passes on every rank."""
    wrong = set()
    for row in (turn % len(micro.rows) for turn in range(count)):
        if not all(bool(torch.isfinite(term)) for term in loss_of(micro.select_row(row)).sums.values()):
            wrong.add(row)
    return sorted(wrong)
