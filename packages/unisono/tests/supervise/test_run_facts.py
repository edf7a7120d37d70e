"""What a run's folder says of it: one reader, and each state is seen by its own signs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.runtime.errors import RunError
from unisono.supervise import identity, run_lock
from unisono.supervise.run_facts import find_cause, read_run_facts

CONFIG = {"recipe": "spirals", "train": {"steps": 3}, "optim": {"kind": "sgd", "lr": 0.1}}


def folder_of(tmp_path: Path, *events: dict[str, Any], fault: int | None = None) -> Path:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    if fault is not None:
        (tmp_path / "logs").mkdir()
        record = {"rank": 0, "kind": "DataError", "text": "gone", "code": fault, "fault": "", "time": 1.0}
        (tmp_path / "logs" / "rank-00000.fault.json").write_text(json.dumps(record))
    return tmp_path


STEP = [{"step": step, "loss": 1.0 / step} for step in (1, 2, 3)]


def test_a_run_with_all_its_steps_is_finished(tmp_path: Path) -> None:
    facts = read_run_facts(folder_of(tmp_path, *STEP, {"step": 3, "eval": True, "loss": 0.25}))
    assert (facts.state, facts.steps_done, facts.total, facts.loss) == ("finished", 3, 3, 1 / 3)
    assert [event["loss"] for event in facts.evaluations] == [0.25]


@pytest.mark.parametrize(("code", "state"), [(2, "failed"), (75, "stopped"), (130, "stopped")])
def test_an_error_that_ended_a_run_is_its_reason(tmp_path: Path, code: int, state: str) -> None:
    facts = read_run_facts(folder_of(tmp_path, *STEP[:2], fault=code))
    assert (facts.state, facts.why, facts.code) == (state, "rank 0: gone", code)


def test_an_error_on_which_all_processes_agree_is_that_of_the_lowest_rank_whoever_wrote_it_first() -> None:
    same = {"kind": "NonFiniteError", "text": "step 2: the loss is not finite", "code": 3}
    other = {"rank": 0, "kind": "OSError", "text": "no space", "code": 1, "time": 3.0}
    faults = [{**same, "rank": 2, "time": 1.0}, {**same, "rank": 1, "time": 2.0}, other]
    assert find_cause(faults, []) == (3, ["rank 1: step 2: the loss is not finite"])


def test_a_run_that_a_process_holds_is_running_and_one_that_nobody_ended_was_killed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, *STEP[:2], {"step": 2, "stopped": "the loss did not improve"})
    with run_lock.hold_lock(folder):
        assert read_run_facts(folder).state == "running"
    facts = read_run_facts(folder)
    assert (facts.state, facts.why) == ("stopped", "the loss did not improve")
    owner = {**identity.own_identity(), "born": "never", "released": False}
    max((folder / "lease").glob("*.json")).write_text(json.dumps(owner))
    assert read_run_facts(folder).state == "killed"
    (folder / "events.jsonl").unlink()
    assert read_run_facts(folder).state == "not started"


def test_planned_steps_are_those_of_the_data(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, *STEP)
    (folder / "fingerprint.json").write_text(json.dumps({"data": {"steps": 5}}))
    facts = read_run_facts(folder)
    assert (facts.total, facts.state) == (5, "killed")


def test_another_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run directory \(no config\.yaml\)"):
        read_run_facts(tmp_path)
