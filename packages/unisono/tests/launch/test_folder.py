"""The run directory: refused before anything is touched, continued only by the same mathematics."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.configs import configured
from packages.unisono.tests.launch import jobs
from unisono.checkpoint.core import commit, provenance, resume_point
from unisono.config import fingerprint
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving import layout, resolve, run_directory
from unisono.launch.resolving.preflight import DataFacts
from unisono.runtime.communication.communicator import SingleProcess
from unisono.runtime.errors import RunError
from unisono.task import Task
from unisono.task_config import load_config, read_run

TASK = f"{tasks.__file__}:LinearTask"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*overrides: str, name: str | None = "a") -> RunConfig:
    return configured(TASK, "layout.world_size=1", *([f"run.name={name}"] if name else []), *overrides)


def check(told: RunConfig) -> RunConfig:
    """The configuration that a start would have, with nothing touched."""
    return resolve.plan_run(layout.resolve_layout(told, None)).config


def written(told: RunConfig, data: DataFacts, task: Task) -> Path:
    """The directory of a start, without what it was trained on."""
    run = resolve.plan_run(layout.resolve_layout(told, None), data)
    run.directory.mkdir(parents=True, exist_ok=True)
    run_directory.write_run(run, data, task)
    return run.directory


def make(*overrides: str, facts: dict[str, Any] | None = None, name: str = "a") -> Path:
    return written(config(*overrides, name=name), DataFacts(facts or {}, {}), tasks.LinearTask())


def checkpoint(path: Path, random: bool = False, step: int = 3, **told: Any) -> None:
    """A checkpoint of nothing, by the run that lies there."""
    kept: dict[str, Any] = dict.fromkeys(resume_point.KEYS) | {"step": step, "random": random}
    said = {**provenance.describe_run(read_run(path, trust=True)), **told}
    commit.save_checkpoint(path / "checkpoints", commit.Snapshot(step, [], kept, said), SingleProcess(), keep=9)


def refusal(told: RunConfig) -> str:
    """What is said of it; nothing is touched."""

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() if path.is_file() else b"" for path in Path().rglob("*")}

    before = content()
    with pytest.raises(RunError) as caught:
        check(told)
    assert content() == before
    return str(caught.value)


# names --------------------------------------------------------------------------------------------------------------


def test_a_run_has_the_name_it_was_given_or_one_from_the_task_and_the_time():
    assert run_directory.with_name(config(name="mine")).run.name == "mine"
    assert str(run_directory.with_name(config(name=None)).run.name).startswith("tasks-2")


def test_two_runs_without_a_name_never_share_a_folder():
    names = []
    for _ in range(5):
        told = run_directory.with_name(config(name=None))
        run_directory.run_path(told).mkdir(parents=True)
        names.append(told.run.name)
    assert len(set(names)) == 5


def test_two_starts_that_found_the_same_free_name_never_share_a_folder():
    told = run_directory.with_name(config(name=None))
    first, second, third = (run_directory.claim_directory(told) for _ in range(3))
    assert first == told
    assert len({run_directory.run_path(c) for c in (first, second, third) if run_directory.run_path(c).is_dir()}) == 3


def test_a_place_that_cannot_be_claimed_is_refused_by_name(here: Path):
    (here / "file").write_text("no folder")
    with pytest.raises(RunError, match=r"cannot write to .*file/tasks-.*: Not a directory"):
        run_directory.claim_directory(run_directory.with_name(config("run.dir=file", name=None)))


def test_a_job_that_is_queued_again_finds_its_run_by_its_number():
    assert run_directory.with_name(config(name=None), job="77").run.name == "tasks-job77"
    make(name="tasks-job77")
    assert run_directory.with_name(config(name=None), job="77").run.name == "tasks-job77"


# a new run ----------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_yet_is_not_made_by_the_check(here: Path):
    check(config())
    assert list(here.iterdir()) == []


def test_a_run_is_written_down_so_that_it_can_be_read_back():
    told = config("task.rows=7", "optim=sgd")
    path = written(told, DataFacts({"rows": 7}, {}), tasks.LinearTask())
    assert read_run(path, trust=True) == check(told)


def test_a_run_is_described_with_its_mathematics_data_and_versions():
    described = json.loads((make(facts={"rows": 7}) / "fingerprint.json").read_text())
    assert described["mathematics"] == fingerprint.config_digest(config())
    assert described["data"] == {"rows": 7}
    assert {"unisono", "python", "torch", "numpy"} <= described["versions"].keys()


def test_the_files_of_sources_are_kept_apart_from_what_trackers_are_given():
    files = {"": [{"name": "a.npy", "rows": 3}]}
    path = written(config(), DataFacts({"rows": 3}, files), tasks.LinearTask())
    assert json.loads((path / "files.json").read_text()) == files
    assert "a.npy" not in (path / "fingerprint.json").read_text()


def test_a_task_can_leave_its_assets_with_the_run():
    class Leaving(tasks.LinearTask):
        def save_assets(self, directory: Path) -> None:
            (directory / "vocabulary.txt").write_text("a b c")

    path = written(config(), DataFacts({}, {}), Leaving())
    assert (path / "assets" / "vocabulary.txt").read_text() == "a b c"


@pytest.mark.parametrize("place", ["file", "file/deeper"])
def test_a_place_where_nothing_can_be_written_is_refused_by_name(here: Path, place: str):
    (here / "file").write_text("no folder")
    told = refusal(config(f"run.dir={place}"))
    assert told.startswith(f"{place}/a: ")
    assert told.endswith("cannot be written to (Not a directory); choose another run.dir")
    if sys.platform == "linux":  # not even root writes there
        assert "cannot be written to" in refusal(config("run.dir=/proc/sys"))


def test_a_place_that_becomes_unwritable_after_the_check_is_refused_by_name(here: Path):
    run = resolve.plan_run(layout.resolve_layout(config("run.dir=place"), None))
    (here / "place").write_text("no folder")
    with pytest.raises(RunError, match=r"cannot write to .*place/a: .*; choose another run\.dir"):
        run_directory.write_run(run, DataFacts({}, {}), tasks.LinearTask())


def test_a_folder_with_other_things_in_it_is_refused_and_an_empty_one_is_taken(here: Path):
    (here / "runs" / "a").mkdir(parents=True)
    assert resolve.plan_run(layout.resolve_layout(config(), None)).resume is None
    (here / "runs" / "a" / "thesis.tex").write_text("…")
    assert refusal(config()) == (
        "runs/a is not empty and is not a run directory (no config.yaml); choose another run.name"
    )


# a run that is there ------------------------------------------------------------------------------------------------


def test_the_same_configuration_goes_on_with_its_run():
    make()
    assert fingerprint.changed_keys(read_run(Path("runs/a"), trust=True), check(config()), random=True) == {}


@pytest.mark.parametrize(
    "override", ["layout.world_size=4", "observe.progress=false", "eval.rows=3", "run.resume=must"]
)
def test_a_harmless_change_goes_on_with_the_run(override: str):
    checkpoint(make())
    assert check(config(override)).run.name == "a"


def test_another_run_is_refused_with_every_key_that_differs_and_a_way_out_that_works():
    make("task.rows=7", "optim.lr=1")
    told = refusal(config("task.rows=8", "optim.lr=2", "observe.progress=false"))
    assert told.splitlines() == [
        "runs/a already holds another run:",
        "  optim.lr: 1.0 there, 2.0 here",
        "  task.rows: 7 there, 8 here",
        "Choose another run.name, or resume with these changes: run.allow_change=[optim.lr,task.rows]",
    ]
    assert check(config("task.rows=8", "optim.lr=2", told.rpartition(": ")[2])).optim.lr == 2


def test_allowing_one_change_allows_no_other():
    make("task.rows=7", "optim.lr=1")
    told = refusal(config("task.rows=8", "optim.lr=2", "run.allow_change=[optim.lr]"))
    assert "task.rows: 7 there, 8 here" in told
    assert "optim.lr" not in told


def test_a_run_whose_name_differs_in_large_and_small_letters_alone_is_another_where_the_disk_takes_both_for_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
):
    make()
    (here / "runs" / "A").symlink_to("a")
    monkeypatch.setattr(run_directory, "ignores_case", lambda path: path.name in ("a", "A"))
    assert refusal(config(name="A")) == (
        "runs/A already holds the run 'a': this file system ignores upper and lower case. "
        "Choose another run.name, or resume that run with run.name=a"
    )
    assert check(config()).run.name == "a"


def test_large_and_small_letters_are_told_apart_where_both_names_are_listed_or_one_is_not_there(here: Path):
    make()
    assert not run_directory.ignores_case(here / "runs" / "a")
    make(name="A")
    assert not run_directory.ignores_case(here / "runs" / "a")
    assert not run_directory.ignores_case(here / "runs" / "1")


def test_a_run_whose_folder_was_renamed_goes_on_under_its_new_name(here: Path):
    make().rename(here / "runs" / "A")
    assert check(config(name="A")).run.name == "A"


def test_a_run_that_must_not_be_resumed_is_refused_where_there_is_one():
    assert check(config("run.resume=never")).run.resume == "never"
    path = make()
    for there in (lambda: None, lambda: checkpoint(path)):
        there()
        assert refusal(config("run.resume=never")).startswith("runs/a already holds a run, and run.resume=never;")


def test_a_run_that_must_be_resumed_is_refused_until_it_has_a_checkpoint():
    missing = "runs/a has no checkpoint to resume from, and run.resume=must;"
    assert refusal(config("run.resume=must")).startswith(missing)
    path = make()
    assert refusal(config("run.resume=must")).startswith(missing)
    checkpoint(path)
    assert check(config("run.resume=must")).run.resume == "must"


def test_a_configuration_of_the_run_that_cannot_be_read_is_named():
    (make() / "config.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"runs/a/config\.yaml cannot be read as a configuration"):
        check(config())


def test_a_task_whose_file_was_moved_goes_on_with_its_run(here: Path):
    first = jobs.task_file(here)
    told = load_config(f"{first}:Small", ["run.name=a", "layout.world_size=1"])[0]
    written(told, DataFacts({}, {}), tasks.LinearTask())
    (here / "later").mkdir()
    moved = told.model_copy(update={"recipe": f"{first.rename(here / 'later' / 'small.py')}:Small"})
    assert check(moved).recipe == moved.recipe


def test_another_task_does_not_go_on_with_the_run():
    make()
    other = load_config(f"{tasks.__file__}:TransformerTask", ["run.name=a", "layout.world_size=1"])[0]
    assert "  recipe: 'tasks.py:LinearTask' there, 'tasks.py:TransformerTask' here\n" in refusal(other)


def test_the_place_of_a_task_is_written_down_for_other_working_directories(here: Path):
    jobs.task_file(here)
    told = load_config("small.py:Small", ["run.name=a", "layout.world_size=1"])[0]
    path = written(told, DataFacts({}, {}), tasks.LinearTask())
    assert read_run(path, trust=True).recipe == f"{here.resolve()}/small.py:Small"
    assert check(told).recipe == told.recipe


# a run that is under way --------------------------------------------------------------------------------------------

HOLDING = """
import sys, time
from pathlib import Path
from unisono.launch.resolving import layout, resolve, run_directory
from unisono.launch.resolving.preflight import DataFacts
with run_directory.hold_directory(Path("runs/a")):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_is_held_by_one_start_at_a_time():
    with (
        run_directory.hold_directory(Path("runs/a")),
        pytest.raises(
            RunError,
            match=f"runs/a is in use by process {os.getpid()} on {platform.node()}, which is training this run; ",
        ),
        run_directory.hold_directory(Path("runs/a")),
    ):
        pass
    with run_directory.hold_directory(Path("runs/a")), run_directory.hold_directory(Path("runs/b")):
        pass


