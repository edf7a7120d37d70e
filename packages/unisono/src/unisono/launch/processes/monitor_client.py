"""Starts and queries the monitor of a node: from our launcher, or from the first rank on a node under another launcher.

A run does not depend on the monitor: if it cannot be started or dies too often, a warning says so, and collectives
still have their own deadline (`launch.timeout`).
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.config.schema.run import RunConfig
from unisono.runtime import heartbeat
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.console import say
from unisono.runtime.errors import DesyncError, LostError, StuckError
from unisono.runtime.files import own_folder
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object
from unisono.supervise import fault_hook, identity, monitor, processes
from unisono.supervise.hangs import hang_detection
from unisono.supervise.hangs.hang_detection import MonitorFinding, RankStatus
from unisono.supervise.monitor import Specification

_PATIENCE = 10.0  # seconds for a monitor to end on request; it may be busy killing processes
_MAX_RESTARTS = 3  # how often a monitor that died is restarted
_FINDING_CODES = (LostError.exit_code, StuckError.exit_code, DesyncError.exit_code)


class MonitorClient:
    """A monitor of the processes that this one starts.

    Attributes:
        directory: Where the processes write their heartbeats.
        count: Number of ranks on this node.
    """

    def __init__(self, config: RunConfig, folder: Path, ranks: Sequence[int], node: int = 0) -> None:
        self.directory = make_memory_directory()
        self._folder, self._ranks, self._node = folder.resolve(), list(ranks), node
        self.count = len(self._ranks)
        self._specification = _build_specification(config, self.directory, self._folder, ranks, node)
        self._killed = processes.count_oom_kills()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="unisono-monitor", daemon=True)
        self._lock = threading.Lock()

    def __enter__(self) -> MonitorClient:
        self._monitor = _spawn_monitor(self._specification, held=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        with self._lock:
            if self._monitor is not None and self._monitor.stdin is not None:
                with suppress(OSError):
                    self._monitor.stdin.write(b"\n")
                    self._monitor.stdin.close()
        self._thread.join(_PATIENCE)
        if self._monitor is not None and self._monitor.poll() is None:
            self._monitor.kill()
            self._monitor.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def read_finding(self) -> dict[str, Any] | None:
        """Return why this node's monitor ended the run; None if it did not."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = safe_paths.read_json(self.directory, monitor.FINDING_FILE, Object)
            return found
        return None

    def record_lost_rank(self, rank: int, code: int | None) -> MonitorFinding:
        """Build and record the finding about a rank that died, with an exit code as in `subprocess`."""
        found = self.read_finding() or {}
        seen = self._read_ranks()
        memory = processes.count_oom_kills() > self._killed
        record = seen[rank].record if rank in seen else None
        finding = hang_detection.describe_lost(rank, record, seen, platform.node(), code, memory)
        with suppress(OSError):
            path = monitor.finding_path(self._folder, self._node)
            monitor.write_finding(path, finding, self._node, str(found.get("stacks", "")))
        return finding

    def unfinished_ranks(self) -> list[int]:
        """Return the ranks that have not reported that they finished."""
        seen = self._read_ranks()
        return [rank for rank in self._ranks if rank not in seen or seen[rank].is_active]

    def were_done(self, ranks: Iterable[int]) -> bool:
        """Whether all ranks had done their work, and these, which ended with an error, were only leaving."""
        seen = self._read_ranks()
        done = {rank for rank, one in seen.items() if one.record.code == 0}
        return done == set(self._ranks) and done.issuperset(ranks)

    def _read_ranks(self) -> dict[int, RankStatus]:
        now = time.monotonic()
        records = {rank: heartbeat.read_record(heartbeat.heartbeat_path(self.directory, rank)) for rank in self._ranks}
        return {
            rank: RankStatus(values, "Z", now - values.since / 1e9)
            for rank, values in records.items()
            if values is not None
        }

    def _keep_running(self) -> None:
        """Restart the monitor if it dies."""
        for left in reversed(range(_MAX_RESTARTS + 1)):
            if self._monitor is None:
                return
            code = self._monitor.wait()
            with self._lock:
                if self._closing.is_set() or code in (0, *_FINDING_CODES):
                    return
                how = hang_detection.describe_death(code)
                then = "It was restarted" if left else "The run continues without one (launch.timeout still applies)"
                say(f"unisono: WARNING: the monitor (process {self._monitor.pid}) died: {how}. {then}", error=True)
                self._monitor = _spawn_monitor(self._specification, held=True) if left else None


