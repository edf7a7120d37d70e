"""A run on one process that is given the rows and the learning rates of another run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.optim import Optimizer

from unisono.proof.recording.trace import Trace
from unisono.proof.scripts.replay.row_exchange import How, RowReplay


class ReplayedRun:
    """What a run on one process takes from another one.

    Rates are taken too: with more rows per update, a script may scale its rate, or come to the end of its schedule
    earlier. They are compared by themselves, with those of one process as it is.

    Args:
        folder: of the other run's trace.
        ranks: of it, whose rows are given.
        how: their batches are put together.
        since: the step, from 0, from which on it is given the rows of these alone, and those of all ranks before it.
        all_ranks: how many there are.
    """

    def __init__(self, folder: Path, ranks: Sequence[int], how: How, since: int, all_ranks: int) -> None:
        self.exchange = RowReplay(folder, ranks, how, since, all_ranks)
        self._rates = [step.lr[0] for step in Trace(folder).facts.steps]
        self._own: list[float | Tensor] = []

    def set_rates(self, optimizer: Optimizer, step: int) -> None:
        """Before an update: let it be made at the other run's rates."""
        groups = [group for group in optimizer.param_groups if "lr" in group]
        self._own = [one.clone() if isinstance(one := group["lr"], Tensor) else one for group in groups]
        if step < len(self._rates) and len(self._rates[step]) == len(groups):
            _set(optimizer, self._rates[step])

    def restore_rates(self, optimizer: Optimizer) -> None:
        """After it: what the script's own schedule goes on from."""
        _set(optimizer, self._own)


def _set(optimizer: Optimizer, rates: Sequence[float | Tensor]) -> None:
    groups = [group for group in optimizer.param_groups if "lr" in group]
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
