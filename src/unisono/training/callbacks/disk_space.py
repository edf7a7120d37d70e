"""Room on the disk: the checkpoints to come have to fit before the first step."""

from __future__ import annotations

from unisono.callback import RunInfo
from unisono.runtime.communicator import Communicator
from unisono.runtime.consensus import raise_everywhere
from unisono.supervise import disk_space
from unisono.training.callbacks.dispatch import LoopCallback


class DiskSpace(LoopCallback):
    """Refuses a run whose checkpoints do not fit.

    Args:
        communicator: of all processes.
        parameters: that are trained, over all processes.
    """

    def __init__(self, communicator: Communicator, parameters: int) -> None:
        super().__init__()
        self._communicator, self._parameters = communicator, parameters

    def on_start(self, run: RunInfo) -> None:
        """Look on rank 0, for all."""

        def check() -> None:
            size = disk_space.of_newest(run.directory) or disk_space.estimated(run.config, self._parameters)
            count = disk_space.planned(run.config, run.first, run.steps)
            disk_space.check(run.directory, run.config, size, count)

        raise_everywhere(self._communicator, check if run.is_first else None, "room for the checkpoints")
