"""`unisono sweep`: everything is checked before anything starts, and nothing runs twice."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests.screen import check_widths
from unisono.cli.main import main
from unisono.launch import launcher
from unisono.launch.launcher import Job
from unisono.launch.resolving import run_directory
from unisono.runtime.errors import ConfigError
from unisono.supervise.run_facts import read_run_facts
from unisono.supervise.step_sync import StepSync
from unisono_sweeps import sweep as sweeps
from unisono_sweeps.launchers.local import LocalLauncher

from .eight import half_done, measured_table, sweep_process
from .written import TASK

EVALUATED = TASK.replace("LinearTask", "TransformerTask")
BASE = ("optim=sgd", "train.steps=3", "train.global_batch=8", "layout.device=cpu", "name=s")
Command = Callable[..., tuple[int, str, str]]


def test_a_sweep_runs_once_and_the_same_command_runs_only_what_is_new(command: Command, started: list[str]) -> None:
    words = ("sweep", TASK, *BASE, "trial=false")
    assert command(*words, "optim.lr=0.1,0.01")[0] == 0
    assert started == ["lr0.1", "lr0.01"]
    code, out, _ = command(*words, "optim.lr=0.1,0.01")
    assert (code, started) == (0, ["lr0.1", "lr0.01"])
    assert "2 of them finished already" in out
    assert command(*words, "optim.lr=0.1,0.01,0.001")[0] == 0
    assert started == ["lr0.1", "lr0.01", "lr0.001"]
    listed = json.loads(Path("runs/s/sweep.json").read_text())["runs"]
    assert listed == {name: {"optim.lr": name[2:]} for name in started}


def test_a_dry_run_wraps_no_line_and_loses_no_word_at_any_width(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01", "optim.momentum=0.0,0.9", "--dry-run")
    check_widths(monkeypatch, lambda: main(words))
    assert not started


def test_a_run_that_fails_is_told_by_its_sentence_and_is_run_again(command: Command, started: list[str]) -> None:
    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=1e30,0.01")
    code, out, err = command(*words)
    assert (code, started) == (1, ["lr1e+30", "lr0.01"])
    assert "lr1e+30: failed with exit code 3" in err
    assert "lr0.01: finished" in out
    assert command(*words)[0] == 1
    assert started == ["lr1e+30", "lr0.01", "lr1e+30"]


def test_a_run_that_a_user_stopped_is_open_and_the_same_command_resumes_it(
    command: Command, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unisono stop` ends a run with code 0, as its last step and its own early stopping do."""
    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")
    whole, run = StepSync.decide, Path("runs/s/lr0.1")

    def stop_the_first(self: StepSync, *asked: Any) -> Any:
        if read_run_facts(run).steps_done:
            (run / "stop").touch()
            self._last_look = -math.inf
        return whole(self, *asked)

    with monkeypatch.context() as patched:
        patched.setattr(StepSync, "decide", stop_the_first)
        code, out, _ = command(*words)
    assert code == 1
    assert "lr0.1: saved and stopped: as requested, after step 1 of 3" in out
    assert "lr0.01: finished" in out
    code, out, _ = command(*words)
    assert code == 0
    assert "lr0.1: resumes after step 1\n" in out
    assert started == ["lr0.1", "lr0.01", "lr0.1"]
    assert read_run_facts(run).state == "finished"


def test_a_run_that_ended_early_by_its_own_rule_is_finished_as_long_as_the_rule_holds(
    command: Command, started: list[str]
) -> None:
    words = ("sweep", EVALUATED, *BASE, "trial=false", "optim.lr=0.01", "eval.every=1")
    rule = ("eval.patience=1", "eval.mode=max")  # the loss falls, so that no evaluation is better than the first
    for _ in range(2):
        assert command(*words, *rule)[0] == 0
    assert started == ["run"]
    assert read_run_facts(Path("runs/s/run")).steps_done == 2
    assert command(*words)[0] == 0
    assert started == ["run", "run"]
    assert read_run_facts(Path("runs/s/run")).steps_done == 3