def build_client(config: RunConfig, folder: Path, ranks: Sequence[int], node: int = 0) -> MonitorClient | None:
    """Return the monitor that a configuration asks for, if this system supports it."""
    return MonitorClient(config, folder, ranks, node) if config.launch.monitor and sys.platform == "linux" else None


@contextmanager
def monitor_rank(config: RunConfig, folder: Path, place: ProcessInfo, group: Communicator) -> Iterator[None]:
    """Let this process be monitored under torchrun or srun; the first process of each node starts the monitor.

    Raises:
        DeadlineError: If not all processes get here.
    """
    key = [platform.node(), os.environ.get("GROUP_RANK"), os.environ.get("SLURM_NODEID"), identity.machine_id()]
    directory, here = None, None
    if config.launch.monitor and group.size > 1:
        directory = str(make_memory_directory()) if place.local_rank == 0 and sys.platform == "linux" else None
        values = group.gather([key, directory], "the directories for heartbeats")
        of_node = [rank for rank, (theirs, _) in enumerate(values) if theirs == key]
        here = next((values[rank][1] for rank in of_node if values[rank][1]), None)
    if here is None or not Path(here).is_dir():
        fault_hook.install(place.rank)
        yield
        return
    heartbeat.start(here, place.rank)
    fault_hook.install(place.rank)
    nodes = list(dict.fromkeys(json.dumps(theirs) for theirs, _ in values))
    if directory is not None and directory != here:  # two hosts that cannot be told apart have one monitor
        shutil.rmtree(directory, ignore_errors=True)
    elif directory is not None:
        torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        specification = _build_specification(
            config, Path(directory), folder.resolve(), of_node, nodes.index(json.dumps(key)), len(nodes),
            agent=os.getppid() if torchrun else None,
        )  # fmt: skip
        _spawn_monitor(specification, held=False)
    try:
        yield
    except BaseException as error:
        heartbeat.stop(130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1))
        raise
    heartbeat.stop()


def _build_specification(
    config: RunConfig, directory: Path, folder: Path, ranks: Sequence[int], node: int,
    nodes: int | None = None, agent: int | None = None,
) -> Specification:  # fmt: skip
    launch = config.launch
    deadlines = {name: getattr(launch.deadlines, name) for name in type(launch.deadlines).model_fields}
    limits = {"stuck_after": launch.stuck_after, "stuck_factor": launch.stuck_factor, **deadlines}
    count = launch.nodes if nodes is None else nodes
    return Specification(
        str(directory), str(folder), list(ranks), node, count, limits, launch.straggler_factor, agent=agent
    )


def _spawn_monitor(specification: Specification, held: bool) -> subprocess.Popen[bytes] | None:
    """Start a monitor in its own session, so that signals meant for the processes do not reach it."""
    values = json.dumps({**asdict(specification), "held": held})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "unisono.supervise.monitor", values], env=_monitor_environment(os.environ), cwd="/",
            stdin=subprocess.PIPE if held else subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        say(f"unisono: WARNING: the monitor could not be started ({error}); the run continues without", error=True)
        return None


def _monitor_environment(mine: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with absolute paths, for a process with another working directory."""
    package = str(Path(heartbeat.__file__).resolve().parents[2])
    paths = [str(Path(path).resolve()) for path in mine.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**mine, "PYTHONPATH": os.pathsep.join([package, *paths])}


def make_memory_directory() -> Path:
    """Create a folder in shared memory that only this user may enter."""
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return own_folder("unisono-", memory if usable else Path(tempfile.gettempdir()))
