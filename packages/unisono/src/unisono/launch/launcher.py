"""What a launcher is: it runs commands somewhere, e.g. on a cluster, and reports how each ended.

    [project.entry-points."unisono.launchers"]
    local = "unisono_sweeps.launchers.local:LocalLauncher"

A launcher starts `unisono train` as a user would, so supervision, locks and checkpoints inside a run are the run's own.
It never decides what runs: runs that are finished are not passed to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from unisono.config.schema import Settings
from unisono.config.schema.run import RunConfig
from unisono.launch import layout, run_directory
from unisono.runtime.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, nearest

GROUP = "unisono.launchers"


@dataclass(frozen=True)
class Job:
    """A command to run, usually that of a run.

    Attributes:
        name: Of the run.
        command: Its program and arguments.
        folder: Of the run.
        console: File for what it prints. A launcher may keep what it knows of its jobs in the same folder.
        processes: That it starts.
        devices: Accelerators that these need; 0 for the CPU.
        workers: Of all its processes, which prepare its data.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    console: Path
    processes: int = 1
    devices: int = 0
    workers: int = 1


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        code: Exit code; 75 for one that was interrupted, and resumes when it is started again.
        seconds: That it took.
        why: Its last sentence; empty if it ended well.
    """

    code: int
    seconds: float
    why: str = ""


class Launcher(Protocol):
    """Runs jobs. Its constructor takes its `Settings`.

    Attributes:
        Settings: Its words on a command line.
        begins: What has become of a job when `started` is called, for messages, e.g. `submitted`.
    """

    Settings: type[Settings]
    begins: str

    def processes(self) -> int | None:
        """The number of processes that `layout.world_size=auto` resolves to; None if this host decides."""

    def check(self, jobs: Sequence[Job]) -> None:
        """Refuse jobs that do not fit.

        Raises:
            ConfigError: Naming what does not fit, and the remedy.
        """

    def under_way(self, consoles: Path) -> Mapping[str, str]:
        """Where jobs are that an earlier command started, by name, if they outlive the command; `run` waits for them.

        Args:
            consoles: Folder of the jobs' consoles.
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
            jobs: Taken one by one, whenever there is room for another; a sequence may be taken at once.
            started: Called when a job has started, or has been put into a queue.
            ended: Called when a job has ended; for none by a launcher that only writes what another program starts.
            stops: Asked repeatedly about each running job; if true, the job is asked to save and stop.

        Raises:
            KeyboardInterrupt: If interrupted, after the jobs under way have saved and stopped; if they outlive the
                command, its text says where they are.
        """


def find_launcher(name: str) -> Any:
    """Return the class of a launcher.

    Raises:
        ConfigError: If no installed package has it.
    """
    entries = find_entry_points(GROUP)
    if name not in entries:
        raise ConfigError(f"launcher={name}: no such launcher, {nearest(name, entries)}")
    return entries[name].load()


def resolve_layout(config: RunConfig, processes: int | None) -> RunConfig:
    """Resolve the layout of a run that a launcher starts, as far as this host can know it.

    Args:
        config: As given by the user.
        processes: Of `Launcher.processes`.

    Raises:
        ConfigError: For a layout that cannot be.
    """
    own = config.layout
    if processes is not None and own.world_size == "auto" and own.strategy not in ("single", "dp"):
        world = processes if own.device != "cpu" else 1
        config = config.model_copy(update={"layout": own.model_copy(update={"world_size": world})})
    return layout.resolve_layout(config, None)


def describe_job(name: str, command: Sequence[str], config: RunConfig, console: Path) -> Job:
    """Return the job of a run whose layout is resolved."""
    own = config.layout
    assert isinstance(own.world_size, int)
    here = own.world_size // config.launch.nodes
    each = own.devices if isinstance(own.devices, int) else 1
    workers = config.data.workers if isinstance(config.data.workers, int) else 1
    devices = 0 if own.device == "cpu" else here * each
    return Job(name, tuple(command), run_directory.run_path(config), console, here, devices, here * workers)
