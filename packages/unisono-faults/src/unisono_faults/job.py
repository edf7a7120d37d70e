"""Jobs of the small task, started as a user would start them, and their results: output, processes, newest state."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unisono.supervise import processes
from unisono_faults import task_fault
from unisono_faults.rank_server import RankProcesses, RankServer

RUN = "a"
TASK = "faulty.py"  # the task's file in the folder of a job
STEPS = 12
EVERY = 3
SETTINGS = (
    f"run.name={RUN}", f"train.steps={STEPS}", "train.global_batch=8", "optim=adamw", "optim.lr=1e-2", "ema.decay=0.9",
    f"checkpoint.every={EVERY}", "checkpoint.keep=3", "observe.progress=false", "layout.threads=1", "layout.device=cpu",
)  # fmt: skip
_TASK_FILES = {"torch": "task.py", "jax": "jax_task.py"}
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        code: exit code of its command.
        output: stdout and stderr.
        ended_at: seconds of the monotonic clock.
        run: directory of the run.
        orphans: processes that were still running ten seconds later.
    """

    code: int
    output: str
    ended_at: float
    run: Path
    orphans: tuple[int, ...] = ()

    @property
    def message(self) -> str:
        """The last line in which the command gives a reason for its end."""
        return self.reasons[-1].removeprefix("unisono: ").removeprefix("error: ") if self.reasons else ""

    @property
    def reasons(self) -> list[str]:
        """All lines in which the command gives a reason for its end."""
        lines = [line for line in self.output.splitlines() if line.startswith("unisono: ")]
        return [line for line in lines if not line.startswith(("unisono: WARNING", "unisono: compiling "))]

    def line_with(self, words: str) -> str:
        """The first line of the output with these words; empty if there is none."""
        return next((line.strip() for line in self.output.splitlines() if words in line), "")


class Job:
    """A running `unisono train` in its own process group. Use as a context: all its processes end with it.

    Args:
        folder: working directory; the run directory is `runs/a`.
        words: settings in addition to `SETTINGS`; later ones win.
        fault: see `unisono_faults.task_fault`.
        command: replaces `unisono train`, e.g. for another verb.
        variables: added to the environment.
        output: file for stdout and stderr.
        server: starts this many ranks without a launcher; see `unisono_faults.rank_server`.
        engine: of the small task.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        fault: str = "",
        command: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
        output: str = "output.txt",
        server: tuple[RankServer, int] | None = None,
        engine: str = "torch",
    ) -> None:
        self.folder = folder
        self.output = folder / output
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(task_fault.__file__).with_name(_TASK_FILES[engine]), folder / TASK)
        inherited = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "TORCHELASTIC")) and k not in (*_LAUNCHERS, task_fault.VARIABLE)
        }
        variables_set = {"OMP_NUM_THREADS": "1", **(variables or {})}
        if fault:
            variables_set[task_fault.VARIABLE] = fault
        self._output = self.output.open("w+", encoding="utf-8")
        self.process: subprocess.Popen[bytes] | RankProcesses
        if server is None:
            self.process = subprocess.Popen(
                list(command or train_command(*words)), cwd=folder, env={**inherited, **variables_set},
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        else:
            launcher = {**inherited, **variables_set, **launcher_variables(server[1])}
            self.process = server[0].start(folder, *_task_and_settings(words), launcher, self.output)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in {self.process.pid, *self.pids()}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        self._output.close()

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.folder / "runs" / RUN

    def pids(self) -> list[int]:
        """Processes of the job: those in its folder, and ranks that have not entered it yet."""
        early = [one.pid for one in getattr(self.process, "processes", ()) if processes.refresh(one)]
        running = (process.pid for process in processes.list_processes())
        return sorted({*early, *(pid for pid in running if _works_in_folder(pid, self.folder))})

    def wait_for_ranks(self, count: int) -> list[int]:
        """Wait until all ranks have started; return their process numbers."""
        wait_for(lambda: len(self._ranks()) >= count, 60.0, f"{count} ranks in {self.folder}")
        return [pid for _, pid in sorted(self._ranks().items())]

    def step(self) -> int:
        """The last recorded step."""
        return last_step(self.run)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is recorded."""
        wait_for(lambda: self.step() >= step or self.process.poll() is not None, 180.0, f"step {step}")

    def wait_for_hold(self) -> list[int]:
        """Wait until a rank is held in its step (`fault="hold@forward:1:7"`); return the ranks."""
        wait_for((self.folder / task_fault.MARK).exists, 180.0, f"a held rank in {self.folder}")
        return self.wait_for_ranks(2)

    def release(self) -> None:
        """Let a rank that is held resume."""
        (self.folder / task_fault.RELEASED).touch()

    def finish(self, seconds: float = 180.0) -> JobResult:
        """Wait for its end; a process that still runs ten seconds later is an orphan."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = 124
        ended_at = time.monotonic()
        with suppress(TimeoutError):
            wait_for(lambda: not self.pids(), 10.0, "no process left")
        self._output.flush()
        output = self.output.read_text(encoding="utf-8", errors="replace")
        return JobResult(code, output, ended_at, self.run, tuple(self.pids()))

    def _ranks(self) -> dict[int, int]:
        found = {}
        for pid in self.pids():
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("rank "):  # a fork names itself so
                    found[int(name.removeprefix("rank "))] = pid
                    continue
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                variables = dict(
                    v.split(b"=", 1) for v in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in v
                )
                if b"RANK" in variables and any(b"unisono.launch.processes.rank_process" in word for word in command):
                    found[int(variables[b"RANK"])] = pid
        return found


def train_command(*words: str) -> list[str]:
    """The command that trains the small task."""
    task_, settings = _task_and_settings(words)
    return [sys.executable, "-m", "unisono", "train", task_, *settings]


def _task_and_settings(words: Sequence[str]) -> tuple[str, list[str]]:
    keys = {word.partition("=")[0] for word in words}
    return f"{TASK}:Small", [*(word for word in SETTINGS if word.partition("=")[0] not in keys), *words]


def verb_command(*words: str) -> list[str]:
    """Any other command of `unisono`."""
    return [sys.executable, "-m", "unisono", *words]


def launcher_variables(size: int) -> dict[str, str]:
    """What a launcher of this many processes on this host tells all of them."""
    return {
        "WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fault_time(folder: Path) -> float | None:
    """When the fault happened, in seconds of the monotonic clock."""
    path = folder / task_fault.MARK
    text = path.read_text() if path.exists() else ""
    return float(text.split()[0]) if text else None


def last_step(run: Path) -> int:
    """The last step in a run's events."""
    steps = [0]
    with suppress(OSError):
        for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                event = json.loads(line)
                if "loss" in event and not event.get("eval"):
                    steps.append(event["step"])
    return max(steps)


