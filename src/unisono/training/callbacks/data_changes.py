"""Changed files: nothing is saved of data that changed while they were trained on."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.data.order.planning import Watched
from unisono.runtime.communicator import Communicator, ProcessInfo
from unisono.runtime.consensus import raise_everywhere
from unisono.runtime.errors import DataError
from unisono.training.callbacks.dispatch import LoopCallback


class DataChanges(LoopCallback):
    """Refuses to save what was made of data that change; each process of a host looks at its share of the files.

    Args:
        sources: whose files can be looked at.
        process: this one.
        communicator: of all processes.
    """

    def __init__(self, sources: Sequence[Watched], process: ProcessInfo, communicator: Communicator) -> None:
        super().__init__()
        self._sources, self._process, self._communicator = sources, process, communicator

    def before_save(self, step: int) -> None:
        """Look.

        Raises:
            DataError: on every rank, naming a file.
        """

        def check() -> None:
            for source in self._sources:
                try:
                    source.check_files(self._process.local_rank, self._process.local_world_size)
                except DataError as error:
                    raise DataError(f"{error}. What was made since the newest checkpoint is not saved") from error

        raise_everywhere(self._communicator, check, "whether the data are what they were")
