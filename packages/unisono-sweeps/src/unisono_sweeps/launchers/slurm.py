"""`launcher=slurm`: each run is a job of Slurm, in an array that submitit submits.

The jobs outlive the command, which only waits for them: after an interruption, or the end of a login session, the same
command finds them again by what it has written beside their consoles.

    console/NAME.slurm.json    the job of a run, and its command
    console/NAME.ended.json    how it ended, written by the job
    console/slurm/             submitit's: scripts, logs, and the pickled function of each job
"""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt
from typing_extensions import TypedDict

from unisono.config import schema
from unisono.config.schema import Positive
from unisono.launch.launcher import Ended, Hosts, Job
from unisono.runtime.code.entry_points import import_extra
from unisono.runtime.errors import ConfigError, Preempted, UnisonoError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import Integer, Number, Object, misfit
from unisono.supervise.run_facts import read_run_facts
from unisono.supervise.step_sync import STOP
from unisono_sweeps.launchers.console import last_sentence
from unisono_sweeps.launchers.hosts import list_cores, refuse_misfit
from unisono_sweeps.launchers.slurm_job import SlurmRun
from unisono_sweeps.settings import parse_list

_FOLDER = "slurm"
_POLL = 1.0  # seconds between looks for outcomes
_QUEUE_EVERY = 10.0  # seconds between questions to the controller of the cluster, which serves everybody
_VANISHED_AFTER = 30.0  # seconds without an outcome after a job has left the queue: files of other hosts appear late
_OVER = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_WARNED_EARLY = 60  # seconds by which Slurm may send the warning early
_UNITS = {"m": 1, "min": 1, "h": 60, "d": 24 * 60}


def parse_minutes(value: Any) -> Any:
    """A time limit in minutes, as Slurm writes it, or with a unit.

    >>> [parse_minutes(text) for text in ("90", "4h", "1.5h", "2-12:00:00", "00:30:00", "1d")]
    [90, 240, 90, 3600, 30, 1440]
    """
    text = str(value).strip()
    if match := re.fullmatch(r"([0-9.]+) ?(m|min|h|d)", text):
        return round(float(match[1]) * _UNITS[match[2]])
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+)(?::(\d+))?", text):
        days, first, second, third = (int(part or 0) for part in match.groups())
        if match[4] is None and match[1] is None:
            return first + (second > 0)  # minutes and seconds
        return days * 24 * 60 + first * 60 + second + (third > 0)
    return int(text) if text.isdecimal() else value


class _Ending(TypedDict):
    job: str
    code: Integer
    seconds: Number
    why: str


@dataclass
class _Waiting:
    job: Job
    number: str
    vanished: float | None = None
    stop_requested: bool = False


