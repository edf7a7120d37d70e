"""What the monitor concludes of processes that are there, left, died or stopped, without a run around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from packages.unisono.tests.launch import jobs
from unisono.runtime import heartbeat
from unisono.supervise import monitor, processes
from unisono.supervise.hangs import stacks
from unisono.supervise.monitor import Specification

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the monitor reads /proc")
RANK = """
import os, sys, time
from pathlib import Path
from unisono.runtime import heartbeat
heartbeat.start(sys.argv[1], int(sys.argv[2]))
both = [heartbeat.heartbeat_path(Path(sys.argv[1]), rank) for rank in range(2)]
while not all(map(heartbeat.read_record, both)):  # whoever waits alone would be stuck
    time.sleep(0.01)
heartbeat.record_step(3, 0.1)
with heartbeat.phase("record"):
    {act}
heartbeat.stop({code})
"""
WAITS = "\n    with heartbeat.phase('compute'), heartbeat.phase('wait', 'the sums of step 4'):\n        time.sleep(99)"


class Node:
    """A monitor and two ranks that are no more than a script."""

    def __init__(self, folder: Path, **limits: float) -> None:
        self.folder, self.directory = folder / "run", folder / "pulses"
        (self.folder / "logs").mkdir(parents=True)
        self.directory.mkdir()
        self.ranks: list[subprocess.Popen[bytes]] = []
        told = Specification(str(self.directory), str(self.folder), [0, 1], limits=limits)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "unisono.supervise.monitor", json.dumps(asdict(told))],
            stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def start(self, *acts: str, code: int = 0) -> None:
        for rank, act in enumerate(acts):
            script = RANK.replace("{act}", act).replace("{code}", str(code))
            words = [sys.executable, "-c", script, str(self.directory), str(rank)]
            self.ranks.append(subprocess.Popen(words, start_new_session=True))
        for rank in range(len(acts)):
            self.until(rank, lambda record: record.steps_done == 3)

    def until(self, rank: int, reached: Callable[[heartbeat.HeartbeatRecord], bool]) -> None:
        """Wait until a rank has told that it is there."""
        path = heartbeat.heartbeat_path(self.directory, rank)
        jobs.wait_for(lambda: (told := heartbeat.read_record(path)) is not None and reached(told), 60)

    def found(self) -> dict[str, object]:
        told: dict[str, object] = json.loads(monitor.finding_path(self.folder, 0).read_text())
        return told


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, stuck_after=1.0, shape=1.0)
    yield node
    for process in (node.process, *node.ranks):
        process.kill()
        process.wait()


def test_ranks_that_leave_one_after_the_other_are_no_fault(node: Node):
    node.start("pass", "time.sleep(2.5)")
    assert [rank.wait(60) for rank in node.ranks] == [0, 0]
    time.sleep(0.5)  # two looks of the monitor
    assert node.process.poll() is None
    _, errors = node.process.communicate(b"\n", timeout=60)
    assert (node.process.returncode, errors) == (0, b"")
    assert list((node.folder / "logs").iterdir()) == []


def test_a_rank_that_dies_is_named_and_one_that_would_wait_for_ever_is_ended(node: Node):
    node.start(WAITS, "time.sleep(99)")
    node.until(0, lambda record: record.phase == "wait")
    node.ranks[1].kill()
    assert node.process.wait(60) == 9, "and not that it is stuck"
    assert node.ranks[0].wait(60) == -signal.SIGKILL
    assert node.found()["rank"] == 1
    assert "; rank 0 waited for the sums of step 4" in str(node.found()["text"])
    assert json.loads((node.directory / monitor.FINDING_FILE).read_text())["text"] == node.found()["text"]


def test_a_rank_that_told_its_fault_is_left_the_word_and_the_others_are_ended(node: Node):
    node.start("pass", WAITS, code=3)
    assert node.ranks[1].wait(60) == -signal.SIGKILL
    assert not monitor.finding_path(node.folder, 0).exists()


def test_a_stopped_rank_is_named_with_its_line_and_all_are_ended(node: Node):
    node.start(WAITS, "time.sleep(99)")
    node.until(1, lambda record: record.phase == "record")
    node.ranks[1].send_signal(signal.SIGSTOP)
    assert node.process.wait(60) == 10
    assert [rank.wait(60) for rank in node.ranks] == [-signal.SIGKILL, -signal.SIGKILL]
    assert node.found()["rank"] == 1
    assert "is frozen (stopped by a signal" in str(node.found()["text"])
    told = node.folder / str(node.found()["stacks"])
    assert "<string>" in (told / "rank-00001.txt").read_text()


def test_the_stack_of_a_stopped_rank_is_that_of_where_it_was_stopped_and_not_of_where_it_went_then(node: Node):
    stops = "\n    def stops(): os.kill(os.getpid(), 19)\n    def goes_on(): time.sleep(99)\n    stops()\n    goes_on()"
    node.start(WAITS, stops)
    assert node.process.wait(60) == 10
    assert str(node.found()["where"]).endswith(" in stops")
    assert "in goes_on" not in (node.folder / str(node.found()["stacks"]) / "rank-00001.txt").read_text()


def test_a_stopped_rank_is_asked_before_it_may_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sent: list[tuple[int, int]] = []
    heartbeat.stacks_path(tmp_path, 0).touch()
    monkeypatch.setattr(stacks.processes, "handles_signal", lambda pid, number: True)
    monkeypatch.setattr(stacks.os, "kill", lambda pid, number: sent.append((pid, number)))
    stacks.collect_stacks(tmp_path, {0: 99}, patience=0.0, stopped=True)
    assert sent == [(99, heartbeat.STACK_SIGNAL), (99, signal.SIGCONT)]


def test_the_end_of_its_launcher_is_the_end_of_all(node: Node):
    node.start("time.sleep(99)", "time.sleep(99)")
    assert node.process.stdin is not None
    node.process.stdin.close()
    assert node.process.wait(60) == 0
    assert [rank.wait(60) for rank in node.ranks] == [-signal.SIGKILL, -signal.SIGKILL]
    assert not node.directory.exists()


def test_it_imports_next_to_nothing():
    code = "import sys, unisono.supervise.monitor; print({'torch', 'numpy', 'pydantic', 'yaml'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout == "set()\n"
    assert processes.find_process(os.getpid()) is not None
