"""`launcher=local`: every job runs once, within its share, and one that fails ends no other."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.engines.torch import devices
from unisono.launch.launcher import Ended, Job
from unisono.runtime.communication import communicator
from unisono.runtime.errors import ConfigError, Preempted
from unisono_sweeps.launchers.console import last_sentence
from unisono_sweeps.launchers.local import LocalLauncher, divide_host

SHOW = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ.get('CUDA_VISIBLE_DEVICES')]))"


def job(folder: Path, name: str, code: str, **needs: int) -> Job:
    return Job(name, (sys.executable, "-c", code), folder / name, folder / "console" / f"{name}.log", **needs)


def launcher(**settings: object) -> LocalLauncher:
    return LocalLauncher(LocalLauncher.Settings.model_validate(settings))


def run_all(waiting: list[Job], **settings: object) -> dict[str, Ended]:
    ended: dict[str, Ended] = {}
    launcher(**settings).run(waiting, lambda job: None, lambda job, how: ended.update({job.name: how}))
    return ended


def test_a_job_that_fails_is_reported_by_its_sentence_and_the_others_run(tmp_path: Path) -> None:
    bad = "import sys; print('unisono: error: the file is gone\\nput it back', file=sys.stderr); sys.exit(2)"
    killed = "import os; os.kill(os.getpid(), 9)"
    ended = run_all([job(tmp_path, "a", bad), job(tmp_path, "b", killed), job(tmp_path, "c", "print(1)")])
    assert {name: (how.code, how.why) for name, how in ended.items()} == {
        "a": (2, "the file is gone put it back"), "b": (-9, "killed by SIGKILL"), "c": (0, "")
    }  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind processes to cores")
def test_jobs_have_cores_and_devices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda", 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(communicator, "cpu_quota", lambda: math.inf)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core cannot be divided")
    run_all([job(tmp_path, "a", SHOW), job(tmp_path, "b", SHOW)], jobs=2)
    seen = [json.loads((tmp_path / "console" / f"{name}.log").read_text()) for name in "ab"]
    half = len(cores) // 2
    assert seen == [[cores[:half], "4"], [cores[half : 2 * half], "5"]]


def test_nothing_is_oversubscribed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(communicator, "cpu_quota", lambda: math.inf)
    with pytest.raises(ConfigError, match=r"jobs=5: this host has 4 usable cores"):
        launcher(jobs=5)
    with pytest.raises(ConfigError, match=r"a has 3 processes, and its share of this host is 2 cores"):
        launcher(jobs=2).check([job(tmp_path, "a", "", processes=3)])
    monkeypatch.setattr(devices, "accelerators", lambda: ("cuda", 2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match=r"needs 1 of this host's 2 accelerators, and its share is 0; use jobs=2"):
        launcher(jobs=4).check([job(tmp_path, "a", "", devices=1)])
    launcher(jobs=4, share_devices=True).check([job(tmp_path, "a", "", devices=1)])
    assert [share.devices for share in divide_host(4, range(4), ["0", "1"], share_devices=True)] == [
        ("0",), ("1",), ("0",), ("1",)
    ]  # fmt: skip


def test_runs_share_the_processor_time_that_a_quota_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all eight cores divided, two runs had four threads each, and a quota of two cores stopped all of them."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(communicator, "cpu_quota", lambda: 1.5)
    shares = launcher(jobs=2)._shares
    assert [share.threads for share in shares] == [1, 1]
    assert len({core for share in shares for core in share.cores}) == 2
    with pytest.raises(ConfigError, match=r"jobs=3: this host has 2 usable cores"):
        launcher(jobs=3)
    with pytest.raises(ConfigError, match=r"a has 2 processes, and its share of this host is 1 core"):
        launcher(jobs=2).check([job(tmp_path, "a", "", processes=2)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_by_a_signal_lets_the_jobs_stop_in_order(tmp_path: Path, number: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the signal is ignored here, as SIGHUP under nohup")
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(75)); print('up', flush=True); time.sleep(60)"
    )
    jobs, ended, began = [job(tmp_path, "a", code), job(tmp_path, "b", "")], dict[str, Ended](), time.monotonic()

    def started(one: Job) -> None:
        while not (one.console.exists() and "up" in one.console.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    with pytest.raises(Preempted):
        launcher().run(jobs, started, lambda job, how: ended.update({job.name: how}))
    assert {name: how.code for name, how in ended.items()} == {"a": 75}
    assert time.monotonic() - began < 50


def test_a_launcher_that_is_killed_leaves_no_job_behind(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from unisono.launch.launcher import Job\n"
        "from unisono_sweeps.launchers.local import LocalLauncher\n"
        "code = 'import os, time; print(os.getpid(), flush=True); time.sleep(60)'\n"
        f"job = Job('a', (sys.executable, '-c', code), Path('a'), Path({str(tmp_path / 'a.log')!r}))\n"
        "LocalLauncher(LocalLauncher.Settings()).run([job], lambda job: None, lambda job, how: None)\n"
    )
    process = subprocess.Popen([sys.executable, script])
    log = tmp_path / "a.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().strip()) and time.monotonic() < deadline:
        time.sleep(0.05)
    child = int(log.read_text())
    process.kill()
    process.wait()
    while Path(f"/proc/{child}").exists() and "State:\tZ" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline, "the job outlived its launcher"
        time.sleep(0.05)


def test_the_last_sentence_of_a_traceback_is_its_last_line(tmp_path: Path) -> None:
    console = tmp_path / "log"
    console.write_text("Traceback (most recent call last):\n  File x\nKeyError: 'width'\n")
    assert last_sentence(console, 1) == "KeyError: 'width'"