class SlurmLauncher:
    """Submits jobs to Slurm; see `unisono.launch.launcher.Launcher`."""

    class Settings(schema.Settings):
        """The words of `launcher=slurm`."""

        time: Annotated[PositiveInt, BeforeValidator(parse_minutes)] = Field(
            description="limit of a job, e.g. 4h, 90 (minutes) or 2-12:00:00; a run that reaches it saves, and the job "
            "returns to the queue"
        )
        partition: str | None = Field(None, description="of the cluster; null: its default")
        memory_gb: Positive | None = Field(None, description="memory on each node; null: the cluster's default")
        cpus: PositiveInt | None = Field(
            None,
            description="cores of each task; null: max(memory_gb // 10, workers) on a node, and one for each process",
        )
        gpus: NonNegativeInt = Field(0, description="accelerators on each node")
        nodes: PositiveInt = Field(1, description="of each run; with several, Slurm starts all its processes")
        jobs: PositiveInt = Field(8, description="runs at a time")
        max_num_timeout: NonNegativeInt = Field(10, le=10, description="times that a run may reach its limit")
        warn_seconds: PositiveInt = Field(120, description="from the warning, at which a run saves, to the limit")
        sbatch: Annotated[dict[str, str | int | bool], BeforeValidator(parse_list)] = Field(
            {}, description="other options, e.g. {account: vision, qos: high}"
        )

    begins, waits = "submitted", True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        if missing := [name for name in ("sbatch", "squeue", "scontrol", "srun") if shutil.which(name) is None]:
            raise ConfigError(
                f"launcher=slurm: this host has no {missing[0]}; start the command where sbatch works, as on the login "
                "node of a cluster"
            )
        self._submitit = import_extra("submitit", "slurm", "launcher=slurm", of="unisono-sweeps")

    def hosts(self) -> Hosts:
        """See the interface."""
        return Hosts(self._settings.nodes, self._settings.gpus)

    def check(self, jobs: Sequence[Job]) -> None:
        """See the interface; Slurm itself is asked whether it would take such jobs."""
        warned = -(-(self._settings.warn_seconds + _WARNED_EARLY) // 60)  # minutes before the limit, at most
        if self._settings.time <= warned:
            raise ConfigError(
                f"time={self._settings.time}m: Slurm warns a job warn_seconds={self._settings.warn_seconds} before its "
                f"limit, or up to a minute earlier, so that it would save and stop as it begins; use "
                f"time={warned + 1}m or more, or a smaller warn_seconds="
            )
        for job in jobs:
            refuse_misfit(job, self.hosts())
        for one in {json.dumps(self._parameters(job, 1)): job for job in jobs}.values():
            self._ask_slurm(one)

    def _ask_slurm(self, job: Job) -> None:
        """Refuse what Slurm would refuse.

        Raises:
            ConfigError: in Slurm's words.
        """
        given = self._parameters(job, 1)
        options = {
            "partition": given.get("partition"), "time": given["time"], "nodes": given["nodes"],
            "ntasks-per-node": given["ntasks_per_node"], "cpus-per-task": given["cpus_per_task"],
            "mem": given.get("mem"), "gpus-per-node": given.get("gpus_per_node"), **self._settings.sbatch,
        }  # fmt: skip
        words = [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in options.items()
            if value is not None
        ]
        with _clean_environment():
            tested = subprocess.run(
                ["sbatch", "--test-only", *words, "--wrap", "true"], capture_output=True, text=True, check=False
            )
        if tested.returncode:
            said = tested.stderr.strip().splitlines() or ["without a message"]
            raise ConfigError(f"Slurm refuses a job of {job.name} ({' '.join(words)}): {said[-1]}")

    def under_way(self, consoles: Path) -> Mapping[str, str]:
        """See the interface."""
        found = {path.name.removesuffix(".slurm.json"): _read(path) for path in sorted(consoles.glob("*.slurm.json"))}
        queue = _list_queue() if found else {}
        return {
            name: f"Slurm job {values['job']}"
            for name, values in found.items()
            if values.get("job") in queue and _read_outcome(consoles, name, str(values["job"])) is None
        }

    def run(
        self,
        jobs: Iterable[Job],
        started: Callable[[Job], None],
        ended: Callable[[Job, Ended], None],
        stops: Callable[[Job], bool] | None = None,
    ) -> None:
        """See the interface."""
        at_once = isinstance(jobs, Sequence)  # an array of all of them, of which Slurm starts `jobs` at a time
        waiting, running = iter(jobs), dict[str, _Waiting]()
        next_look, more = 0.0, True
        try:
            while True:
                if more and (at_once or len(running) < self._settings.jobs):
                    taken = list(waiting) if at_once else list(islice(waiting, self._settings.jobs - len(running)))
                    more = bool(taken) and not at_once
                    for one in self._submit(taken):
                        running[one.job.name] = one
                        started(one.job)
                if not running:
                    return
                if look := time.monotonic() >= next_look:
                    queue, next_look = _list_queue(), time.monotonic() + _QUEUE_EVERY
                for name, one in list(running.items()):
                    outcome = _read_outcome(one.job.console.parent, name, one.number)
                    if outcome is None and look:
                        outcome = self._find_loss(one, queue)
                    if outcome is not None:
                        del running[name]
                        ended(one.job, self._complete(one, outcome))
                    elif stops is not None and stops(one.job) and not one.stop_requested:
                        one.stop_requested = True
                        with suppress(FileExistsError):
                            safe_writing.create_inside(one.job.folder, STOP)
                time.sleep(_POLL)
        except KeyboardInterrupt:
            numbers = " ".join(dict.fromkeys(one.number.partition("_")[0] for one in running.values()))
            raise KeyboardInterrupt(
                f"interrupted; {len(running)} job{'s' * (len(running) != 1)} stay with Slurm, and the same command "
                f"waits for them again. To let them save and stop: scancel {numbers}"
            ) from None

    def _complete(self, one: _Waiting, outcome: Ended) -> Ended:
        """The outcome of a job, as a launcher reports it."""
        if one.stop_requested and outcome.code == 0:
            return replace(outcome, code=Preempted.exit_code)
        if outcome.code and self._settings.nodes > 1:
            with suppress(OSError, UnisonoError):  # of a run that has not begun, or cannot be read
                return replace(outcome, why=read_run_facts(one.job.folder).why or outcome.why)  # any rank's first fault
        return outcome

    def _submit(self, jobs: Sequence[Job]) -> Iterator[_Waiting]:
        """Submit jobs that are not in the queue already.

        Raises:
            ConfigError: if Slurm does not take them, or one is there already with another command.
        """
        queue = _list_queue() if jobs else {}
        groups: dict[str, list[Job]] = {}
        for job in jobs:
            known = _read(_record_path(job))
            if known.get("job") in queue and _read_outcome(job.console.parent, job.name, known["job"]) is None:
                if known.get("command") != _digest(job):
                    raise ConfigError(
                        f"{job.name} is with Slurm already, as job {known['job']}, with another command: scancel "
                        f"{known['job']}, or choose another name="
                    )
                yield _Waiting(job, known["job"])
            else:
                groups.setdefault(json.dumps(self._parameters(job, 1), sort_keys=True), []).append(job)
        for members in groups.values():
            yield from self._submit_array(members)

    def _submit_array(self, jobs: Sequence[Job]) -> Iterator[_Waiting]:
        folder = jobs[0].console.parent.absolute() / _FOLDER
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # a job unpickles what lies there
        executor = self._submitit.SlurmExecutor(folder, max_num_timeout=self._settings.max_num_timeout)
        parameters = self._parameters(jobs[0], self._settings.jobs)
        extra = {"requeue": True, "signal": f"USR1@{self._settings.warn_seconds}", **self._settings.sbatch}
        executor.update_parameters(
            **parameters,
            job_name=jobs[0].name if len(jobs) == 1 else folder.parents[1].name,
            setup=["export SUBMITIT_PREEMPT_SIGNAL=USR1"],  # all processes of a job get the signal, and USR2 kills
            additional_parameters=extra,
            wckey=None,
        )
        threads = max(1, parameters["cpus_per_task"] // (jobs[0].processes if self._settings.nodes == 1 else 1))
        tasks = parameters["nodes"] * parameters["ntasks_per_node"]
        outcomes = [job.console.with_name(f"{job.name}.ended.json") for job in jobs]
        with _clean_environment():
            try:
                with executor.batch():
                    submitted = [
                        executor.submit(
                            SlurmRun(job.command, job.console.absolute(), outcome.absolute(), threads, tasks)
                        )
                        for job, outcome in zip(jobs, outcomes, strict=True)
                    ]
            except self._submitit.core.utils.FailedJobError as error:
                raise ConfigError(f"Slurm did not take the job: {error}") from error
        for job, one in zip(jobs, submitted, strict=True):
            write_whole(_record_path(job), json.dumps({"job": one.job_id, "command": _digest(job)}) + "\n")
            yield _Waiting(job, one.job_id)

    def _parameters(self, job: Job, at_once: int) -> dict[str, Any]:
        """What submitit asks Slurm for."""
        own, nodes = self._settings, self._settings.nodes
        here = job.processes // nodes
        tasks = here if nodes > 1 else 1  # on each node
        cpus = own.cpus or math.ceil(list_cores(job, nodes, None, own.memory_gb) / tasks)
        wanted = {
            "partition": own.partition, "time": own.time, "nodes": nodes, "ntasks_per_node": tasks,
            "cpus_per_task": cpus, "mem": f"{round(own.memory_gb * 1024)}M" if own.memory_gb else None,
            "gpus_per_node": own.gpus or None, "array_parallelism": at_once,
        }  # fmt: skip
        return {name: value for name, value in wanted.items() if value is not None}

    def _find_loss(self, one: _Waiting, queue: Mapping[str, str]) -> Ended | None:
        """How a job ended that could not say so; None while it may still run."""
        if queue.get(one.number, "COMPLETED").partition(" ")[0] not in _OVER:
            one.vanished = None
            return None
        if one.vanished is None:
            one.vanished = time.monotonic()
        if time.monotonic() - one.vanished < _VANISHED_AFTER:
            return None
        state = queue.get(one.number) or _show_state(one.number)
        logs = one.job.console.parent / _FOLDER / f"{one.number}_0_log.err"
        said = last_sentence(logs, 1)
        why = f"Slurm job {one.number} ended without an outcome ({state}): {said}"
        return Ended(Preempted.exit_code if state.startswith(("CANCELLED", "PREEMPTED")) else 1, 0.0, why)


def _record_path(job: Job) -> Path:
    return job.console.parent / f"{job.name}.slurm.json"


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        values: dict[str, Any] = safe_paths.read_json(path.parent, path.name, Object)
        return values
    return {}


def _read_outcome(consoles: Path, name: str, number: str) -> Ended | None:
    """What a job wrote at its end; None for that of an earlier one."""
    values = _read(consoles / f"{name}.ended.json")
    if misfit(values, _Ending) is not None or values["job"] != number:
        return None
    return Ended(values["code"], values["seconds"], values["why"])


def _digest(job: Job) -> str:
    return hashlib.sha256(json.dumps(job.command[1:]).encode()).hexdigest()[:16]


def _list_queue() -> dict[str, str]:
    """The state of each of this user's jobs, by number.

    Raises:
        ConfigError: if Slurm does not answer.
    """
    command = ["squeue", "--noheader", "--array", "--user", getpass.getuser(), "--states", "all", "--format", "%i %T"]
    for attempt in range(3):
        try:
            listed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        except subprocess.TimeoutExpired:
            continue
        if listed.returncode == 0:
            lines = (line.split(maxsplit=1) for line in listed.stdout.splitlines())
            return {line[0]: line[1] for line in lines if len(line) == 2}
        time.sleep(attempt)
    raise ConfigError(f"Slurm does not answer `{' '.join(command)}`; the same command finds its jobs again")


def _show_state(number: str) -> str:
    """The state of a job that has left the queue, as far as Slurm still knows it."""
    shown = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", number], capture_output=True, text=True, check=False, timeout=60
    )
    states = re.findall(r"JobState=(\S+)", shown.stdout)
    return str(states[0]) if states else "unknown"


@contextmanager
def _clean_environment() -> Iterator[None]:
    """Submit as from a login shell: within a job, its variables would take part in what the new one asks for."""
    own = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
    kept = {name: value for name, value in own.items() if name == "SLURM_CONF"}
    os.environ.update(kept)
    try:
        yield
    finally:
        os.environ.update(own)
