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
from unisono.launch.resolving import layout, run_directory
from unisono.runtime.code.entry_points import find_entry_points
from unisono.runtime.errors import ConfigError, nearest

GROUP = "unisono.launchers"
_ACCELERATOR = "cuda"  # what `auto` may come to elsewhere; which kind it is, only that host knows


@dataclass(frozen=True)
class Hosts:
    """What a launcher reserves for each job.

    Attributes:
        nodes: Hosts of a job.
        gpus: Accelerators of each host; 0 for the CPU.
        here: Whether it is a part of this host, whose devices can be asked.
    """

    nodes: int = 1
    gpus: int = 0
    here: bool = False


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
        one_host: What to do instead where several hosts are asked for; empty if its processes may be on several.
    """

    name: str
    command: tuple[str, ...]
    folder: Path
    console: Path
    processes: int = 1
    devices: int = 0
    workers: int = 1
    one_host: str = ""


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
        waits: Whether `run` waits for jobs and reports how each ended. False for a launcher that only writes what
            another program starts: `ended` is called for none.
    """

    Settings: type[Settings]
    begins: str
    waits: bool

    def hosts(self) -> Hosts | None:
        """What a job gets; None if all of this host, as a run that is started without a launcher."""

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
            ended: Called when a job has ended.
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


def resolve_layout(config: RunConfig, hosts: Hosts | None) -> RunConfig:
    """Resolve the layout of a run by what its launcher reserves, which on other hosts is not for this one to judge.

    Args:
        config: As given by the user.
        hosts: Of `Launcher.hosts`.

    Raises:
        ConfigError: For a layout that cannot be.
    """
    own = config.layout
    if hosts is None:
        return layout.resolve_layout(config, None)
    if own.world_size == "auto" and own.strategy not in ("single", "dp"):
        world = hosts.nodes * max(1, 0 if own.device == "cpu" else hosts.gpus)
        config = config.model_copy(update={"layout": own.model_copy(update={"world_size": world})})
    device = None if hosts.here else own.device
    if device == "auto":
        here = config.layout.world_size // hosts.nodes if isinstance(config.layout.world_size, int) else 1
        device = _ACCELERATOR if hosts.gpus >= max(1, here) else "cpu"
    return layout.resolve_layout(config, None, device)


def describe_job(name: str, command: Sequence[str], config: RunConfig, console: Path) -> Job:
    """Return the job of a run whose layout is resolved."""
    own = config.layout
    assert isinstance(own.world_size, int)
    here = own.world_size // config.launch.nodes
    each = own.devices if isinstance(own.devices, int) else 1
    workers = config.data.workers if isinstance(config.data.workers, int) else 1
    devices = 0 if own.device == "cpu" else here * each
    return Job(name, tuple(command), run_directory.run_path(config), console, here, devices, here * workers)
