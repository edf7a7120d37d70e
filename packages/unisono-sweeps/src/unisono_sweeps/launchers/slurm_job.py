"""What a job of `launcher=slurm` does on its node: it starts the run, and puts itself back into the queue where asked.

submitit calls this object in every task of the job. One task starts the run with our own launcher; with several tasks,
as on several nodes, each starts one process of the run, which finds the others as under srun. Whatever the run still
needs is in its checkpoints, so a job that is queued again does exactly the same.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.runtime.errors import Preempted
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_writing
from unisono_sweeps.launchers.console import last_sentence

_POLL = 0.2  # seconds
_OF_A_TASK = ("SLURM_STEP_ID", "SLURM_PROCID")  # by which a process takes itself for one that srun started
_INTERRUPTED = Preempted.exit_code


@dataclass
class SlurmRun:
    """A run within a job of Slurm; submitit's "checkpointable" function.

    Attributes:
        command: of the run.
        console: file for what it prints.
        outcome: file for how it ended, which the command that submitted the job reads.
        threads: of each process.
        tasks: of the job; each is a process of the run if there are several.
    """

    command: tuple[str, ...]
    console: Path
    outcome: Path
    threads: int
    tasks: int
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __call__(self) -> int:
        """Run to the end; returns the exit code, which is also in the outcome."""
        rank, began = int(os.environ.get("SLURM_PROCID", "0")), time.monotonic()
        console = self.console if rank == 0 else self.console.with_suffix(f".rank-{rank:05d}.log")
        try:
            code, why = self._run(console), ""
        except Exception as error:  # of submitit, which ends a job that has reached its time limit too often
            code, why = _INTERRUPTED, f"{error} What it has saved resumes with the same command"
        if code == _INTERRUPTED and not why and rank == 0 and _is_running():
            _requeue()
        if code and not why:
            why = last_sentence(console, code)
        if rank == 0:
            ended = {"job": job_id(), "code": code, "seconds": time.monotonic() - began, "why": why}
            write_whole(self.outcome, json.dumps(ended) + "\n")
        return code

    def checkpoint(self) -> Any:
        """Let the run save and stop, before its time limit or a preemption; submitit then queues the job again."""
        from submitit.helpers import DelayedSubmission

        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            while not _has_ended(process.pid):
                time.sleep(_POLL)
        return DelayedSubmission(replace(self))

    def _run(self, console: Path) -> int:
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(self.threads))
        if self.tasks == 1:
            for name in _OF_A_TASK:
                environment.pop(name, None)
        console.parent.mkdir(parents=True, exist_ok=True)
        with safe_writing.open_to_append(console.parent, console.name) as output:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        # Not `wait`: `checkpoint` is called by a signal in the middle of it, and must not wait for the same lock.
        while not _has_ended(self._process.pid):
            time.sleep(_POLL)
        return self._process.wait()


def job_id(environment: Mapping[str, str] = os.environ) -> str:
    """This job as submitit and `squeue -r` name it.

    >>> job_id({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "2"})
    '17_2'
    >>> job_id({"SLURM_JOB_ID": "5"})
    '5'
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


def _has_ended(pid: int) -> bool:
    """Whether a child has; its exit code stays for `wait`."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _is_running() -> bool:
    """Whether Slurm lets the job run: not if it was cancelled, nor if it is being put back into the queue."""
    command = ["squeue", "--noheader", "--jobs", os.environ["SLURM_JOB_ID"], "--format", "%T"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return shown.stdout.strip() == "RUNNING"


def _requeue() -> None:
    """Put the job back into the queue: Slurm does so itself only for a job that it had to kill.

    Raises:
        SystemExit: always; the job begins again.
    """
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True, timeout=60)
    raise SystemExit(_INTERRUPTED)
