"""`unisono search`: trials are runs, a study resumes, and the best configuration is one that `train` takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.launch.launcher import Ended
from unisono.observe import events
from unisono.supervise import run_lock
from unisono_sweeps.launchers.local import LocalLauncher

from .written import ROOT, write_run

optuna = pytest.importorskip("optuna")
Command = Callable[..., tuple[int, str, str]]
TASK = f"{ROOT / 'packages' / 'unisono' / 'tests' / 'tasks.py'}:TransformerTask"
BASE = ("optim=adamw", "train.steps=4", "train.global_batch=9", "layout.device=cpu", "name=q")
LR = "optim.lr=tag(log,interval(1e-4,1e-1))"


def study(folder: str = "runs/q") -> Any:
    backend = optuna.storages.journal.JournalFileBackend(f"{folder}/study.journal")
    return optuna.load_study(study_name="search", storage=optuna.storages.JournalStorage(backend))


def lr_of(job: Any) -> float:
    return next(float(word.partition("=")[2]) for word in job.command if word.startswith("optim.lr="))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that write what a run would: the larger the rate, the larger the loss of every step."""
    names: list[str] = []

    def run(self: LocalLauncher, jobs: Any, started: Any, ended: Any, stops: Any) -> None:
        for job in jobs:
            names.append(job.name)
            started(job)
            write_run(job.folder, [lr_of(job)] * 4, evaluations=1, optim__lr=lr_of(job))
            ended(job, Ended(75 if stops(job) else 0, 1.0))

    monkeypatch.setattr(LocalLauncher, "run", run)
    return names


def test_the_best_configuration_is_trained_to_the_same_loss(command: Command, started: list[str]) -> None:
    code, out, _ = command("search", TASK, *BASE, LR, "trials=2")
    assert code == 0
    assert started == ["trial-00000", "trial-00001"]
    best = study().best_trial
    assert f"best of 2: trial-{best.number:05d} with eval/loss" in out
    assert "train it: unisono train --config-dir runs/q/best best" in out
    assert command("train", "--config-dir", "runs/q/best", "best", "run.name=again", "layout.device=cpu")[0] == 0
    assert events.last_evaluation(events.read_events(Path("runs/again/events.jsonl")))["loss"] == best.value


