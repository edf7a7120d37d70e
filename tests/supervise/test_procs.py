"""Processes as the kernel shows them, and how they are ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from unisono.supervise import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
NEST = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)']{more}); "
)
NEST += "print(p.pid, flush=True); time.sleep(99)"


def started(more: str = "") -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", NEST.replace("{more}", more)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def root(process: subprocess.Popen[str]) -> processes.Process:
    found = processes.look(process.pid)
    assert found is not None
    return found


@pytest.mark.parametrize("more", ["", ", start_new_session=True"])
def test_a_process_ends_with_all_that_it_started_though_it_is_stopped(more: str):
    process, child = started(more)
    first = root(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.1)
    assert root(process).state == "T"
    assert {p.pid for p in processes.family([first])} == {process.pid, child}
    assert processes.end([first]) == []
    assert process.wait(5) == -signal.SIGKILL
    assert processes.look(child) is None


def test_what_a_dead_process_left_in_its_group_is_found():
    process, child = started()
    first = root(process)
    process.kill()
    process.wait()
    assert {p.pid for p in processes.family([first])} == {child}
    assert processes.end([first]) == []
    assert processes.look(child) is None


def test_a_number_that_is_another_s_by_now_is_left_alone():
    process, _ = started()
    old = processes.Process(process.pid, "S", 1, process.pid, began=1)
    assert processes.family([old]) == []
    assert processes.end([old]) == []
    assert process.poll() is None
    processes.end([root(process)])
    process.wait()


def test_this_process_is_never_among_those_that_are_ended():
    me = processes.look(os.getpid())
    assert me is not None
    assert os.getpid() not in {p.pid for p in processes.family([me])}


def test_a_signal_is_caught_or_deadly():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.catches(os.getpid(), signal.SIGRTMIN + 3)


def test_the_kernel_tells_how_many_were_killed_for_memory():
    assert processes.killed_for_memory() >= 0
