"""Checks before the first step that the run's checkpoints will fit on the disk."""

from __future__ import annotations

from unisono.callback import RunInfo
from unisono.runtime.communicator import Communicator
from unisono.runtime.consensus import raise_everywhere
from unisono.supervise import disk_space
from unisono.training.callbacks.dispatch import LoopCallback


class DiskSpace(LoopCallback):
    """Rejects a run whose checkpoints would not fit on the disk.

    Args:
        communicator: of all processes.
        parameters: number of trained parameters, over all processes.
    """

    def __init__(self, communicator: Communicator, parameters: int) -> None:
        super().__init__()
        self._communicator, self._parameters = communicator, parameters

    def on_start(self, run: RunInfo) -> None:
        """Check on rank 0 for all ranks."""

        def check() -> None:
            size = disk_space.newest_size(run.directory) or disk_space.estimate_size(run.config, self._parameters)
            count = disk_space.count_checkpoints(run.config, run.first, run.steps)
            disk_space.check_disk_space(run.directory, run.config, size, count)

        raise_everywhere(self._communicator, check if run.is_first else None, "disk space for the checkpoints")
