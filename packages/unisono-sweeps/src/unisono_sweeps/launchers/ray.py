"""`launcher=ray`: runs on the hosts of a Ray cluster that exists, each with a placement group of its own.

Ray reserves the cores and accelerators and starts one actor for each host of a run; the actor starts `unisono train`,
which starts the processes of its host and meets the other hosts as `launch.nodes` says. The actors end with the
command, and the runs with the actors.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from unisono.config import schema
from unisono.config.schema import Positive
from unisono.launch.launcher import Ended, Hosts, Job
from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.console import say
from unisono.runtime.errors import ConfigError
from unisono.runtime.untrusted import safe_writing
from unisono.supervise.processes import die_with_process
from unisono_sweeps.launchers.console import interrupted_by_signals, last_sentence
from unisono_sweeps.launchers.hosts import console_of, join_words, list_cores, refuse_misfit

_POLL = 0.5  # seconds
_GRACE = 120.0  # seconds for runs to save and stop
_CONNECT = 10.0  # seconds
_LOST = 9  # the exit code of a run whose host is gone
_LONGEST = 200  # characters of what Ray says about it


class RayLauncher:
    """Runs jobs on a Ray cluster; see `unisono.launch.launcher.Launcher`."""

    class Settings(schema.Settings):
        """The words of `launcher=ray`."""

        address: str = Field("auto", description="of the cluster; auto: the one of this host")
        nodes: PositiveInt = Field(1, description="hosts of each run")
        gpus: NonNegativeInt = Field(0, description="accelerators of each")
        cpus: PositiveInt | None = Field(
            None, description="cores of each; null: max(memory_gb // 10, workers), and one for each process at least"
        )
        memory_gb: Positive | None = Field(None, description="memory of each; null: not reserved")
        jobs: PositiveInt = Field(8, description="runs at a time, if the cluster has room for them")
        max_restarts: NonNegativeInt = Field(10, description="times that a run which loses a host is placed again")

    begins, waits = "submitted", True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ray = import_extra("ray", "ray", "launcher=ray", of="unisono-sweeps")
        import_extra("ray.util.scheduling_strategies", "ray", "launcher=ray", of="unisono-sweeps")

    def hosts(self) -> Hosts:
        """See the interface."""
        return Hosts(self._settings.nodes, self._settings.gpus)

    def check(self, jobs: Sequence[Job]) -> None:
        """See the interface."""
        for job in jobs:
            refuse_misfit(job, self.hosts())
        with self._connected():
            hosts = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for job in jobs:
            wanted = self._bundle(job)
            fitting = [host for host in hosts if all(host.get(name, 0) >= count for name, count in wanted.items())]
            if len(fitting) < self._settings.nodes:
                shown = ", ".join(f"{count:g} {name}" for name, count in wanted.items())
                raise ConfigError(
                    f"{job.name} needs {self._settings.nodes} × ({shown}), and of the cluster's {len(hosts)} hosts "
                    f"{len(fitting)} have that; use a smaller cpus=, gpus=, memory_gb= or nodes="
                )

    def under_way(self, consoles: Path) -> Mapping[str, str]:
        """None: runs end with the command."""
        return {}

    def run(
        self,
        jobs: Iterable[Job],
        started: Callable[[Job], None],
        ended: Callable[[Job, Ended], None],
        stops: Callable[[Job], bool] | None = None,
    ) -> None:
        """See the interface."""
        waiting, running, lost = iter(jobs), dict[str, _Placed](), Counter[str]()
        with self._connected():
            try:
                with interrupted_by_signals():
                    while True:
                        while len(running) < self._settings.jobs and (job := next(waiting, None)) is not None:
                            running[job.name] = self._place(job)
                            started(job)
                        if not running:
                            return
                        for name, one in list(running.items()):
                            if (how := one.poll()) is not None:
                                del running[name]
                                one.release()
                                again = not one.stop_requested and lost[name] < self._settings.max_restarts
                                if how.code == _LOST and again:
                                    lost[name] += 1
                                    say(f"{name}: {how.why}; it resumes on another one", error=True)
                                    running[name] = self._place(one.job)
                                else:
                                    ended(one.job, how)
                            elif stops is not None and stops(one.job):
                                one.stop()
                        time.sleep(_POLL)
            finally:
                _stop(list(running.values()), ended)

    def _place(self, job: Job) -> _Placed:
        return _Placed(self._ray, job, self._settings, self._bundle(job))

    def _bundle(self, job: Job) -> dict[str, float]:
        """What a host of a run reserves."""
        own = self._settings
        wanted = {"CPU": float(list_cores(job, own.nodes, own.cpus, own.memory_gb)), "GPU": float(own.gpus)}
        wanted["memory"] = (own.memory_gb or 0.0) * 1e9
        return {name: count for name, count in wanted.items() if count}

    @contextmanager
    def _connected(self) -> Iterator[None]:
        _refuse_unreachable(self._settings.address)
        environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
        try:
            self._ray.init(
                self._settings.address,
                namespace="unisono",
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": environment},
            )
        except ConnectionError as error:
            raise ConfigError(
                f"launcher=ray: no cluster at address={self._settings.address}: {error}; start one (`ray start "
                "--head`), or name its address"
            ) from error
        try:
            yield
        finally:
            self._ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Refuse a cluster at which nobody listens, for which Ray itself waits for minutes.

    Raises:
        ConfigError: naming the address.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT).close()
    except OSError as error:
        raise ConfigError(
            f"launcher=ray: no cluster at address={address}: {error}; start one (`ray start --head`), or name its "
            "address"
        ) from error


class Host:
    """An actor on a host of a run: its own launcher's parent."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def find_address(self) -> str:
        """An address of this host with a free port, at which the other hosts meet it."""
        import ray

        host = str(ray.util.get_node_ip_address())
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.bind((host, 0))
            port = tried.getsockname()[1]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self, command: Sequence[str], console: str) -> None:
        """Start the run's launcher."""
        path, actor = Path(self._folder, console), os.getpid()
        path.parent.mkdir(parents=True, exist_ok=True)
        with safe_writing.open_to_append(path.parent, path.name) as output:
            self._process = subprocess.Popen(
                list(command),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: die_with_process(actor),
            )

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        """Let the run save and stop."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)


@dataclass
class _Placed:
    """A run that has, or waits for, its hosts."""

    ray: Any
    job: Job
    settings: RayLauncher.Settings
    bundle: Mapping[str, float]
    _hosts: list[Any] = field(default_factory=list)
    _codes: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, Any] = field(default_factory=dict)  # that are awaited: a host that is lost gives none
    _began: float = field(default_factory=time.monotonic)
    stop_requested: bool = False

    def __post_init__(self) -> None:
        self._group = self.ray.util.placement_group(
            [dict(self.bundle)] * self.settings.nodes,
            strategy="STRICT_SPREAD" if self.settings.nodes > 1 else "PACK",
            name=self.job.name,
        )

    def poll(self) -> Ended | None:
        """How the run ended; None while it waits or runs."""
        try:
            if not self._hosts:
                if self.stop_requested:
                    return Ended(75, 0.0, "it had not begun")
                if self._group.wait(timeout_seconds=0):
                    self._start()
                return None
            for number, host in enumerate(self._hosts):
                if number in self._codes:
                    continue
                if number not in self._answers:
                    self._answers[number] = host.poll.remote()
                if self.ray.wait([self._answers[number]], timeout=0)[0]:
                    answer = self._answers.pop(number)
                    if (code := self.ray.get(answer)) is not None:
                        self._codes[number] = code
        except self.ray.exceptions.RayError as error:
            said = " ".join(str(error).split())
            return Ended(_LOST, time.monotonic() - self._began, f"a host of the run is lost: {said[:_LONGEST]}")
        if len(self._codes) < len(self._hosts):
            return None
        number = next((number for number, code in sorted(self._codes.items()) if code), 0)
        code = self._codes[number]
        why = last_sentence(console_of(self.job, number), code) if code else ""
        return Ended(code, time.monotonic() - self._began, why)

    def stop(self) -> None:
        """Ask the run to save and stop; any of its launchers passes it on."""
        if not self.stop_requested and self._hosts:
            with suppress(self.ray.exceptions.RayError):
                self._hosts[0].stop.remote()  # not awaited: its host may be lost
        self.stop_requested = True

    def release(self) -> None:
        """Give back what was reserved; whatever still runs there ends."""
        for host in self._hosts:
            self.ray.kill(host)
        self.ray.util.remove_placement_group(self._group)

    def _start(self) -> None:
        scheduling = self.ray.util.scheduling_strategies
        self._began = time.monotonic()
        kind = self.ray.remote(Host)
        self._hosts = [
            kind.options(
                num_cpus=self.bundle["CPU"],
                num_gpus=self.bundle.get("GPU", 0),
                memory=int(self.bundle.get("memory", 0)) or None,
                scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=number
                ),
            ).remote(str(Path.cwd()))
            for number in range(self.settings.nodes)
        ]
        address = self.ray.get(self._hosts[0].find_address.remote())
        for number, host in enumerate(self._hosts):
            command = [*self.job.command, *join_words(self.job, self.settings.nodes, str(number), address)]
            self.ray.get(host.start.remote(command, str(console_of(self.job, number))))


def _stop(placed: Sequence[_Placed], ended: Callable[[Job, Ended], None]) -> None:
    """Let the runs under way save and stop; end those that do not."""
    for one in placed:
        one.stop()
    deadline = time.monotonic() + _GRACE
    for one in placed:
        how = one.poll()
        while how is None and time.monotonic() < deadline:
            time.sleep(_POLL)
            how = one.poll()
        one.release()
        ended(one.job, how or Ended(-signal.SIGKILL, _GRACE, "it did not stop"))