def test_a_run_is_let_go_of_when_its_process_is_killed(here: Path):
    with subprocess.Popen([sys.executable, "-c", HOLDING], stdout=subprocess.PIPE, cwd=here) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with (
            pytest.raises(RunError, match=f"runs/a is in use by process {process.pid} on "),
            run_directory.hold_directory(Path("runs/a")),
        ):
            pass
        process.kill()
        process.wait()
    with run_directory.hold_directory(Path("runs/a")):
        pass


def test_a_start_that_ended_before_it_wrote_anything_leaves_a_folder_that_can_be_used():
    with run_directory.hold_directory(Path("runs/a")):
        pass
    assert check(config("run.resume=never")).run.name == "a"


# micro-batches ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("random", "override", "micro_batch"),
    [
        pytest.param(False, "layout.world_size=1", 4, id="kept on one process"),
        pytest.param(False, "layout.world_size=2", 4, id="kept on two processes"),
        pytest.param(False, "layout.world_size=4", 4, id="kept where it just fits"),
        pytest.param(False, "layout.world_size=8", 2, id="smaller where it does not fit"),
        pytest.param(True, "layout.world_size=8", 4, id="kept where random numbers belong to it"),
        pytest.param(False, "layout.micro_batch=8", 8, id="the user's where nothing is random"),
        pytest.param(True, "layout.micro_batch=8 run.allow_change=[layout.micro_batch]", 8, id="the user's if allowed"),
    ],
)
def test_a_resumed_run_keeps_its_micro_batch_where_it_fits_or_is_random(random: bool, override: str, micro_batch: int):
    checkpoint(make("train.global_batch=16", "layout.micro_batch=4"), random=random)
    assert check(config("train.global_batch=16", *override.split())).layout.micro_batch == micro_batch


