"""What a launcher is: it runs the commands of runs somewhere, and reports how each ended.

    [project.entry-points."unisono.launchers"]
    local = "unisono_sweeps.launchers.local:LocalLauncher"

A launcher starts `unisono train` as a user would, so supervision, locks and checkpoints inside a run are the run's own.
It never decides what runs: runs that are finished are not passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unisono.config.schema.base import Settings
from unisono.runtime.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, nearest

GROUP = "unisono.launchers"


@dataclass(frozen=True)
class Job:
    """A run to start.

    Attributes:
        name: of the run.
        command: its program and arguments.
        folder: of the run.
        console: file for what it prints.
        processes: that it starts on this host.
        devices: accelerators that it needs on this host; 0 for the CPU.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    console: Path
    processes: int = 1
    devices: int = 0


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: exit code.
        seconds: that it took.
        why: its last sentence; empty if it ended well.
    """

    code: int
    seconds: float
    why: str = ""


class Launcher(Protocol):
    """Runs jobs. Its constructor takes its `Settings`."""

    Settings: type[Settings]

    def processes(self) -> int | None:
        """The number of processes that `layout.world_size=auto` resolves to; None if a run's own host decides."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse jobs that do not fit.

        Raises:
            ConfigError: naming what does not fit, and the remedy.
        """

    def run(
        self,
        jobs: Iterable[Job],
        started: Callable[[Job], None],
        ended: Callable[[Job, Ended], None],
        stops: Callable[[Job], bool] | None = None,
    ) -> None:
        """Run all jobs, and return when the last one has ended; a failed one does not end the others.

        Args:
            jobs: taken one by one, whenever there is room for another.
            started: called when a job has started.
            ended: called when a job has ended.
            stops: asked repeatedly about each running job; if true, the job is asked to save and stop.

        Raises:
            KeyboardInterrupt: if interrupted, after the jobs under way have saved and stopped.
        """


def find_launcher(name: str) -> Any:
    """The class of a launcher.

    Raises:
        ConfigError: if no installed package has it.
    """
    entries = find_entry_points(GROUP)
    if name not in entries:
        raise ConfigError(f"launcher={name}: no such launcher, {nearest(name, entries)}")
    return entries[name].load()
