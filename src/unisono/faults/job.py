"""Jobs of the small task, started as a user would, and what is left of one: its end, processes and newest state."""

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
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.faults import task_fault
from unisono.faults.rank_server import RankProcesses, RankServer
from unisono.supervise import processes

if TYPE_CHECKING:
    from unisono.faults.matrix import Sandbox

RUN = "a"
TASK = "harmed.py"  # the task's file in the folder of a job
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
        code: of its command.
        said: on stdout and stderr.
        ended_at: seconds of the monotonic clock.
        orphans: processes that were still there ten seconds later.
    """

    code: int
    said: str
    ended_at: float
    orphans: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """What the command said at last, in one line."""
        return self.reasons[-1].removeprefix("unisono: ").removeprefix("error: ") if self.reasons else ""

    @property
    def reasons(self) -> list[str]:
        """Every line in which the command says why it ended."""
        said = [line for line in self.said.splitlines() if line.startswith("unisono: ")]
        return [line for line in said if not line.startswith(("unisono: WARNING", "unisono: compiling "))]


class Job:
    """A running `unisono train`, in a process group of its own. Use as a context: whatever it started ends with it.

    Args:
        folder: to work in; the run lies in `runs/a`.
        words: settings besides `WORDS`; later ones win.
        misbehave: see `unisono.faults.task_fault`.
        command: of another verb, or a whole command that starts with a program.
        variables: of the environment.
        output: file for what it says.
        server: starts so many ranks without a launcher; see `unisono.faults.rank_server`.
        engine: of the small task.
    """

    def __init__(
        self,
        folder: Path,
        *words: str,
        misbehave: str = "",
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
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SLURM", "TORCHELASTIC")) and k not in (*_LAUNCHERS, task_fault.VARIABLE)
        }
        variables_set = {
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
            **({task_fault.VARIABLE: misbehave} if misbehave else {}),
        }
        self._output = self.output.open("w+", encoding="utf-8")
        self.process: subprocess.Popen[bytes] | RankProcesses
        if server is None:
            self.process = subprocess.Popen(
                list(command or train_command(*words)), cwd=folder, env={**kept, **variables_set},
                start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        else:
            size = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{server[1]}")
            here = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
            self.process = server[0].start(
                folder, *_task_and_settings(words), {**kept, **variables_set, **size, **here}, self.output
            )

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
        """The folder of the run."""
        return self.folder / "runs" / RUN

    def pids(self) -> list[int]:
        """Processes of the job: those of its folder, and ranks that are not there yet."""
        early = [one.pid for one in getattr(self.process, "all", ()) if processes.refresh(one)]
        return sorted({*early, *(pid for pid in pids() if _works_in_folder(pid, self.folder))})

    def wait_for_ranks(self, count: int, seconds: float = 60.0) -> list[int]:
        """The process numbers of all ranks, once they are there."""
        wait_for(lambda: len(self._ranks()) >= count, seconds, f"{count} ranks in {self.folder}")
        return [pid for _, pid in sorted(self._ranks().items())]

    def step(self) -> int:
        """The last step that was recorded."""
        return last_step(self.run)

    def wait_for_step(self, step: int, seconds: float = 180.0) -> None:
        """Wait until a step was recorded."""
        wait_for(lambda: self.step() >= step or self.process.poll() is not None, seconds, f"step {step}")

    def wait_for_hold(self, seconds: float = 180.0) -> list[int]:
        """Wait until a rank is held in its step (`misbehave="hold@forward:1:7"`); the ranks."""
        wait_for((self.folder / task_fault.MARK).exists, seconds, f"a rank that is held in {self.folder}")
        return self.wait_for_ranks(2)

    def release(self) -> None:
        """Let a rank that is held resume."""
        (self.folder / task_fault.RELEASED).touch()

    def finish(self, seconds: float = 180.0) -> JobResult:
        """Wait for its end; what is still there ten seconds after it is an orphan."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = 124
        ended = time.monotonic()
        with suppress(TimeoutError):
            wait_for(lambda: not self.pids(), 10.0, "no process left")
        self._output.flush()
        said = self.output.read_text(encoding="utf-8", errors="replace")
        return JobResult(code, said, ended, tuple(self.pids()))

    def _ranks(self) -> dict[int, int]:
        found = {}
        for pid in self.pids():
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith("rank "):  # a fork, which says so itself
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
    """The small task, and its settings."""
    own = {word.partition("=")[0] for word in words}
    return f"{TASK}:Small", [*(word for word in SETTINGS if word.partition("=")[0] not in own), *words]