def test_another_micro_batch_is_refused_where_a_forward_pass_draws_random_numbers():
    checkpoint(make("layout.micro_batch=4"), random=True)
    assert "layout.micro_batch: 4 there, 8 here" in refusal(config("layout.micro_batch=8"))


def test_the_newest_checkpoint_says_whether_a_forward_pass_is_random():
    path = make("layout.micro_batch=4")
    checkpoint(path, random=True, step=3)
    checkpoint(path, random=False, step=10)
    assert check(config("layout.micro_batch=8")).layout.micro_batch == 8


SYNC = ("train.global_batch=16", "layout.sync_batch_norm=true")


def test_a_run_with_common_statistics_of_the_whole_batch_may_go_on_on_other_processes():
    checkpoint(make(*SYNC, "layout.world_size=2", "layout.micro_batch=8"))
    assert check(config(*SYNC, "layout.world_size=4")).layout.micro_batch == 4
    assert check(config(*SYNC, "layout.world_size=4", "layout.micro_batch=4")).layout.micro_batch == 4


@pytest.mark.parametrize(("world_size", "micro_batch"), [(2, 4), (1, 8)])
def test_a_run_that_would_normalise_other_rows_together_is_refused(world_size: int, micro_batch: int):
    checkpoint(make(*SYNC, "layout.world_size=2", "layout.micro_batch=8"))
    other = (*SYNC, f"layout.world_size={world_size}", f"layout.micro_batch={micro_batch}")
    told = refusal(config(*other))
    assert f"the whole global batch there, {micro_batch} of each of {world_size} processes here" in told
    allowed = config(*other, "run.allow_change=[layout.micro_batch]")
    assert check(allowed).layout.micro_batch == micro_batch


def test_a_run_that_synchronises_its_statistics_from_now_on_is_another_run():
    checkpoint(make("train.global_batch=16", "layout.micro_batch=16"))
    assert "layout.sync_batch_norm: False there, True here" in refusal(config(*SYNC))