def test_all_mistakes_are_reported_at_once_with_file_and_line_and_nothing_starts(started: list[str]) -> None:
    path = Path("study.py")
    path.write_text(
        'def configs():\n    return [{"optim.lrr": 1}, {"optim.lr": 1},\n        {"train.global_batch": 7}]\n'
    )
    words = ["optim=sgd", "train.steps=3", "layout.world_size=2", "layout.device=cpu", "configs=study.py", "name=s"]
    with pytest.raises(ConfigError) as refused:
        sweeps.run_sweep(TASK, None, words, dry_run=False)
    said = str(refused.value)
    assert "2 of 3 runs cannot start, so none was started" in said
    assert "unknown key 'optim.lrr' (study.py:2), did you mean 'optim.lr'?" in said
    assert "7" in said.split("global_batch7:")[1]
    assert not started
    assert not Path("runs").exists()


def test_a_stale_key_in_one_of_many_runs_is_named(started: list[str]) -> None:
    path = Path("study.py")
    path.write_text(
        "def configs():\n    runs = [{'optim.lr': 1 / (n + 1)} for n in range(100)]\n"
        "    runs[77]['optim.beta'] = 1\n    return runs\n"
    )
    with pytest.raises(ConfigError, match=r"1 of 100 runs cannot start.*\n.*\n.*'optim.beta' \(study.py:3\)"):
        sweeps.run_sweep(TASK, None, [*BASE, "configs=study.py", "trial=false"], dry_run=False)
    assert not started


def test_a_shape_that_does_not_fit_is_found_before_anything_starts(started: list[str], here: Path) -> None:
    (here / "mine.py").write_text(
        "from torch import nn\nfrom packages.unisono.tests.tasks import LinearTask\n\n\nclass Mine(LinearTask):\n"
        "    def build(self):\n        return nn.Linear(3, 1)\n"
    )
    with pytest.raises(ConfigError) as refused:
        sweeps.run_sweep("mine.py:Mine", None, [*BASE, "task.features=3,4", "optim.lr=0.1,0.2"], dry_run=False)
    said = str(refused.value)
    assert "2 of 4 runs cannot start" in said
    assert "features4-lr0.1, features4-lr0.2" in said
    assert "shapes cannot be multiplied" in said
    assert not started


def test_a_run_that_exists_with_another_configuration_is_refused(command: Command, started: list[str]) -> None:
    assert command("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")[0] == 0
    with pytest.raises(ConfigError) as refused:
        sweeps.run_sweep(TASK, None, [*BASE, "optim.lr=0.1,0.01", "trial=false", "ema.decay=0.9"], dry_run=False)
    assert "holds a run with another configuration: ema.decay was None and is 0.9" in str(refused.value)
    assert len(started) == 2


def test_a_dry_run_prints_the_differences_and_what_each_run_takes_and_starts_nothing(
    command: Command, started: list[str]
) -> None:
    code, out, _ = command("sweep", TASK, *BASE, "task.features=3,5", "seeds=2", "--dry-run")
    head, first, *_ = out.splitlines()
    assert code == 0
    assert head.split() == ["features", "seed", "state", "steps", "parameters", "FLOPs", "time", "disk"]
    assert first.split()[:5] == ["3", "0", "new", "3", "4"]
    assert "4 runs in runs/s" in out
    assert not started
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run.name=x"], "a sweep names its runs"),
        (["launcher=slumr"], "launcher=slumr: no such launcher"),
        (["jobs=0"], "jobs: input should be greater than 0"),
        (["seeds=[]"], "seeds=\\[\\] names no seed"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweeps.run_sweep(TASK, None, [*BASE, *words], dry_run=True)


@pytest.mark.slow
def test_a_sweep_that_is_killed_and_resumed_equals_an_unbroken_one_bit_for_bit(here: Path) -> None:
    """Of 8 runs, two at a time: killed, with all that it started, in the middle; the tables are the same."""
    whole, broken = here / "whole", here / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    assert sweep_process(whole).wait(900) == 0
    process, deadline = sweep_process(broken), time.monotonic() + 900
    outcomes = broken / "runs/s/outcomes.jsonl"
    while not outcomes.exists() or len(outcomes.read_text().splitlines()) < 3 or not half_done(broken):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut = half_done(broken)
    assert cut
    done = len(outcomes.read_text().splitlines())
    assert sweep_process(broken).wait(900) == 0
    again = [json.loads(line)["run"] for line in outcomes.read_text().splitlines()[done:]]
    assert {run.name for run in cut} <= set(again)
    tables = [measured_table(folder / "runs/s") for folder in (whole, broken)]
    assert tables[0].num_rows == 8
    assert tables[0].equals(tables[1])


def test_the_job_of_a_run_is_the_command_that_a_user_would_type(here: Path) -> None:
    seen: list[Job] = []

    class Listing(LocalLauncher):
        def check(self, jobs: Any) -> None:
            seen.extend(jobs)

    own = pytest.MonkeyPatch()
    own.setattr(launcher, "find_launcher", lambda name: Listing)
    sweeps.run_sweep(TASK, None, [*BASE, "optim.lr=0.1,0.01", "trial=false"], dry_run=True)
    own.undo()
    place = ["run.dir=runs/s", "run.name='lr0.1'"]
    assert list(seen[0].command[1:]) == ["-m", "unisono", "train", TASK, *BASE[:-1], "optim.lr=0.1", *place]


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError, match="launcher=slurm: this host has no sbatch; start the command where"):
        sweeps.run_sweep(TASK, None, [*BASE, "optim.lr=1,2", "launcher=slurm", "time=4h"], dry_run=True)
    with pytest.raises(ConfigError, match=r"time: input should be a valid integer.* got 'soon'"):
        sweeps.run_sweep(TASK, None, [*BASE, "optim.lr=1,2", "launcher=slurm", "time=soon"], dry_run=True)


