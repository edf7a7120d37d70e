"""Records in the ledger, after each step, which rows it consumed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from unisono.callback import RunInfo
from unisono.data.ledger import Ledger
from unisono.data.loading.loader import MicroBatch
from unisono.runtime.communicator import Communicator
from unisono.training.callbacks.dispatch import LoopCallback


class LedgerWriter(LoopCallback):
    """Writes the ledger of this process.

    Args:
        communicator: of all processes.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._ledger: Ledger | None = None
        self._consumed: list[MicroBatch] = []

    def on_start(self, run: RunInfo) -> None:
        """Open the ledger; all processes use the same name for this start."""
        name = self._communicator.gather(uuid.uuid4().hex, "a name for this start of the run")[0]
        self._ledger = Ledger(run.directory, self._communicator.rank, self._communicator.size, run.first, name)

    def set_consumed(self, micro_batches: list[MicroBatch]) -> None:
        """Keep the micro-batches of a step for `on_step`."""
        self._consumed = micro_batches

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Write what the step consumed."""
        assert self._ledger is not None
        self._ledger.step(step - 1, self._consumed)

    def before_save(self, step: int) -> None:
        """Flush the ledger to its file."""
        assert self._ledger is not None
        self._ledger.flush()

    def mark(self) -> Mapping[str, Any]:
        """The current position, for a checkpoint."""
        assert self._ledger is not None
        return self._ledger.mark()

    def close(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the ledger."""
        if self._ledger is not None:
            self._ledger.__exit__(kind, error, trace)
