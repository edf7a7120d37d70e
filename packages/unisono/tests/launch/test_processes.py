"""Real processes, started as a user starts them: that they work, and how they end when one of them does not.

Each test starts what it needs in a folder of its own; a process is known by the folder it works in.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from packages.unisono.tests.launch import jobs
from packages.unisono.tests.ports import free_port
from unisono.cli import main
from unisono.supervise import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
TRAIN = ("train", "small.py:Small", *jobs.QUIET, "run.name=a")
LONG = ("train.steps=5000", "task.sleep=0.02", "checkpoint.at_end=false")


def by_hand(
    words: Sequence[Sequence[str]], cwd: Path, ranks: Sequence[int], world: int
) -> list[subprocess.CompletedProcess[str]]:
    """Processes started with torchrun's variables, each with words of its own; not all need be there."""
    port = str(free_port())
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                jobs.started(
                    [jobs.UNISONO, *given], cwd, RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank),
                    LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
                )
            )
            for rank, given in zip(ranks, words, strict=True)
        ]  # fmt: skip
        return jobs.ends(started, 200)


# processes that work ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished run on two processes, and what its command said."""
    folder = tmp_path_factory.mktemp("two")
    jobs.task_file(folder)
    words = ("train", "small.py:Small", "train.global_batch=8", "run.name=a", "train.steps=6", "layout.world_size=2")
    return folder, jobs.unisono(*words, cwd=folder)


def test_two_processes_finish_with_exit_code_0(two: tuple[Path, subprocess.CompletedProcess[str]]):
    folder, done = two
    assert done.returncode == 0, done.stderr
    assert layout_of(folder) == (2, "ddp")


def written(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / "runs" / "a" / "config.yaml").read_text())
    return found


def layout_of(folder: Path) -> tuple[int | str, str]:
    layout = written(folder)["layout"]
    return layout["world_size"], layout["strategy"]


def test_two_processes_say_everything_once(two: tuple[Path, subprocess.CompletedProcess[str]]):
    _, done = two
    lines = done.stdout.splitlines()
    assert len(lines) == len(set(lines))
    assert sum(line.startswith("step 6/6") for line in lines) == 1
    assert done.stderr == ""


def test_each_process_keeps_a_log_of_its_own(two: tuple[Path, subprocess.CompletedProcess[str]]):
    logs = sorted((two[0] / "runs" / "a" / "logs").iterdir())
    assert [path.name for path in logs] == ["rank-00000.log", "rank-00001.log"]
    assert all("step 6 loss" in path.read_text() for path in logs)


