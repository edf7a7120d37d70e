"""What a user writes to act on a run: a `Callback`, called after steps, evaluations and saves, and at the end.

Every process has its own copy and calls it at the same points with the same values, so what it asks for is the same
everywhere; where it is not, what one asks for counts for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.config.schema.base import Settings
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError


@dataclass(frozen=True)
class Stop:
    """End the run after this step, saved.

    Attributes:
        reason: for the log, e.g. `loss has not improved for 3 evaluations`.
    """

    reason: str = ""


@dataclass(frozen=True)
class Save:
    """Write a checkpoint after this step.

    Attributes:
        reason: for the log.
    """

    reason: str = ""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate on the held-out rows after this step.

    Attributes:
        reason: for the log.
    """

    reason: str = ""


CallbackRequest = Stop | Save | Evaluate
CallbackResult = CallbackRequest | Sequence[CallbackRequest] | None  # what a method of a callback may return


@dataclass(frozen=True)
class RunInfo:
    """What a callback may know of its run.

    Attributes:
        directory: of the run.
        config: its configuration.
        first: updates made before this start.
        steps: updates in the whole run.
        rank: number of this process.
        world_size: number of processes.
    """

    directory: Path
    config: RunConfig
    first: int
    steps: int
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the process that prints and writes what is written once."""
        return self.rank == 0


class Callback:
    """Acts on a run; every method may be left out.

    A method may return what it asks for: `Stop(reason)`, `Save()`, `Evaluate()`, or a list of them. It is done after
    this step by all processes, whichever of them asked. An exception ends the run on all of them.

    `Config` is the type of its settings, as for a `Task`.
    """

    class Config(Settings):
        """The settings of a callback that has none."""

    def __init__(self, config: Any = None) -> None:
        if config is None:
            try:
                config = self.Config()
            except ValidationError as error:
                missing = ", ".join(str(mistake["loc"][0]) for mistake in error.errors())
                raise ConfigError(f"{type(self).__name__} needs settings: {missing}") from error
        self.config = config

    def check(self, config: RunConfig) -> None:
        """Refuse a configuration that this callback cannot work with, before anything starts.

        Raises:
            ConfigError: saying what to change.
        """

    def on_start(self, run: RunInfo) -> CallbackResult:
        """Before the first step of this start, after `load_state`."""

    def on_step(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        """After an update, the `step`-th from 1, with its loss, metrics, gradient norm and scheduled scalars."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        """After an evaluation, `step` updates made, with loss and metrics on the held-out rows."""

    def on_save(self, step: int, checkpoint: Path) -> CallbackResult:
        """Once the checkpoint of a step is whole on the disk; that may be some steps later."""

    def on_end(self, step: int, reason: str) -> None:
        """At the end of this start, `step` updates made.

        The reason is `finished`, `stopped`, `preempted`, `interrupted` or `failed`. With the last two, other processes
        may be gone, so nothing may be exchanged with them.
        """

    def state(self) -> Any:
        """What `load_state` needs in a resumed run, as JSON, the same on every process; None for nothing."""

    def load_state(self, state: Any) -> None:
        """Take over what `state` returned when the checkpoint was written from which the run resumes."""