def test_a_search_that_was_interrupted_resumes_the_same_trial(
    command: Command, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalLauncher.run

    def interrupted(self: Any, jobs: Any, started: Any, ended: Any, stops: Any) -> None:
        started(next(jobs))
        raise KeyboardInterrupt

    words = ("search", TASK, *BASE, LR, "trials=3")
    with monkeypatch.context() as patched:
        patched.setattr(LocalLauncher, "run", interrupted)
        patched.setattr("unisono.supervise.identity.own_identity", lambda: GONE)
        assert command(*words)[0] == 130
    first = study().trials[0]
    assert first.state.name == "RUNNING"
    assert LocalLauncher.run is whole
    assert command(*words)[0] == 0
    assert pretended == ["trial-00000", "trial-00001", "trial-00002"]
    assert study().trials[0].params == first.params
    assert command(*words)[0] == 0
    assert len(pretended) == 3


def test_a_trial_that_a_user_stopped_stays_open(
    command: Command, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unisono stop` ends a run with code 0, and what it has reached by then is no result."""
    words = ("search", TASK, *BASE, LR, "trials=2", "prune=false")

    def stopped(self: Any, jobs: Any, started: Any, ended: Any, stops: Any) -> None:
        job = next(jobs)
        started(job)
        write_run(job.folder, [3.0] * 2, total=4, evaluations=1, optim__lr=lr_of(job))
        with (job.folder / "events.jsonl").open("a") as file:
            file.write('{"step": 2, "stopped": "as requested"}\n')
        with run_lock.hold_lock(job.folder):
            pass
        ended(job, Ended(0, 1.0))

    with monkeypatch.context() as patched:
        patched.setattr(LocalLauncher, "run", stopped)
        _, out, _ = command(*words)
    assert "trial-00000: saved and stopped: as requested, after step 2 of 4" in out
    assert study().trials[0].state.name == "RUNNING"


GONE = {"host": "h", "machine": "m", "pid": 1, "born": "1"}


@pytest.fixture(autouse=True)
def gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has ended, and is known to have."""
    from unisono.supervise import identity

    real = identity.is_alive
    monkeypatch.setattr(identity, "is_alive", lambda who: False if who == GONE else real(who))


def test_runs_that_are_worse_than_the_median_are_pruned(command: Command, pretended: list[str]) -> None:
    assert command("search", TASK, *BASE, LR, "trials=12")[0] == 0
    states = [trial.state.name for trial in study().trials]
    assert set(states) == {"COMPLETE", "PRUNED"}
    best = min(trial.value for trial in study().trials if trial.state.name == "COMPLETE")
    assert all(
        max(trial.intermediate_values.values()) > best for trial in study().trials if trial.state.name == "PRUNED"
    )
    assert command("search", TASK, *BASE, LR, "trials=12", "prune=false", "name=all")[0] == 0
    assert {trial.state.name for trial in study("runs/all").trials} == {"COMPLETE"}


def test_a_run_that_has_gone_far_beyond_the_others_when_it_is_looked_at_is_pruned(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last evaluation is of a step that no other trial has: it is compared at those that they have."""

    def run(self: LocalLauncher, jobs: Any, started: Any, ended: Any, stops: Any) -> None:
        for number, job in enumerate(jobs):
            started(job)
            write_run(job.folder, [9.0] * 40 if number == 5 else [1.0] * 4, evaluations=1, optim__lr=lr_of(job))
            ended(job, Ended(75 if stops(job) else 0, 1.0))

    monkeypatch.setattr(LocalLauncher, "run", run)
    assert command("search", TASK, *BASE, LR, "trials=6")[0] == 0
    assert [trial.state.name for trial in study().trials] == ["COMPLETE"] * 5 + ["PRUNED"]


def test_several_metrics_give_the_trials_that_no_other_one_beats(command: Command, pretended: list[str]) -> None:
    code, out, _ = command("search", TASK, *BASE, LR, "trials=3", "metric=[loss,seconds]", "mode=[max,min]")
    assert code == 0
    assert len(re.findall("train it", out)) == len(study().best_trials) == 1
    assert study().best_trials[0].values[0] == max(trial.values[0] for trial in study().trials)


def test_a_space_of_the_user_may_be_conditional(command: Command, pretended: list[str]) -> None:
    Path("mine.py").write_text(
        "def space(trial):\n    kind = trial.suggest_categorical('kind', ['adamw', 'lion'])\n"
        "    more = {'beta2': trial.suggest_float('beta2', 0.9, 0.99)} if kind == 'adamw' else {}\n"
        "    return {'optim': {'kind': kind, 'lr': trial.suggest_float('lr', 1e-4, 1e-2, log=True)}}\n"
    )
    code, _, err = command("search", TASK, *BASE[1:], "space=mine.py", "trials=4")
    assert (code, err) == (0, "")
    assert all(("beta2" in trial.params) == (trial.params["kind"] == "adamw") for trial in study().trials)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([LR], "trials is missing: add trials=…"),
        (["trials=2"], "no key has several values to search"),
        (["trials=2", "optim.lrr=interval(1,2)"], "unknown key 'optim.lrr'"),
        (["trials=2", LR, "metric=[a,b]", "mode=[min,min,max]"], "mode has 3 values for 2 metrics"),
        (["trials=1", LR, "metric=eval/los"], "the run has no eval/los; did you mean 'eval/loss'"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    command: Command, pretended: list[str], words: list[str], message: str
) -> None:
    code, _, err = command("search", TASK, *BASE, *words)
    assert code in (1, 2)
    assert message in err


def test_a_journal_that_a_crash_has_torn_loses_its_last_line_alone(command: Command, pretended: list[str]) -> None:
    words = ("search", TASK, *BASE, LR, "prune=false")
    assert command(*words, "trials=2")[0] == 0
    journal = Path("runs/q/study.journal")
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "stu')
    code, _, err = command(*words, "trials=4")
    assert code == 0
    assert "study.journal ended within a line, as after a crash" in err
    assert [trial.state.name for trial in study().trials] == ["COMPLETE"] * 4
    journal.write_bytes(b"\x00\xff\n")
    code, _, err = command(*words, "trials=5")
    assert code == 2
    assert "study.journal cannot be read" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((LR, "metric=loss"), "metric: eval/loss there, and loss here"),
        ((LR, "train.global_batch=3"), "train.global_batch=9, train.steps=4 there"),
        ((LR, "run.seed=1"), "run.seed=1, train.global_batch=9, train.steps=4 here"),
        (("optim.lr=1e-3,1e-2",), "holds a search with other values of optim.lr"),
        ((LR, "mode=max"), "holds a search with other directions (minimize)"),
    ],
)
def test_a_journal_of_another_search_is_refused(
    command: Command, pretended: list[str], words: tuple[str, ...], message: str
) -> None:
    assert command("search", TASK, *BASE, LR, "trials=1")[0] == 0
    own = [word for word in BASE if not any(word.split("=")[0] == other.split("=")[0] for other in words)]
    code, _, err = command("search", TASK, *own, *words, "trials=2")
    assert code == 2
    assert message in err
    assert pretended == ["trial-00000"]
    assert command("search", TASK, *BASE, LR, "trials=2", "layout.world_size=1", "observe.log_every=2")[0] == 0


def test_a_metric_that_is_not_finite_fails_its_trial_alone(
    command: Command, pretended: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from unisono_sweeps import search

    monkeypatch.setattr(search, "measure", lambda run: {"loss": None if "00000" in str(run.folder) else 1.0})
    code, out, err = command("search", TASK, *BASE, LR, "trials=2", "metric=loss")
    assert code == 0
    assert "trial-00000: failed: its loss is not finite" in err
    assert "best of 1: trial-00001" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise KeyError('mine')", "mine.py: space() failed:"),
        ("return {'run.name': 'x'}", "run.name is not its to set"),
        ("return {1: 2}", "the key 1 of a setting is not a text"),
    ],
)
def test_a_space_that_fails_is_told_by_its_lines(
    command: Command, pretended: list[str], text: str, message: str
) -> None:
    Path("mine.py").write_text(f"def space(trial):\n    {text}\n")
    code, _, err = command("search", TASK, *BASE[1:], "space=mine.py", "trials=2")
    assert code == 2
    assert message in err
