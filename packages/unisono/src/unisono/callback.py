"""What a user writes to act on a run: a `Callback`, called after steps, evaluations and saves, and at the end.

Every process has its own copy and calls it at the same points with the same values, so its requests normally agree.
If they do not, a request from any process applies to all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from unisono.config.schema import Settings
from unisono.config.schema.run import RunConfig
from unisono.runtime.errors import ConfigError


@dataclass(frozen=True)
class Stop:
    """End the run after this step, with a checkpoint.

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
    """Facts about the run for its callbacks.

    Attributes:
        directory: the run directory.
        config: the configuration.
        first: updates made before this start.
        steps: updates in the whole run.
        rank: number of this process.
        world_size: number of processes.
        held_out: number of rows that evaluations compute; 0 if the task holds out none.
        publish: shows something, as `publish(step, name, value)`: a text, a picture (an array of bytes or of numbers
            from 0 to 1, or a PNG as bytes), a table (a list of dictionaries), or a PNG or WAV file by its path, which
            must stay where it is. It goes to the run's events and folder, and to its trackers; it never waits for
            them, and does nothing on ranks other than 0.
        read_outputs: computes the model's outputs for samples of your own, as `read_outputs(samples, read)`, and
            returns what `read(outputs, batch)` makes of them; both are those of `Task.loss`. As in an evaluation,
            nothing of the training changes. All processes have to call it at the same point, with the same samples.
    """

    directory: Path
    config: RunConfig
    first: int
    steps: int
    rank: int = 0
    world_size: int = 1
    held_out: int = 0
    publish: Callable[[int, str, Any], None] = field(default=lambda step, name, value: None, repr=False, compare=False)
    read_outputs: Callable[[Sequence[Any], Callable[[Any, Any], Any]], Any] = field(
        default=lambda samples, read: None, repr=False, compare=False
    )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the process that prints and writes shared files."""
        return self.rank == 0


class Callback:
    """Acts on a run; every method is optional.

    A method may return a request: `Stop(reason)`, `Save()`, `Evaluate()`, or a list of them. All processes carry it out
    after this step, whichever of them made it. An exception ends the run on all processes.

    `Config` is the type of its settings, as for a `Task`. `title` is what messages call it; empty: its class.
    """

    title = ""

    class Config(Settings):
        """The config of a callback without settings."""

    def __init__(self, config: Any = None) -> None:
        if config is None:
            try:
                config = self.Config()
            except ValidationError as error:
                missing = ", ".join(str(mistake["loc"][0]) for mistake in error.errors())
                raise ConfigError(f"{type(self).__name__} needs settings: {missing}") from error
        self.config = config

    def check(self, config: RunConfig) -> None:
        """Reject a configuration that this callback cannot work with, before anything starts.

        Raises:
            ConfigError: with a message that says what to change.
        """

    def on_start(self, run: RunInfo) -> CallbackResult:
        """Before the first step of this start, after `load_state`."""

    def on_step(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        """After the `step`-th update (from 1), with its loss, metrics, gradient norm and scheduled scalars."""

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> CallbackResult:
        """After an evaluation at `step` updates, with loss and metrics on the held-out rows."""

    def on_save(self, step: int, checkpoint: Path) -> CallbackResult:
        """Once the checkpoint of a step is complete on disk, which may be some steps later."""

    def on_end(self, step: int, reason: str) -> None:
        """When this start ends, after `step` updates.

        The reason is `finished`, `stopped`, `preempted`, `interrupted` or `failed`. In the last two cases other
        processes may be gone, so do not communicate with them.
        """

    def state(self) -> Any:
        """The state that `load_state` needs on resume, as JSON, the same on every process; None if there is none."""

    def load_state(self, state: Any) -> None:
        """Restore what `state` returned when the checkpoint that the run resumes from was written."""
