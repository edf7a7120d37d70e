"""The verbs on runs as such: resume needs no other word; list, watch and clean say what there is before they act."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.security.runs import stranger
from unisono.checkpoint.core import commit
from unisono.cli import runs
from unisono.config.code import own_runs
from unisono.supervise import run_lock, run_status

LINEAR = f"{tasks.__file__}:LinearTask"
SHORT = (
    "train.global_batch=8", "observe.progress=false", "layout.threads=1", "layout.world_size=1", "layout.device=cpu",
    "schedules=constant", "schedules.lr.warmup=2",
)  # fmt: skip

Told = tuple[int, str, str]
Command = Callable[..., Told]


@pytest.fixture
def unisono(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    monkeypatch.chdir(tmp_path)
    return command


def started(unisono: Command, *words: str, name: str = "a") -> Path:
    assert unisono("train", LINEAR, *SHORT, f"run.name={name}", *words)[0] == 0
    return Path("runs") / name


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in jobs.events(run) if not event.get("eval")]


# resume -------------------------------------------------------------------------------------------------------------


def test_resume_needs_no_word_but_the_run_and_computes_what_an_uninterrupted_run_does(unisono: Command):
    whole = started(unisono, "train.steps=6", name="whole")
    part = started(unisono, "train.steps=6", "run.stop_after=2", name="part")
    assert unisono("resume", part)[0] == 0
    assert losses(part) == losses(whole)


def test_a_resumed_run_that_ends_early_says_how_to_resume_it_again(unisono: Command):
    part = started(unisono, "train.steps=6", "run.stop_after=2")
    code, told, _ = unisono("resume", part, "run.stop_after=4", "observe.progress=true")
    assert (code, "Resume with:\n  unisono resume runs/a observe.progress=true\n" in told) == (0, True), told
    assert "  unisono resume runs/a" in unisono("diagnose", part)[1]


def test_a_run_that_was_moved_is_resumed_where_it_is(unisono: Command):
    part = started(unisono, "train.steps=4", "run.stop_after=2")
    part.rename("moved")
    assert unisono("resume", "moved")[0] == 0
    assert (len(losses(Path("moved"))), part.exists()) == (4, False)


def test_a_finished_run_says_so_and_how_to_extend_it(unisono: Command):
    run = started(unisono, "train.steps=2")
    code, told, _ = unisono("resume", run)
    assert (code, told) == (
        0, "runs/a is finished, after step 2. To extend it: unisono resume runs/a train.steps=4\n"
    )  # fmt: skip


def test_a_finished_run_whose_checkpoints_are_gone_says_so_and_offers_no_extension(unisono: Command):
    run = started(unisono, "train.steps=2")
    shutil.rmtree(run / "checkpoints")
    code, told, error = unisono("resume", run)
    assert (code, told) == (0, "runs/a is finished, after step 2\n")
    assert "WARNING: runs/a has saved checkpoints since step 2, and runs/a/checkpoints does not exist on" in error


def test_only_one_s_own_run_is_resumed_without_trust(unisono: Command, tmp_path: Path, spirals: Path):
    theirs, touched = stranger(tmp_path, "layout.world_size=1")
    code, _, error = unisono("resume", theirs)
    assert (code, touched.exists()) == (2, False)
    assert "Nothing shows that you made this run" in error and "--trust" in error
    packaged, _ = stranger(tmp_path / "other", reference="spirals")  # its configuration is a stranger's, too
    assert "cannot be resumed without your word" in unisono("resume", packaged)[2]


def test_a_run_whose_settings_somebody_changed_is_not_resumed(unisono: Command):
    run = started(unisono, "train.steps=4", "run.stop_after=2")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    assert "its config.yaml has changed since" in unisono("resume", run)[2]
    (run / own_runs.MARK_FILE).unlink()
    assert "Nothing shows that you made this run" in unisono("resume", run)[2]


# another number of steps ----------------------------------------------------------------------------------------------


def test_a_finished_run_is_extended_where_the_schedule_allows_and_equals_a_run_of_that_length(unisono: Command):
    run = started(unisono, "train.steps=3")
    assert unisono("resume", run, "train.steps=6")[0] == 0
    assert losses(run) == losses(started(unisono, "train.steps=6", name="whole"))


def test_a_schedule_that_depends_on_the_length_is_named_with_the_word_that_extends_all_the_same(unisono: Command):
    run = started(unisono, "train.steps=4", "schedules=cosine", "schedules.lr.warmup=1")
    code, _, error = unisono("resume", run, "train.steps=8")
    assert code == 2
    assert "schedules.lr (cosine) depends on the number of steps: with 8, it would have had other values from" in error
    assert "step 3 on, and 4 steps are made" in error
    assert "run.allow_change=[train.steps]" in error
    command = unisono("resume", run)[1].partition("To extend it: ")[2].strip()
    assert command == "unisono resume runs/a train.steps=8 'run.allow_change=[train.steps]'"
    assert unisono(*shlex.split(command)[1:])[0] == 0
    assert len(losses(run)) == 8


def test_a_run_in_epochs_is_extended_by_the_command_that_resume_prints(unisono: Command):
    run = started(unisono, "train.epochs=1", "schedules=constant")
    made = len(losses(run))
    told = unisono("resume", run)[1]
    command = told.partition("To extend it: ")[2].strip()
    assert command == "unisono resume runs/a train.epochs=2 'run.allow_change=[train.epochs]'"
    code, _, error = unisono(*shlex.split(command)[1:])
    assert code == 0, error
    assert len(losses(run)) == 2 * made


def test_steps_instead_of_epochs_are_no_contradiction_but_another_run(unisono: Command):
    run = started(unisono, "train.epochs=1")
    code, _, error = unisono("resume", run, "train.steps=9")
    assert code == 2 and "train.epochs: 1.0 there, None here" in error
    assert "run.allow_change=[train.epochs,train.steps]" in error


def test_an_exact_resume_does_not_extend(unisono: Command):
    run = started(unisono, "train.steps=3")
    assert "train.steps: 3 there, 6 here" in unisono("resume", run, "train.steps=6", "run.resume=exact")[2]


# list ---------------------------------------------------------------------------------------------------------------


def test_list_shows_the_state_and_the_progress_of_every_run_the_newest_first(unisono: Command, tmp_path: Path):
    started(unisono, "train.steps=2", name="done")
    started(unisono, "train.steps=4", "run.stop_after=1", name="part")
    os.utime("runs/part/events.jsonl", (time.time() - 7200,) * 2)
    (tmp_path / "runs" / "no-run").mkdir()
    code, told, _ = unisono("list")
    lines = [line.split() for line in told.splitlines()]
    assert (code, lines[0]) == (0, ["run", "state", "step", "loss", "age", "size"])
    assert [line[:3] for line in lines[1:]] == [["runs/done", "finished", "2/2"], ["runs/part", "stopped", "1/4"]]
    assert lines[2][4:6] == ["2", "h"]
    assert unisono("list", "runs/done")[1].splitlines()[1].startswith("runs/done  finished")
    assert unisono("list", "nowhere")[1] == "there are no runs in nowhere\n"


def test_describe_takes_a_run_as_it_takes_its_task(unisono: Command) -> None:
    code, said, errors = unisono("describe", started(unisono, "task.features=5"))
    assert (code, errors) == (0, "")
    assert said.splitlines()[0].split() == ["layer", "kind", "parameters", "shapes"]
    assert said == unisono("describe", LINEAR, "task.features=5")[1]


def test_a_run_that_trains_is_listed_with_its_host_and_process_and_one_that_failed_with_its_exit_code(unisono: Command):
    run = started(unisono, "train.steps=4", "run.stop_after=1")
    with run_lock.hold_lock(run):
        status = run_status.read_status(run)
    assert (status.state, status.is_running, f"(pid {os.getpid()})" in status.place) == ("running", True, True)
    fault = {"rank": 0, "kind": "NonFiniteError", "text": "no", "code": 3, "fault": "", "time": 1.0}
    (run / "logs").mkdir(exist_ok=True)
    (run / "logs" / "rank-00000.fault.json").write_text(json.dumps(fault))
    assert run_status.read_status(run).outcome == "failed (exit code 3)"


def test_only_the_end_of_the_events_is_read_and_nothing_in_a_run_is_followed(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("")
    line = json.dumps({"step": 5, "loss": 0.5}) + "\n"
    (tmp_path / "events.jsonl").write_text("x" * (1 << 20) + "\n" + line)
    assert run_status.read_status(tmp_path).step == 5
    (tmp_path / "events.jsonl").rename(tmp_path / "elsewhere")
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    assert run_status.read_status(tmp_path).step == 0
    (tmp_path / "loop").symlink_to(tmp_path)
    assert run_status.measure_size(tmp_path) < 2 << 20


# watch --------------------------------------------------------------------------------------------------------------


def test_watch_follows_a_run_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "_POLL", 0.01)
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "fingerprint.json").write_text('{"data": {"steps": 3}}')
    seen: list[str] = []
    with run_lock.hold_lock(tmp_path):
        follower = threading.Thread(target=lambda: seen.extend(runs.follow_run(tmp_path)))
        follower.start()
        with (tmp_path / "events.jsonl").open("w") as file:
            for step in (1, 2, 3):
                file.write(json.dumps({"step": step, "loss": step / 2, "seconds": 0.1}) + "\n")
                file.flush()
                time.sleep(0.2)
            file.write(json.dumps({"step": 3, "eval": True, "loss": 0.25, "rows": 7}) + "\n")
    follower.join(30)
    assert not follower.is_alive()
    steps = [line.split("  ")[0].removeprefix(f"{tmp_path}: ") for line in seen]
    assert steps[-3:] == ["step 3/3", "eval after step 3: loss 0.2500", "finished after step 3/3"]
    assert steps == [*dict.fromkeys(steps)]  # nothing twice


def test_watch_of_a_run_that_does_not_train_says_how_it_is(unisono: Command):
    run = started(unisono, "train.steps=4", "run.stop_after=1")
    told = unisono("watch", run)[1].splitlines()
    assert told[-1] == "runs/a: stopped after step 1/4; unisono diagnose runs/a says why"
    assert "is not a run directory" in unisono("watch", "nowhere")[2]


def test_a_run_that_was_stopped_is_diagnosed_as_stopped(unisono: Command):
    """Claim: it was told that it may still run, or that its host may have gone down."""
    run = started(unisono, "train.steps=4", "run.stop_after=1")
    code, told, _ = unisono("diagnose", run)
    assert (code, "  It was stopped after step 1.\n" in told, "No error is recorded" in told) == (0, True, False), told


# clean --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def littered(unisono: Command) -> Path:
    run = started(unisono, "train.steps=2", "checkpoint.every=1")
    (run / "checkpoints" / ".writing-step-00000003-abc").mkdir()
    (run / "checkpoints" / "damaged-step-00000001").mkdir()
    (run / "checkpoints" / "damaged-step-00000001" / "rank-00000.safetensors").write_bytes(bytes(50_000))
    (run / "replays").mkdir()
    (run / ".evaluated-0123" / "model").mkdir(parents=True)
    (run / "events.jsonl.0123.writing").touch()
    return run


def test_clean_says_what_would_be_freed_and_removes_nothing_without_a_yes(
    littered: Path, unisono: Command, monkeypatch: pytest.MonkeyPatch
):
    before = sorted(littered.rglob("*"))
    code, told, error = unisono("clean")
    assert (code, "add --yes" in error) == (2, True)
    assert "damaged-step-00000001  (a damaged checkpoint)" in told and "5 entries, 5" in told
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: "\n", raising=False)
    assert unisono("clean")[1].endswith("Remove it? [y/N]\nnothing was removed\n")
    assert sorted(littered.rglob("*")) == before


def test_clean_removes_leftovers_and_leaves_what_the_run_needs(littered: Path, unisono: Command):
    assert unisono("clean", littered, "--yes")[0] == 0
    assert [path.name for path in sorted((littered / "checkpoints").iterdir())] == ["step-00000001", "step-00000002"]
    assert not (littered / "replays").exists() and not list(littered.glob(".evaluated*"))
    assert unisono("evaluate", littered)[0] == 2  # LinearTask holds no rows out; the checkpoint is opened first
    assert unisono("clean", "runs")[1] == "there is nothing to remove in runs\n"


def test_clean_keeps_the_newest_checkpoints_that_are_asked_for_and_never_none(littered: Path, unisono: Command):
    assert unisono("clean", "--keep", "0", "--yes")[0] == 2
    assert unisono("clean", "--keep", "1", "--yes")[0] == 0
    assert [path.name for path in commit.find_checkpoints(littered / "checkpoints")] == ["step-00000002"]


def test_clean_removes_of_a_link_only_the_link(littered: Path, unisono: Command, tmp_path: Path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "precious").touch()
    (littered / "checkpoints" / "damaged-step-00000002").symlink_to(tmp_path / "archive")
    assert unisono("clean", "--yes")[0] == 0
    assert (tmp_path / "archive" / "precious").exists()


def test_clean_of_a_run_that_it_refuses_does_not_succeed(littered: Path, unisono: Command, tmp_path: Path):
    """Scripts took the exit code 0 for a run that was cleaned."""
    (littered / "checkpoints").rename(tmp_path / "elsewhere")
    (littered / "checkpoints").symlink_to(tmp_path / "elsewhere")
    code, _, error = unisono("clean", littered, "--yes")
    assert (code, "is a link, and nothing is removed where it leads" in error) == (2, True)
    assert unisono("clean", "--yes")[0] == 0  # of several, the others are cleaned


def test_clean_goes_on_to_the_next_run_where_one_cannot_be_locked(
    littered: Path, unisono: Command, monkeypatch: pytest.MonkeyPatch
):
    """A traceback, as of the run of another user, and those behind it were not cleaned."""
    shutil.copytree(littered, littered.with_name("b"))
    before, real = sorted(littered.rglob("*")), run_lock.hold_lock

    def hold(folder: Path) -> Any:
        if folder.name == "a":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return real(folder)

    monkeypatch.setattr(run_lock, "hold_lock", hold)
    code, told, error = unisono("clean", "--yes")
    assert (code, "runs/a is left as it is: [Errno 13] Permission denied" in error) == (0, True), error
    assert "removed; " in told and unisono("clean", "runs/b", "--yes")[1].startswith("there is nothing to remove")
    assert [path for path in before if not path.exists()] == []
    code, told, _ = unisono("clean", "--yes")
    assert (code, told.splitlines()[-1]) == (2, "nothing was removed")
    code, _, error = unisono("clean", littered, "--yes")
    assert (code, "runs/a could not be cleaned: [Errno 13] Permission denied" in error) == (2, True), error


def test_a_run_that_trains_is_never_cleaned(littered: Path, unisono: Command):
    before = sorted(littered.rglob("*"))
    with run_lock.hold_lock(littered):
        told = unisono("clean", "--yes")[1]
        code, _, error = unisono("clean", littered, "--yes")
    assert "runs/a is training and is left as it is" in told
    assert (code, "runs/a is training, and nothing of it was removed" in error) == (2, True)
    assert [path for path in before if not path.exists()] == []
