"""Runs whose processes die, freeze and stand still, one way after the other: seen, told, ended, and made good.

All kinds happen to one run, which is started again each time, so that what comes of it can be compared with a run that
never failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.launch import jobs
from unisono.checkpoint.core import commit
from unisono.checkpoint.core.arrays import ArrayReader
from unisono.supervise import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the monitor reads /proc")
TRAIN = ("train", "small.py:Small", *jobs.QUIET, "run.name=a", "layout.world_size=2", "train.steps=8")
TRAIN = (*TRAIN, "checkpoint.every=2", "checkpoint.background=false", "launch.timeout=60", "task.dropout=0.3")
FAULTS = (
    "rank=1,step=3,phase=forward,act=kill",
    "rank=0,step=4,phase=backward,act=stop",
    "rank=1,step=5,phase=data,act=gil",
    "rank=1,step=6,phase=compute,act=exit0",
)


@dataclass
class Told:
    """What a finished command left."""

    folder: Path
    code: int
    errors: str

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "a"

    @property
    def sentences(self) -> list[str]:
        return [line for line in self.errors.splitlines() if line.startswith("unisono: rank ")]

    def state(self) -> dict[str, np.ndarray]:
        newest = commit.open_checkpoint(commit.find_checkpoints(self.run / "checkpoints")[-1])
        assert newest.step == 8
        reader = ArrayReader(newest.path, newest.arrays)
        return {name: reader.read(name, (0,) * len(s), s) for name, s in reader.shapes.items()}


def told(folder: Path, *words: str, **variables: str) -> Told:
    jobs.task_file(folder)
    done = jobs.unisono(*TRAIN, *words, cwd=folder, timeout=280, **variables)
    return Told(folder, done.returncode, done.stderr)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A run that never failed; only its monitor is killed, which must not matter."""
    folder = tmp_path_factory.mktemp("undisturbed")
    jobs.task_file(folder)
    (folder / "marks").mkdir()
    (folder / "held").touch()
    with jobs.started([jobs.UNISONO, *TRAIN, f"task.marks={folder}/marks"], folder) as process:
        jobs.training(folder / "marks", 2, 200)

        def monitors() -> set[int]:
            mine = [p for p in processes.list_processes() if p.parent == process.pid]
            return {p.pid for p in mine if "supervise.monitor" in line(p.pid)}

        (monitor,) = monitors()
        os.kill(monitor, signal.SIGKILL)
        jobs.wait_for(lambda: bool(monitors() - {monitor}), 60)
        (folder / "held").unlink()
        _, errors = process.communicate(timeout=120)
    return Told(folder, process.returncode, errors)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """The same run, with a fault in each of four attempts; the fifth finishes it."""
    pytest.importorskip("unisono_faults", reason="unisono-faults is not installed")
    faults = ";".join(f"{fault},attempt={number}" for number, fault in enumerate(FAULTS))
    folder = tmp_path_factory.mktemp("disturbed")
    words = (f"launch.max_restarts={len(FAULTS)}", "launch.stuck_after=2", "launch.deadlines={data: 3, shape: 60}")
    return told(folder, *words, "--fault", faults)


def line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return ""


def test_a_monitor_that_dies_is_told_and_replaced_and_the_run_goes_on(undisturbed: Told):
    assert undisturbed.code == 0, undisturbed.errors
    (warning,) = undisturbed.errors.splitlines()
    assert re.match(r"unisono: WARNING: the monitor \(process \d+\) died: killed by signal 9", warning)
    assert warning.endswith("It was restarted")


@pytest.mark.slow
def test_after_four_faults_a_run_ends_bit_for_bit_as_if_it_had_never_failed(undisturbed: Told, disturbed: Told):
    assert disturbed.code == 0, disturbed.errors
    theirs, mine = undisturbed.state(), disturbed.state()
    assert theirs.keys() == mine.keys()
    assert len(theirs) > 2
    assert any(np.ptp(array) > 0 for array in theirs.values())
    for name, array in theirs.items():
        assert array.tobytes() == mine[name].tobytes(), name
    losses = [{e["step"]: e["loss"] for e in jobs.events(t.run) if "loss" in e} for t in (undisturbed, disturbed)]
    assert sorted(losses[0]) == list(range(1, 9))
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (0, r"rank 1 \(.*, process \d+\) died without a message, in step 3, compute: killed by signal 9"),
        (1, r"rank 0 \(.*, process \d+\) is frozen \(stopped by a signal.*\) in step 4, compute, at .*, for \d"),
        (
            2,
            r"rank 1 \(.*, process \d+\) is stuck in step 5, data, at .*, for \d+ s \(limit 3 s, launch.deadlines.data",
        ),
        (3, r"rank 1 \(.*, process \d+\) died without a message, in step 6, compute: exit code 0 before the run"),
    ],
)
def test_each_fault_is_told_in_one_sentence(disturbed: Told, attempt: int, sentence: str):
    assert len(disturbed.sentences) == len(FAULTS), disturbed.errors
    assert re.match(f"unisono: {sentence}", disturbed.sentences[attempt])
    if "died" not in sentence:  # A death is seen at once, when the other rank may not have come to its wait yet.
        assert f"; rank {1 - int(FAULTS[attempt][5])} wait" in disturbed.sentences[attempt]


