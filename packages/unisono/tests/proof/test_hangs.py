"""Where the processes of a proof were when one of them hung."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.launch.processes.children import ChildProcesses
from unisono.proof.hangs import StateSamples, find_computing, read_stacks


def dump(folder: Path, rank: int, begins: str) -> int:
    """Leave this process's stack as a rank does; returns its line."""
    path = folder / "logs" / f"rank-{rank:05d}.stack"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        file.write(begins)
        file.flush()
        faulthandler.dump_traceback(file)
    return dump.__code__.co_firstlineno + 7


def test_the_lines_of_all_ranks_are_told_once_one_of_them_was_too_late(tmp_path: Path) -> None:
    line = dump(tmp_path, 0, "Timeout (0:00:50)!\n")
    dump(tmp_path, 1, "")
    where = f"{Path(__file__)}:{line} in dump"
    assert read_stacks(tmp_path, 2) == {0: where, 1: where}


@pytest.mark.parametrize("ranks", [0, 2])
def test_stacks_of_processes_that_were_ended_for_another_reason_are_no_hang(tmp_path: Path, ranks: int) -> None:
    for rank in range(ranks):
        dump(tmp_path, rank, "")
    assert read_stacks(tmp_path, 2) == {}


@pytest.mark.parametrize(
    ("frame", "computing"),
    [
        ("train.py", [0]),
        ("site-packages/torch/autograd/graph.py", [0]),  # a backward pass that runs is no wait
        ("site-packages/torch/distributed/distributed_c10d.py", []),
        ("unisono/proof/scripts/recording/rank_progress.py", []),
    ],
)
def test_a_rank_that_runs_outside_of_waits_computes(tmp_path: Path, frame: str, computing: list[int]) -> None:
    (tmp_path / "logs").mkdir()
    lines = (f'  File "/x/{frame}", line 1 in call', '  File "/x/train.py", line 2 in main')
    stack = "\n".join(("Timeout (0:05:00)!", "Thread 0x01:", *lines))
    (tmp_path / "logs" / "rank-00000.stack").write_text(stack)
    assert find_computing(tmp_path, [0]) == computing
    assert find_computing(tmp_path, []) == []  # one that sleeps, whatever its line


def test_a_process_that_sleeps_is_told_from_one_that_runs() -> None:
    programs = ("print(flush=True)\nwhile True: pass", "import time; print(flush=True); time.sleep(60)")
    children = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) for program in programs]
    try:
        for child in children:  # starting is running, too
            assert child.stdout and child.stdout.readline()
        states = StateSamples([ChildProcesses([child.pid for child in children], lambda _: {})])
        with states.sampled():
            time.sleep(2.5)
        assert states.find_running() == [0]
    finally:
        for child in children:
            child.kill()
            child.communicate()