def test_two_processes_compute_what_one_computes(
    two: tuple[Path, subprocess.CompletedProcess[str]], here: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main.main([*TRAIN, "train.steps=6", "layout.world_size=1", "layout.threads=1"]) == 0
    mine, theirs = jobs.events(here / "runs" / "a"), jobs.events(two[0] / "runs" / "a")
    timed = {"seconds", "rows_per_second", "data_wait", "memory_gb"}
    assert len(mine) == 7
    for one, other in zip(mine, theirs, strict=True):
        assert {k: v for k, v in other.items() if k not in timed} == pytest.approx(
            {k: v for k, v in one.items() if k not in timed}, rel=1e-5, abs=1e-7
        )


SCRIPT = """
if __name__ == "__main__":
    words = {"train.steps": 4, "train.global_batch": 8, "run.name": "a", "observe.progress": False}
    result = unisono.train(Small(Small.Config(rows=24)), {**words, "layout.world_size": 2})
    print(result.folder, result.step, result.loss, sorted(result.evaluation))
"""


def test_a_script_can_train_its_own_task_on_two_processes(here: Path):
    path = here / "script.py"
    path.write_text(jobs.SMALL + SCRIPT)
    done = jobs.finished([sys.executable, "script.py"], here)
    assert done.returncode == 0, done.stderr
    steps = [event for event in jobs.events(here / "runs" / "a") if not event.get("eval")]
    assert done.stdout == f"runs/a 4 {steps[-1]['loss']} ['bias', 'loss']\n"
    assert written(here)["task"]["rows"] == 24


def test_a_script_without_a_guard_is_told_so_instead_of_starting_itself_over_and_over(here: Path):
    path = here / "script.py"
    path.write_text(jobs.SMALL + SCRIPT.replace('if __name__ == "__main__":', "if True:"))
    done = jobs.finished([sys.executable, "script.py"], here)
    assert done.returncode == 1
    assert "Put the call under `if __name__ == '__main__':`" in done.stderr
    assert len(list((here / "runs").iterdir())) == 1


def test_a_script_can_train_a_task_of_a_package_beside_it_from_anywhere(here: Path):
    package, elsewhere = here / "project" / "bare" / "deep", here / "elsewhere"
    package.mkdir(parents=True)
    elsewhere.mkdir()
    (package.parent / "helper.py").write_text(jobs.SMALL)
    (package / "task.py").write_text("from ..helper import Small\n\n\nclass Mine(Small):\n    pass\n")
    script = SCRIPT.replace("Small(Small.Config", "Mine(Mine.Config")
    (here / "project" / "script.py").write_text(f"import unisono\nfrom bare.deep.task import Mine\n{script}")
    done = jobs.finished([sys.executable, str(here / "project" / "script.py")], elsewhere)
    assert done.returncode == 0, done.stderr
    assert written(elsewhere)["recipe"] == "bare.deep.task:Mine"


# a process that fails -----------------------------------------------------------------------------------------------


def test_the_error_of_the_process_that_raised_is_the_headline_with_the_lines_of_its_author(here: Path):
    done = jobs.unisono(*TRAIN, "train.steps=6", "layout.world_size=2", "task.raises=1", cwd=here)
    assert done.returncode == 1
    assert done.stderr.startswith("unisono: error: rank 1 failed")
    _, raised, *frames, saved, typed = done.stderr.rstrip().splitlines()
    assert raised == "RuntimeError: the sky fell"
    assert [line for line in frames if line.startswith("  File ")] == [frames[0]] and "small.py" in frames[0]
    assert saved == "There is no checkpoint yet. Start over with:"
    assert typed.startswith("  unisono train small.py:Small ")
    assert "Traceback (most recent call last):" in (here / "runs" / "a" / "logs" / "rank-00001.log").read_text()
    assert jobs.working_in(here) == []


@pytest.mark.slow
def test_those_who_waited_for_a_process_that_hangs_say_so_and_the_process_is_named(here: Path):
    words = ("train.steps=6", "layout.world_size=2", "task.hangs=1", "launch.timeout=4")
    done = jobs.unisono(*TRAIN, *words, cwd=here)
    assert done.returncode == 5, done.stderr
    assert done.stderr.startswith("unisono: error: rank 0 waited for ")
    assert "\nRanks that did not respond until the launcher stopped them: 1\n" in done.stderr
    assert "rank 0 ERROR: rank 0 waited for " in (here / "runs" / "a" / "logs" / "rank-00000.log").read_text()


# a launcher that is stopped -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_interruption_ends_every_process_and_says_how_to_go_on(here: Path, world_size: int):
    words = [*TRAIN, *LONG, f"layout.world_size={world_size}", f"task.marks={here}/marks"]
    with jobs.started([jobs.UNISONO, *words], here) as process:
        jobs.training(here / "marks", world_size)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert jobs.all_gone(here, 10)
    assert process.returncode == 130
    assert (
        "unisono: interrupted. There is no checkpoint yet. Start over with:\n  unisono train small.py:Small " in errors
    )
    assert "Traceback" not in errors


def test_a_launcher_that_was_killed_leaves_no_orphans(here: Path):
    with jobs.started(
        [jobs.UNISONO, *TRAIN, *LONG, "layout.world_size=2", f"task.marks={here}/marks"], here
    ) as process:
        assert len(jobs.training(here / "marks", 2)) == 2
        told = {
            p.pid: Path(f"/proc/{p.pid}/cmdline").read_bytes().split(b"\0")
            for p in processes.find_descendants([_now(process)])
        }
        ((monitor, words),) = [(p, words) for p, words in told.items() if b"unisono.supervise.monitor" in words]
        shared = Path(json.loads(words[words.index(b"unisono.supervise.monitor") + 1])["directory"])
        assert shared.is_dir()
        process.kill()
        assert jobs.all_gone(here, 30)
        jobs.wait_for(lambda: processes.find_process(monitor) is None and not shared.exists(), 30)


def _now(process: subprocess.Popen[str]) -> processes.Process:
    found = processes.find_process(process.pid)
    assert found is not None
    return found


# processes that somebody else starts --------------------------------------------------------------------------------


def torchrun(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return jobs.finished([*jobs.torchrun(port=free_port()), *words], here)


def test_torchrun_can_start_the_processes(here: Path, two: tuple[Path, subprocess.CompletedProcess[str]]):
    words = [*TRAIN, "train.steps=6", "layout.world_size=7"]  # torchrun decides the number
    done = torchrun(here, "--nproc-per-node=2", "--no-python", jobs.UNISONO, *words)
    assert done.returncode == 0, done.stderr
    mine, theirs = jobs.events(here / "runs" / "a"), jobs.events(two[0] / "runs" / "a")
    assert [event["loss"] for event in mine] == [event["loss"] for event in theirs]
    assert layout_of(here) == (2, "ddp")


def test_torchrun_may_start_a_single_process(here: Path):
    done = torchrun(here, "--nproc-per-node=1", "--no-python", jobs.UNISONO, *TRAIN, "train.steps=3")
    assert done.returncode == 0, done.stderr
    assert layout_of(here) == (1, "single")


def test_torchrun_may_start_the_processes_again_under_any_run_id(here: Path):
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=unisono-77", "--no-python"]
    done = torchrun(here, *options, jobs.UNISONO, *TRAIN, "train.steps=4", "task.raises=1", "launch.timeout=20")
    assert done.returncode == 0, done.stderr
    assert layout_of(here) == (2, "ddp")
    assert [event["step"] for event in jobs.events(here / "runs" / "a")] == [1, 2, 3, 4, 4]
    log = (here / "runs" / "a" / "logs" / "rank-00001.log").read_text()
    assert log.count("rank 1 ERROR: Traceback (most recent call last):") == 1
    assert "RuntimeError: the sky fell" in log


TWICE = """
if __name__ == "__main__":
    words = {"train.steps": 3, "train.global_batch": 8, "observe.progress": False, "launch.timeout": 20}
    task = Small(Small.Config(rows=24))
    task.shown = []
    task.loss = lambda *arguments: task.shown.append(1) or Small.loss(task, *arguments)
    for name in "ab":
        step = unisono.train(task, {**words, "run.name": name}).step
        (Path("marks") / f"{name}-{os.environ['RANK']}").write_text(f"{step} {bool(task.shown)}")
"""


def test_a_script_of_torchrun_can_train_its_own_object_twice(here: Path):
    (here / "script.py").write_text(jobs.SMALL + TWICE)
    done = torchrun(here, "--nproc-per-node=2", "script.py")
    assert done.returncode == 0, done.stderr
    told = {mark.name: mark.read_text() for mark in (here / "marks").iterdir()}
    assert told == dict.fromkeys(["a-0", "a-1", "b-0", "b-1"], "3 True")


def test_a_mistake_of_one_rank_alone_is_told_by_that_rank(here: Path):
    missing = ["train", "other.py:Small", *TRAIN[2:]]
    first, second = by_hand([[*TRAIN, "launch.start_timeout=6"], missing], here, (0, 1), 2)
    assert (first.returncode, second.returncode) == (5, 2)
    assert second.stderr.startswith("unisono: error on rank 1: ")
    assert "other.py: no such file" in second.stderr


def test_ranks_with_different_configurations_are_refused_with_the_key(here: Path):
    words = [[*TRAIN, f"optim.lr={lr}"] for lr in (0.1, 0.2)]
    first, second = by_hand(words, here, (0, 1), 2)
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr == (
        "unisono: error on rank 0: rank 0 and rank 1 differ in the configuration: optim.lr is 0.1 on rank 0 and 0.2 on "
        "rank 1. Start all ranks with the same command, environment, code and data\n"
    )
    assert second.stderr == ""
    assert not (here / "runs").exists()


def test_what_the_first_rank_refuses_ends_all_ranks_and_is_told_once(here: Path):
    words = [*TRAIN, "layout.micro_batch=3"]
    first, second = by_hand([words, words], here, (0, 1), 2)
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("unisono: error on rank 0: layout.micro_batch=3 does not divide the 4 rows")
    assert second.stderr == ""


def test_a_rank_that_does_not_come_is_named(here: Path):
    first, other = by_hand([[*TRAIN, "launch.start_timeout=8"]] * 2, here, (0, 2), 3)
    told = "unisono: error on rank 0: rank 0: of 3 processes, rank 1 did not start, or could not reach 127.0.0.1:"
    (line,) = [line for line in first.stderr.splitlines() if line.startswith(told)]  # torch warns before it
    assert line.endswith(", within 8 s (launch.start_timeout)")
    assert (first.returncode, other.returncode) == (5, 5)


def test_a_first_rank_that_does_not_come_is_told_with_its_address(here: Path):
    (done,) = by_hand([[*TRAIN, "launch.start_timeout=1"]], here, (2,), 3)
    assert done.returncode == 5
    assert "unisono: error on rank 2: rank 2 could not reach the other processes at 127.0.0.1:" in done.stderr


def test_a_launcher_s_variables_in_part_are_refused(here: Path):
    done = jobs.unisono(*TRAIN, cwd=here, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr.startswith("unisono: error: RANK and WORLD_SIZE are set, as torchrun does, but not LOCAL_RANK")