def test_each_new_start_is_told_and_recorded_with_its_reason(disturbed: Told):
    lines = [line for line in disturbed.errors.splitlines() if line.startswith("unisono: restarting all")]
    assert lines[0] == (
        "unisono: restarting all processes from the checkpoint of step 2 (attempt 1 of 4, launch.max_restarts)"
    )
    assert len(lines) == len(FAULTS)
    again = [event for event in jobs.events(disturbed.run) if "restart" in event]
    assert [(event["restart"], event["code"], event["step"]) for event in again] == [
        (1, 9, 2), (2, 10, 2), (3, 10, 4), (4, 9, 4),
    ]  # fmt: skip
    assert [event["why"] for event in again] == [s.removeprefix("unisono: ") for s in disturbed.sentences]


def test_all_stacks_are_kept_of_processes_that_could_not_answer(disturbed: Told):
    kept = [
        sorted(path.name for path in folder.iterdir()) for folder in sorted((disturbed.run / "logs/stacks").iterdir())
    ]
    assert kept == [["rank-00000.txt", "rank-00001.txt"]] * 2
    frozen, held = sorted((disturbed.run / "logs" / "stacks").iterdir())
    assert "in _sleep_with_gil" in (held / "rank-00001.txt").read_text()
    waits = (frozen / "rank-00000.txt").read_text()
    assert "loop.py" in waits, waits  # a slow machine may show it on its way to where it waits


def test_nothing_is_left_of_a_run(disturbed: Told, undisturbed: Told):
    for one in (disturbed, undisturbed):
        assert jobs.working_in(one.folder) == []
    assert not [p for p in processes.list_processes() if str(disturbed.run) in line(p.pid)]


def test_a_fault_ends_a_run_with_its_code_and_a_record_when_no_restart_is_left(tmp_path: Path):
    one = told(tmp_path, "task.hangs=1", "launch.stuck_after=2")
    assert one.code == 10, one.errors
    errors = [text for text in one.errors.splitlines() if text.startswith("unisono: error: ")]
    assert len(errors) == 1
    place = f"{tmp_path}/small.py:{jobs.SMALL.splitlines().index('            time.sleep(600)') + 1} in outputs"
    assert "rank 1 (" in errors[0]
    assert f"is stuck in step 3, compute, at {place}, for " in errors[0]
    assert "rank 0 waits for the gradients of step 3" in errors[0]
    record: dict[str, Any] = json.loads((one.run / "logs" / "monitor-node-0.json").read_text())
    assert (record["kind"], record["code"], record["rank"], record["where"]) == ("StuckError", 10, 1, place)
    assert record["text"] in errors[0]
    assert (one.run / record["stacks"] / "rank-00001.txt").is_file()
    assert commit.open_checkpoint(commit.find_checkpoints(one.run / "checkpoints")[-1]).step == 2
    assert jobs.working_in(tmp_path) == []


@pytest.mark.needs("unisono_faults")
def test_under_torchrun_the_monitor_tells_the_sentence_itself_and_ends_all_processes(tmp_path: Path):
    jobs.task_file(tmp_path)
    words = [*TRAIN, "launch.stuck_after=2", "launch.max_restarts=0", "--fault", "rank=1,step=4,phase=forward,act=gil"]
    command = [*jobs.torchrun("--nproc-per-node=2", "--no-python"), jobs.UNISONO, *words]
    done = jobs.finished(command, tmp_path, GLOO_SOCKET_IFNAME="lo")
    assert done.returncode == 1, done.stderr  # torchrun has no other code
    told = [line for line in done.stderr.splitlines() if line.startswith("unisono: error: ")]
    assert len(told) == 1, done.stderr
    assert "rank 1 (" in told[0]
    assert "is stuck in step 4, compute, at " in told[0]
    assert "rank 0 waits for the gradients of step 4" in told[0]
    record = json.loads((tmp_path / "runs" / "a" / "logs" / "monitor-node-0.json").read_text())
    assert record["code"] == 10
    assert jobs.all_gone(tmp_path, 30)


@pytest.mark.parametrize(("last", "code"), [("ending", 9), ("leaving", 0)])
def test_a_rank_of_a_finished_run_that_is_killed_is_told_truly(tmp_path: Path, last: str, code: int):
    """The claim: in the two phases after the last step, nothing is said of a step 3 of 2, or of how to resume."""
    jobs.task_file(tmp_path)
    kill = {
        "ending": "loop.Training.__exit__ = lambda *_: os.kill(os.getpid(), 9)",
        "leaving": "os._exit = lambda code: os.kill(os.getpid(), 9)",
    }[last]
    (tmp_path / "killed.py").write_text(
        "import os\nfrom small import Small\nfrom unisono.training import loop\n\n\n"
        "class Killed(Small):\n    pass\n\n\n"
        f"if os.environ.get('RANK') == '1':\n    {kill}\n"
    )
    words = ("train", "killed.py:Killed", *jobs.QUIET, "run.name=a", "layout.world_size=2", "train.steps=2")
    done = jobs.unisono(*words, cwd=tmp_path, timeout=200)
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert "step 3" not in done.stderr and "Resume" not in done.stderr
    if code == 0:
        assert lines[-1] == (
            "unisono: WARNING: while leaving, after all work was done, so nothing is lost: rank 1: killed by signal 9 "
            "(SIGKILL), possibly by the OOM killer"
        )
    else:
        assert re.search(r"rank 1 .* died without a message, after step 2, which was its last, while ending", lines[0])
        assert lines[-1] == "All 2 steps were done before, and the newest checkpoint holds them; nothing is lost"