def verb_command(*words: str) -> list[str]:
    """Any other command of `unisono`."""
    return [sys.executable, "-m", "unisono", *words]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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


def train_to_end(sandbox: Sandbox, *words: str) -> Path:
    """The newest commit of a run that was made to its end."""
    with sandbox.job(*words) as run:
        done = run.finish()
        assert done.code == 0, done.said[-2000:]
        return sorted((run.run / "checkpoints").glob("step-*"))[-1]


def rewrite_manifest(commit: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what a commit's manifest says, and let its own hash fit."""
    from unisono.checkpoint.core import manifest

    content = change(json.loads((commit / manifest.NAME).read_text()))
    (commit / manifest.NAME).write_bytes(manifest.encode({k: v for k, v in content.items() if k != "sha256"}))


def is_saving(run: Path) -> bool:
    """Whether a half of a commit lies there: of a save that goes on, or was cut off."""
    return any((run / "checkpoints").glob(".writing-*"))


def newest_step(run: Path) -> int:
    """The step of the newest commit whose content is what was written; -1 if there is none, or it is damaged."""
    from unisono.checkpoint.core import commit
    from unisono.runtime.errors import CheckpointError

    found = commit.find_checkpoints(run / "checkpoints")
    try:
        return commit.open_checkpoint(found[-1]).step if found else -1
    except CheckpointError:
        return -1


def read_digests(run: Path) -> dict[str, str]:
    """Hashes of everything that a run's newest commit holds, and what the ledger says that each step took."""
    from unisono.checkpoint.core import commit

    checkpoint = commit.open_checkpoint(commit.find_checkpoints(run / "checkpoints")[-1])
    reader = checkpoint.reader()
    found = {}
    for name, shape in reader.shapes.items():
        found[name] = hashlib.sha256(reader.read(name, (0,) * len(shape), shape).tobytes()).hexdigest()
    kept = checkpoint.state
    found |= {name: json.dumps(kept[name]) for name in ("step", "total", "random", "micro_batch", "plan", "best")}
    return found | {"consumed": json.dumps((kept["ledger"] or {}).get("consumed"))} | read_samples(run)


def read_arrays(run: Path) -> dict[str, Any]:
    """Everything that a run's newest commit holds."""
    from unisono.checkpoint.core import commit

    checkpoint = commit.open_checkpoint(commit.find_checkpoints(run / "checkpoints")[-1])
    reader = checkpoint.reader()
    return {n: reader.read(n, (0,) * len(shape), shape).astype(np.float64) for n, shape in reader.shapes.items()}


def max_distance(run: Path, before: Mapping[str, Any]) -> float:
    """The largest relative distance of an array of a run from what it was to be; infinite if one is missing."""
    mine = read_arrays(run)
    if mine.keys() != before.keys():
        return float("inf")
    return max(
        float(np.linalg.norm(mine[name] - b) / max(float(np.linalg.norm(b)), 1e-3)) for name, b in before.items()
    )


def read_samples(run: Path) -> dict[str, str]:
    """What the ledger says each step took, as it was made last; by step and rows of the global batch."""
    from unisono.data import ledger

    found: dict[str, str] = {}
    for path in sorted((run / ledger.FOLDER).glob("rank-*.jsonl")):
        starts, faults = ledger.read_ledger(path)
        found |= {f"fault of {path.name}": fault for fault in faults}
        for start in starts:
            for lines in start.lines.values():
                for line in lines:
                    where = f"step {line.step}, rows {line.rows.start} to {line.rows.stop}"
                    found[where] = f"{line.ids} {line.content:x}"
    return found


def wait_for(true: Callable[[], Any], seconds: float, what: str, every: float = 0.02) -> None:
    """Return once something is true; it is looked at every so many seconds.

    Raises:
        TimeoutError: if it is not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {what}")
        time.sleep(every)


def pids() -> list[int]:
    """All processes of this machine that are not only waiting to be collected."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.joinpath("stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                found.append(int(path.name))
    return found


def _works_in_folder(pid: int, folder: Path) -> bool:
    """Whether a process has the folder as its own, or in its command, as a monitor has, which works in none."""
    here = folder.resolve()
    try:
        at_home = Path(f"/proc/{pid}/cwd").resolve(strict=False) == here
        return pid != os.getpid() and (at_home or f"{here}/".encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
