"""`launcher=local`: some runs at a time on this host, each with its share of the cores and accelerators.

A core belongs to one run at a time, and so does an accelerator unless `share_devices=true`. The shares depend only on
`jobs` and this host, so a run that is resumed gets as many threads as before, and its numbers stay the same.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, PositiveInt

from unisono.config import schema
from unisono.engines.torch import devices
from unisono.launch.launcher import Ended, Hosts, Job
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import ConfigError
from unisono.runtime.untrusted import safe_writing
from unisono.supervise.processes import die_with_process
from unisono_sweeps.launchers.console import interrupted_by_signals, last_sentence

_VISIBLE = "CUDA_VISIBLE_DEVICES"  # which PyTorch for ROCm reads too
_POLL = 0.1  # seconds
_GRACE = 120.0  # seconds for runs to save and stop


@dataclass(frozen=True)
class Share:
    """What a run may use of this host.

    Attributes:
        cores: numbers of them; empty where a system does not let them be chosen.
        threads: that fit.
        devices: of its accelerators, as their variable names them; None for a host without any.
    """

    cores: tuple[int, ...]
    threads: int
    devices: tuple[str, ...] | None = None


def divide_host(jobs: int, cores: Sequence[int], visible: Sequence[str], *, share_devices: bool = False) -> list[Share]:
    """What each of several runs may use.

    >>> [share.cores for share in divide_host(2, [0, 1, 2, 3], [])]
    [(0, 1), (2, 3)]
    >>> [share.devices for share in divide_host(2, [0, 1], ["4", "5", "6"])]
    [('4',), ('5',)]
    """
    each, gpus = len(cores) // jobs, len(visible) // jobs
    shares = []
    for number in range(jobs):
        own: tuple[str, ...] | None = None
        if visible and share_devices:
            own = (visible[number % len(visible)],)
        elif visible:
            own = tuple(visible[number * gpus : (number + 1) * gpus])
        shares.append(Share(tuple(cores[number * each : (number + 1) * each]), each, own))
    return shares


def _some_cores(count: int) -> list[int]:
    """So many cores, which a container's quota may make fewer than there are.

    They stand anywhere among all of them, since other containers of the host would take the first ones too.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(count))
    first = random.randrange(len(cores) - count + 1)
    return cores[first : first + count]


class LocalLauncher:
    """Runs jobs on this host; see `unisono.launch.launcher.Launcher`."""

    class Settings(schema.Settings):
        """The words of `launcher=local`."""

        jobs: PositiveInt = Field(1, description="runs at a time")
        share_devices: bool = Field(False, description="let several runs use the same accelerator")

    begins, waits = "started", True

    def __init__(self, settings: Settings) -> None:
        self._jobs = settings.jobs
        cores = _some_cores(usable_cores())
        if self._jobs > len(cores):
            raise ConfigError(f"jobs={self._jobs}: this host has {len(cores)} usable cores; use jobs={len(cores)}")
        kind, count = devices.accelerators()
        if count and kind != "cuda" and self._jobs > 1:
            raise ConfigError(
                f"jobs={self._jobs}: the {kind} devices of this host cannot be divided among runs; use jobs=1"
            )
        self._count = count
        visible = (os.environ.get(_VISIBLE) or ",".join(map(str, range(count)))).split(",")[:count]
        self._shares = divide_host(self._jobs, cores, visible, share_devices=settings.share_devices)

    def hosts(self) -> Hosts | None:
        """See the interface: a run's share of this host's accelerators, if there are any."""
        own = self._shares[0].devices
        return None if own is None else Hosts(1, len(own), here=True)

    def check(self, jobs: Sequence[Job]) -> None:
        """See the interface."""
        share = self._shares[0]
        for job in jobs:
            if job.devices and share.devices is not None and job.devices > len(share.devices):
                remedy = "or share_devices=true" if job.devices == 1 else "or a smaller layout.world_size"
                raise ConfigError(
                    f"jobs={self._jobs}: {job.name} needs {job.devices} of this host's {self._count} accelerators, and "
                    f"its share is {len(share.devices)}; use jobs={max(1, self._count // job.devices)}, {remedy}"
                )
            if self._jobs > 1 and job.processes > share.threads:
                raise ConfigError(
                    f"jobs={self._jobs}: {job.name} has {job.processes} processes, and its share of this host is "
                    f"{share.threads} core{'s' * (share.threads != 1)}; use a smaller jobs="
                )

    def under_way(self, consoles: Path) -> Mapping[str, str]:
        """None: jobs on this host end with the command."""
        return {}

    def run(
        self,
        jobs: Iterable[Job],
        started: Callable[[Job], None],
        ended: Callable[[Job, Ended], None],
        stops: Callable[[Job], bool] | None = None,
    ) -> None:
        """See the interface."""
        waiting, running = iter(jobs), dict[int, _Process]()
        try:
            with interrupted_by_signals():
                while True:
                    for slot in range(self._jobs):
                        if slot not in running and (job := next(waiting, None)) is not None:
                            running[slot] = _Process(job, self._shares[slot])
                            started(job)
                    if not running:
                        return
                    for slot, process in list(running.items()):
                        if process.has_ended():
                            del running[slot]
                            ended(process.job, process.outcome())
                        elif stops is not None and stops(process.job):
                            process.signal(signal.SIGTERM)
                    time.sleep(_POLL)
        finally:
            _stop(list(running.values()), ended)


class _Process:
    def __init__(self, job: Job, share: Share) -> None:
        self.job = job
        self._began = time.monotonic()
        job.console.parent.mkdir(parents=True, exist_ok=True)
        environment = dict(os.environ)
        if share.devices is not None:
            environment[_VISIBLE] = ",".join(share.devices)
        if not hasattr(os, "sched_setaffinity"):
            environment["OMP_NUM_THREADS"] = str(share.threads)
        launcher = os.getpid()

        def confine() -> None:
            if share.cores and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, share.cores)
            die_with_process(launcher)

        with safe_writing.open_to_append(job.console.parent, job.console.name) as console:
            self._process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches this process alone, which stops the runs in order
                preexec_fn=confine,
            )

    def has_ended(self) -> bool:
        """Whether its process has."""
        return self._process.poll() is not None

    def outcome(self) -> Ended:
        """How it ended."""
        code = self._process.wait()
        why = "" if code == 0 else last_sentence(self.job.console, code)
        return Ended(code, time.monotonic() - self._began, why)

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def _stop(processes: Sequence[_Process], ended: Callable[[Job, Ended], None]) -> None:
    """Let the runs under way save and stop; kill those that do not."""
    for process in processes:
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + _GRACE
    for process in processes:
        while not process.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL)
        if not process.has_ended():
            process.signal(signal.SIGKILL)
        ended(process.job, process.outcome())
