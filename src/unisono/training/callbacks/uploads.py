"""Uploads finished checkpoints to the store; the end of the run waits for the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from unisono.callback import RunInfo
from unisono.checkpoint.remote.upload import Uploads
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Communicator
from unisono.supervise.step_sync import Decision
from unisono.training.callbacks.dispatch import LoopCallback
from unisono.training.callbacks.telemetry import Telemetry


class CheckpointUploads(LoopCallback):
    """Hands finished checkpoints over to the upload process.

    Args:
        communicator: of all processes.
        telemetry: shows and records the outcome.
    """

    def __init__(self, communicator: Communicator, telemetry: Telemetry) -> None:
        super().__init__()
        self._communicator, self._telemetry = communicator, telemetry
        self._uploads: Uploads | None = None
        self._url: str | None = None

    def on_start(self, run: RunInfo) -> None:
        """Start the upload process, which resumes uploads of an earlier start."""
        telemetry = self._telemetry
        self._url = run.config.checkpoint.upload.url
        self._uploads = Uploads(run.config, run.directory, run.is_first, telemetry.say, telemetry.note)

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Report uploads finished or failed since the last step."""
        assert self._uploads is not None
        self._uploads.check()

    def on_save(self, step: int, checkpoint: Path) -> None:
        """Hand a checkpoint over; rank 0 uploads those of all ranks."""
        assert self._uploads is not None
        self._uploads.enqueue(checkpoint)

    def wait(self, decision: Decision, decide: Callable[[], Decision]) -> bool:
        """Wait for the last upload, all ranks together, but no longer than a preempted run may.

        Args:
            decision: the latest decision of all ranks.
            decide: makes a new decision.

        Returns:
            Whether a preemption cut the wait short.

        Raises:
            UploadError: if it is not uploaded in time, and must be.
        """
        assert self._uploads is not None
        if self._url is None:
            return False
        waits = True
        while waits and decision.seconds_left > 0:
            with heartbeat.phase("save", "the last upload"):
                seconds = max(0.0, min(1.0, decision.seconds_left))
                waits = bool(self._communicator.reduce_max([int(self._uploads.wait(seconds))], "the last upload")[0])
            decision |= decide()
        self._uploads.finish(required=not decision.preempted)
        return waits

    def on_end(self, step: int, reason: str) -> None:
        """Stop the upload process; the next start resumes unfinished uploads."""
        if self._uploads is not None:
            self._uploads.close()
