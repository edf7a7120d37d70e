"""How often a run is started again, after what, and what is said and recorded of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.configs import configured
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.launch.test_folder import checkpoint
from unisono.config.resolved_run import ResolvedRun
from unisono.config.schema.run import RunConfig
from unisono.launch.processes import local_processes, restart
from unisono.launch.processes.local_processes import WorkerError
from unisono.launch.resolving import layout, resolve, run_directory
from unisono.launch.resolving.preflight import DataFacts
from unisono.launch.start import read_outcome, start_run
from unisono.observe.events import Events
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError, RunError
from unisono.supervise import preemption
from unisono.task_config import load_config, read_run


def config(*words: str) -> RunConfig:
    return configured(f"{tasks.__file__}:LinearTask", "layout.world_size=2", "layout.device=cpu", *words)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., ResolvedRun]:
    """A run as a start has resolved it and written it down."""

    def resolved(*words: str) -> ResolvedRun:
        concrete = layout.resolve_layout(config(f"run.dir={tmp_path}", "run.name=a", *words), None)
        run = resolve.plan_run(concrete)
        run.directory.mkdir(exist_ok=True)
        run_directory.write_run(run, DataFacts({}, {}), tasks.LinearTask())
        return run

    return resolved


@dataclass
class Attempts:
    """Attempts of which each fails; number and micro-batch of those that were made."""

    code: int = 9
    random: bool | None = False  # what the processes say of their forward passes
    made: list[tuple[str, Any]] = field(default_factory=list)

    def launch(self, config: RunConfig, *_: object, **__: object) -> None:
        self.made.append((os.environ["UNISONO_ATTEMPT"], config.layout.micro_batch))
        raise WorkerError("rank 1 died.\nMore of it.", self.code, random=self.random)


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    found = Attempts()
    monkeypatch.setattr(local_processes, "launch", found.launch)
    return found


def failed(run: ResolvedRun) -> str:
    with pytest.raises(WorkerError) as caught:
        restart.launch_with_restarts(run, 1)
    return str(caught.value)


@pytest.mark.parametrize("code", [5, 9, 10])
def test_a_run_is_started_as_often_as_it_may_and_then_fails_with_how_often(
    start: Callable[..., ResolvedRun], attempts: Attempts,
    capsys: pytest.CaptureFixture[str], code: int,
):  # fmt: skip
    attempts.code = code
    run = start("launch.max_restarts=2")
    events = Events(run.directory / "events.jsonl")
    events.write({"step": 1, "loss": 2.0})
    events.close()
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # a process died while it wrote
    assert failed(run).endswith("\nIt was restarted 2 times (launch.max_restarts)")
    assert [number for number, _ in attempts.made] == ["0", "1", "2"]
    assert "UNISONO_ATTEMPT" not in os.environ
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "restarting" in line] == [
        f"unisono: restarting all processes from the beginning: there is no checkpoint (attempt {attempt} of 2, "
        "launch.max_restarts)"
        for attempt in (1, 2)
    ]
    kept = [line for line in (run.directory / "events.jsonl").read_text().splitlines() if "restart" in line]
    assert kept[0] == f'{{"step": 0, "restart": 1, "code": {code}, "why": "rank 1 died."}}'
    assert len(kept) == 2


@pytest.mark.parametrize("code", [1, 2, 3, 4, 75, 130])
def test_what_would_fail_again_is_not_started_again(start: Callable[..., ResolvedRun], attempts: Attempts, code: int):
    attempts.code = code
    run = start("launch.max_restarts=2")
    assert failed(run) == "rank 1 died.\nMore of it."
    assert len(attempts.made) == 1
    assert not (run.directory / "events.jsonl").exists()


def test_every_attempt_resumes_from_what_is_its_newest_checkpoint_by_then(
    start: Callable[..., ResolvedRun], monkeypatch: pytest.MonkeyPatch
):
    """And its processes get another resolved run, with another digest."""
    run = start("launch.max_restarts=2")
    digests: list[str] = []

    def launch(config: RunConfig, directory: Path, _: int, arguments: tuple[str, ...], **__: object) -> None:
        digests.append(arguments[0])
        there = resolve.read_resolved_run(directory, arguments[0])
        assert (there.resume.step if there.resume else 0) == 5 * (len(digests) - 1)
        checkpoint(run.directory, step=5 * len(digests))
        raise WorkerError("rank 1 died", 9)

    monkeypatch.setattr(local_processes, "launch", launch)
    failed(run)
    assert len(set(digests)) == 3
    with pytest.raises(RunError, match="was replaced by another start of this run"):
        resolve.read_resolved_run(run.directory, digests[0])


# out of memory --------------------------------------------------------------------------------------------------------


def test_a_run_that_ran_out_of_memory_is_started_again_with_smaller_micro_batches(
    start: Callable[..., ResolvedRun], attempts: Attempts,
    capsys: pytest.CaptureFixture[str],
):  # fmt: skip
    """Divisors of the rows of a process, until the smallest does not fit either; from the newest checkpoint."""
    attempts.code = 6
    run = start("launch.max_restarts=9", "train.global_batch=12")
    checkpoint(run.directory, step=5)
    text = failed(run)
    assert [rows for _, rows in attempts.made] == [6, 3, 2, 1]
    assert "It was restarted 3 times (launch.max_restarts)\nThe micro-batch is already one row. Use " in text
    told = capsys.readouterr().err
    assert "restarting all processes from the checkpoint of step 5, with layout.micro_batch=3 (attempt 1 of 9" in told
    assert read_run(run.directory, trust=True).layout.micro_batch == 1
    later = resolve.plan_run(
        layout.resolve_layout(config(f"run.dir={run.directory.parent}", "run.name=a", "train.global_batch=12"), None)
    )
    assert later.layout.micro_batch == 1, "a later start keeps what fits"


@pytest.mark.parametrize("known_by", ["fault", "checkpoint"])
def test_a_run_that_draws_random_numbers_gets_no_other_micro_batch_unless_that_is_allowed(
    start: Callable[..., ResolvedRun], attempts: Attempts, known_by: str
):
    attempts.code = 6
    attempts.random = True if known_by == "fault" else None
    run = start("launch.max_restarts=1", "train.global_batch=12")
    if known_by == "checkpoint":
        checkpoint(run.directory, random=True, step=5)
        run = resolve.plan_restart(run)
    assert "a smaller micro-batch changes the results. To accept that, resume with:\n  " in (text := failed(run))
    assert '"run.allow_change": "[layout.micro_batch]"' in text and '"layout.micro_batch": "3"' in text
    assert [rows for _, rows in attempts.made] == [6]
    attempts.made.clear()
    run = start("launch.max_restarts=1", "train.global_batch=12", "run.allow_change=[layout.micro_batch]")
    failed(run)
    assert [rows for _, rows in attempts.made] == [6, 3]


def test_a_run_that_ran_out_of_memory_before_it_knew_of_random_draws_is_started_again(
    start: Callable[..., ResolvedRun], attempts: Attempts
):
    """Nothing was computed yet that another micro-batch could contradict."""
    attempts.code = 6
    attempts.random = None
    failed(start("launch.max_restarts=1", "train.global_batch=12"))
    assert [rows for _, rows in attempts.made] == [6, 3]


def test_a_new_start_stays_in_the_file_and_is_no_step(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text(
        '{"step": 4, "loss": 2.0}\n{"step": 4, "restart": 1, "code": 9, "why": "x"}\n'
    )
    Events(tmp_path / "events.jsonl", first_step=4).close()
    assert [event.get("restart") for event in jobs.events(tmp_path)] == [None, 1]
    assert read_outcome(tmp_path).loss == 2.0


def test_processes_that_others_started_or_that_are_on_other_nodes_are_not_started_again():
    with pytest.raises(ConfigError, match=r"launch\.max_restarts=1, but torchrun started this process"):
        layout.resolve_layout(config("launch.max_restarts=1"), ProcessInfo(0, 2, 0, 2, "torchrun"))
    nodes = ("launch.nodes=2", "launch.node_rank=0", "launch.rendezvous=10.0.0.1:29400")
    with pytest.raises(ConfigError, match="a run on several nodes is not started again by itself"):
        config("launch.max_restarts=1", *nodes)


@pytest.mark.parametrize(("words", "warned"), [(["launch.max_restarts=1"], True), ([], False)])
def test_a_run_on_one_process_says_that_nothing_starts_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], warned: bool
):
    task = f"{tasks.__file__}:LinearTask"
    path = f"run.dir={tmp_path}"
    words = ["layout.world_size=1", "layout.device=cpu", "train.steps=1", "observe.progress=false", path, *words]
    start_run(load_config(task, words)[0])
    assert ("has no effect on a single process" in capsys.readouterr().err) == warned


def test_who_was_asked_to_end_is_not_started_again(
    start: Callable[..., ResolvedRun], attempts: Attempts, monkeypatch: pytest.MonkeyPatch
):
    attempts.code = 10
    monkeypatch.setattr(preemption, "seconds_since_signal", lambda: 3.0)
    assert failed(start("launch.max_restarts=2")) == "rank 1 died.\nMore of it."
    assert len(attempts.made) == 1
