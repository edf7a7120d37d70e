"""Whether another process still lives, told without a clock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from packages.unisono.tests.launch import jobs
from unisono.supervise import identity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")


def of(process: subprocess.Popen[bytes]) -> dict[str, object]:
    return {**identity.own_identity(), "pid": process.pid, "born": identity._start_time(process.pid)}


def test_this_process_lives_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch):
    me = identity.own_identity()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert identity.own_identity() == me
    assert identity.is_alive(me) is True


def test_a_process_lives_until_it_ends_stopped_or_not():
    process = subprocess.Popen(["sleep", "60"])
    who = of(process)
    assert identity.is_alive(who) is True
    process.send_signal(signal.SIGSTOP)
    assert identity.is_alive(who) is True
    process.kill()
    jobs.wait_for(lambda: identity._start_time(process.pid) == "", 60)  # nobody has collected it yet
    assert identity.is_alive(who) is False
    process.wait()
    assert identity.is_alive(who) is False


def test_another_process_under_the_same_number_is_not_the_one():
    assert identity.is_alive({**identity.own_identity(), "born": "1"}) is False


def test_a_process_of_another_machine_cannot_be_seen():
    assert identity.is_alive({**identity.own_identity(), "machine": "elsewhere"}) is None
    assert identity.is_alive({"host": "", "machine": "", "pid": os.getpid()}) is None
