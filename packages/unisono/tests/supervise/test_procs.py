"""Processes as the kernel shows them, and how they are ended with all that they started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from packages.unisono.tests.launch import jobs
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
    found = processes.find_process(process.pid)
    assert found is not None
    return found


@pytest.mark.parametrize("more", ["", ", start_new_session=True"])
def test_a_process_ends_with_all_that_it_started_though_it_is_stopped(more: str):
    process, child = started(more)
    first = root(process)
    process.send_signal(signal.SIGSTOP)
    jobs.wait_for(lambda: root(process).state == "T", 60)
    assert {p.pid for p in processes.find_descendants([first])} == {process.pid, child}
    assert processes.kill_all([first]) == []
    assert process.wait(60) == -signal.SIGKILL
    assert processes.find_process(child) is None


def test_what_a_dead_process_left_in_its_group_is_found():
    process, child = started()
    first = root(process)
    process.kill()
    process.wait()
    assert {p.pid for p in processes.find_descendants([first])} == {child}
    assert processes.kill_all([first]) == []
    assert processes.find_process(child) is None


def test_a_number_that_is_another_s_by_now_is_left_alone():
    process, _ = started()
    old = processes.Process(process.pid, "S", 1, process.pid, start_time=1)
    assert processes.find_descendants([old]) == []
    assert processes.kill_all([old]) == []
    assert process.poll() is None
    processes.kill_all([root(process)])
    process.wait()


def test_this_process_is_never_among_those_that_are_ended():
    me = processes.find_process(os.getpid())
    assert me is not None
    assert os.getpid() not in {p.pid for p in processes.find_descendants([me])}


def test_a_signal_is_caught_or_deadly():
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert processes.handles_signal(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not processes.handles_signal(os.getpid(), signal.SIGRTMIN + 3)
