"""Prevents saving a state that was trained on files that have changed since."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.order.planning import CheckableSource
from unisono.runtime.communicator import Communicator, ProcessInfo
from unisono.runtime.consensus import raise_everywhere
from unisono.runtime.errors import DataError
from unisono.training.callbacks.dispatch import LoopCallback


class DataChanges(LoopCallback):
    """Prevents saving after data files have changed; each process of a host checks its share of the files.

    Args:
        sources: those whose files can be checked.
        process: this process.
        communicator: of all processes.
    """

    def __init__(self, sources: Sequence[CheckableSource], process: ProcessInfo, communicator: Communicator) -> None:
        super().__init__()
        self._sources, self._process, self._communicator = sources, process, communicator

    def before_save(self, step: int) -> None:
        """Check the files.

        Raises:
            DataError: on every rank, naming a file.
        """

        def check() -> None:
            for source in self._sources:
                try:
                    source.check_files(self._process.local_rank, self._process.local_world_size)
                except DataError as error:
                    raise DataError(f"{error}. Training since the newest checkpoint was not saved") from error

        raise_everywhere(self._communicator, check, "whether the data are unchanged")