def test_a_sweep_is_a_group_in_trackers(started: list[str], command: Command) -> None:
    pytest.importorskip("tensorboard")
    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1", "observe.trackers=[tensorboard]")
    assert command(*words)[0] == 0
    assert command(*words, "name=other", "observe.group=mine")[0] == 0
    found = {name: read_run_facts(Path(f"runs/{name}/run")).config["observe"]["group"] for name in ("s", "other")}
    assert found == {"s": "s", "other": "mine"}


def test_a_run_whose_folder_is_damaged_when_it_ends_has_failed_and_the_others_go_on(
    command: Command, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalLauncher.run

    def damaging(self: LocalLauncher, jobs: Any, begun: Any, ended: Any, stops: Any = None) -> None:
        def then(job: Job, how: Any) -> None:
            if job.name == "lr0.1":
                (job.folder / "config.yaml").write_text("recipe: [")
            ended(job, how)

        whole(self, jobs, begun, then, stops)

    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")
    with monkeypatch.context() as patched:
        patched.setattr(LocalLauncher, "run", damaging)
        code, out, err = command(*words)
    assert (code, started) == (1, ["lr0.1", "lr0.01"])
    assert "lr0.1: failed with exit code 2: runs/s/lr0.1/config.yaml" in err
    assert "lr0.01: finished" in out
    code, _, err = command(*words)
    assert code == 2
    assert "1 of 2 runs cannot start, so none was started:" in err
    assert "runs/s/lr0.1/config.yaml" in err


def test_a_run_whose_log_is_lost_is_finished_by_its_checkpoints_and_the_table_says_what_is_missing(
    command: Command, started: list[str]
) -> None:
    words = ("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")
    assert command(*words)[0] == 0
    log = Path("runs/s/lr0.1/events.jsonl")
    for text in (log.read_bytes()[:-30], b"", b"\x00" * 50):
        log.write_bytes(text)
        code, out, err = command(*words)
        assert (code, err) == (0, "")
        assert "2 of them finished already" in out
        _, _, err = command("compare", "runs/s")
        assert re.search(r"lr0.1: its events.jsonl ends after step \d, and it has saved step 3", err)
    assert started == ["lr0.1", "lr0.01"]


def test_a_console_that_is_no_folder_is_refused_before_anything_starts(command: Command, started: list[str]) -> None:
    console = Path("runs/s/console")
    console.parent.mkdir(parents=True)
    Path("runs/s/sweep.json").write_text("{")
    for link in (False, True):
        console.symlink_to("/") if link else console.touch()
        code, _, err = command("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")
        assert code == 2
        assert "runs/s/console is not a folder, where what runs print is written; remove it" in err
        console.unlink()
    assert not started


def test_the_second_of_two_commands_of_one_sweep_is_refused(command: Command, started: list[str]) -> None:
    with run_directory.hold_directory(Path("runs/s")):
        code, _, err = command("sweep", TASK, *BASE, "trial=false", "optim.lr=0.1,0.01")
    assert code != 0
    assert "runs/s" in err
    assert not started
