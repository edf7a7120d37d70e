"""How often a run is started again, after what, and what is said and recorded of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests import tasks
from tests.launch import jobs
from unisono.config import resolve
from unisono.config.schema.run import RunConfig
from unisono.launch import local_processes, restart, train
from unisono.observe.events import Events
from unisono.runtime.communicator import Place
from unisono.runtime.errors import ConfigError
from unisono.supervise import preemption


def config(*words: str) -> RunConfig:
    return resolve.load(f"{tasks.__file__}:LinearTask", ["layout.world_size=2", "layout.device=cpu", *words])[0]


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Numbers of the attempts that were made; every one of them fails with the code that is written in `CODE`."""
    made: list[str] = []

    def launch(*_: object) -> None:
        made.append(os.environ["UNISONO_ATTEMPT"])
        raise local_processes.WorkerError("rank 1 died.\nMore of it.", int(os.environ["CODE"]))

    monkeypatch.setattr(local_processes, "launch", launch)
    return made


def failed(folder: Path, *words: str) -> str:
    (folder / "config.yaml").write_text(yaml.safe_dump(config(*words).model_dump(mode="json")))
    with pytest.raises(local_processes.WorkerError) as caught:
        restart.launch(config(*words), folder, 1)
    return str(caught.value)


@pytest.mark.parametrize("code", [5, 9, 10])
def test_a_run_is_started_as_often_as_it_may_and_then_fails_with_how_often(
    tmp_path: Path, attempts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
):
    monkeypatch.setenv("CODE", str(code))
    events = Events(tmp_path / "events.jsonl")
    events.write({"step": 1, "loss": 2.0})
    events.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # a process died while it wrote
    text = failed(tmp_path, "launch.max_restarts=2")
    assert text.endswith("\nIt was started again 2 times (launch.max_restarts)")
    assert attempts == ["0", "1", "2"]
    assert "UNISONO_ATTEMPT" not in os.environ
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "starting all" in line] == [
        "unisono: starting all processes again, from the beginning: there is no checkpoint (attempt 1 of 2, "
        "launch.max_restarts)",
        "unisono: starting all processes again, from the beginning: there is no checkpoint (attempt 2 of 2, "
        "launch.max_restarts)",
    ]
    kept = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if "restart" in line]
    assert kept[0] == f'{{"step": 0, "restart": 1, "code": {code}, "why": "rank 1 died."}}'
    assert len(kept) == 2


@pytest.mark.parametrize("code", [1, 2, 3, 4, 6, 75, 130])
def test_what_would_fail_again_is_not_started_again(
    tmp_path: Path, attempts: list[str], monkeypatch: pytest.MonkeyPatch, code: int
):
    monkeypatch.setenv("CODE", str(code))
    assert failed(tmp_path, "launch.max_restarts=2") == "rank 1 died.\nMore of it."
    assert attempts == ["0"]
    assert not (tmp_path / "events.jsonl").exists()


def test_a_new_start_stays_in_the_file_and_is_no_step(tmp_path: Path):
    (tmp_path / "events.jsonl").write_text(
        '{"step": 4, "loss": 2.0}\n{"step": 4, "restart": 1, "code": 9, "why": "x"}\n'
    )
    Events(tmp_path / "events.jsonl", first_step=4).close()
    assert [event.get("restart") for event in jobs.events(tmp_path)] == [None, 1]
    assert train.outcome(tmp_path).loss == 2.0


def test_processes_that_others_started_or_that_are_on_other_nodes_are_not_started_again():
    with pytest.raises(ConfigError, match=r"launch\.max_restarts=1, but torchrun has started this process"):
        train.concrete(config("launch.max_restarts=1"), Place(0, 2, 0, 2, "torchrun"))
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
    train.start(resolve.load(task, words)[0])
    assert ("nothing starts it again" in capsys.readouterr().err) == warned


def test_who_was_asked_to_end_is_not_started_again(
    tmp_path: Path, attempts: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CODE", "10")
    monkeypatch.setattr(preemption, "waited", lambda: 3.0)
    assert failed(tmp_path, "launch.max_restarts=2") == "rank 1 died.\nMore of it."
    assert attempts == ["0"]