def rewrite_manifest(commit: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change the manifest of a checkpoint, and update its own hash."""
    from unisono.checkpoint.core import manifest

    content = change(json.loads((commit / manifest.NAME).read_text()))
    (commit / manifest.NAME).write_bytes(manifest.encode({k: v for k, v in content.items() if k != "sha256"}))


def is_saving(run: Path) -> bool:
    """Whether there is an unfinished checkpoint: of a save in progress, or an interrupted one."""
    return any((run / "checkpoints").glob(".writing-*"))


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; -1 if there is none, or it is damaged."""
    from unisono.checkpoint.core import commit
    from unisono.runtime.errors import CheckpointError

    found = commit.find_checkpoints(run / "checkpoints")
    try:
        return commit.open_checkpoint(found[-1]).step if found else -1
    except CheckpointError:
        return -1


def read_digests(run: Path) -> dict[str, str]:
    """Hashes of all content of a run's newest checkpoint, and of the samples of each step in the ledger."""
    state, arrays = _read_newest(run)
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in arrays.items()}
    digests |= {name: json.dumps(state[name]) for name in ("step", "total", "random", "micro_batch", "plan", "best")}
    return digests | {"consumed": json.dumps((state["ledger"] or {}).get("consumed"))} | read_samples(run)


def read_arrays(run: Path) -> dict[str, Any]:
    """All arrays of a run's newest checkpoint, in fp64."""
    return {name: array.astype(np.float64) for name, array in _read_newest(run)[1].items()}


def _read_newest(run: Path) -> tuple[Mapping[str, Any], dict[str, Any]]:
    from unisono.checkpoint.core import commit

    checkpoint = commit.open_checkpoint(commit.find_checkpoints(run / "checkpoints")[-1])
    reader = checkpoint.reader()
    return checkpoint.state, {n: reader.read(n, (0,) * len(shape), shape) for n, shape in reader.shapes.items()}


def max_distance(run: Path, before: Mapping[str, Any]) -> float:
    """The largest relative distance of an array of a run from its reference; infinite if one is missing."""
    arrays = read_arrays(run)
    if arrays.keys() != before.keys():
        return float("inf")
    return max(
        float(np.linalg.norm(arrays[name] - b) / max(float(np.linalg.norm(b)), 1e-3)) for name, b in before.items()
    )


def read_samples(run: Path) -> dict[str, str]:
    """The samples of each step according to the ledger, as last executed; by step and rows of the global batch."""
    from unisono.data import ledger

    samples: dict[str, str] = {}
    for path in sorted((run / ledger.FOLDER).glob("rank-*.jsonl")):
        starts, faults = ledger.read_ledger(path)
        samples |= {f"fault of {path.name}": fault for fault in faults}
        for start in starts:
            for lines in start.lines.values():
                for line in lines:
                    key = f"step {line.step}, rows {line.rows.start} to {line.rows.stop}"
                    samples[key] = f"{line.ids} {line.content:x}"
    return samples


def wait_for(condition: Callable[[], Any], seconds: float, description: str, interval: float = 0.02) -> None:
    """Poll a condition until it is true.

    Raises:
        TimeoutError: if it is still false after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {description}")
        time.sleep(interval)


def _works_in_folder(pid: int, folder: Path) -> bool:
    """Whether a process has this working directory, or the folder in its command (as a monitor has)."""
    here = folder.resolve()
    try:
        in_folder = Path(f"/proc/{pid}/cwd").resolve(strict=False) == here
        return pid != os.getpid() and (in_folder or f"{here}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
