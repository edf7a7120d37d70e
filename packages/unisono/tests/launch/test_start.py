"""From a configuration to a run: what is refused before anything starts, and `unisono.train`."""

from __future__ import annotations

import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import unisono
from packages.unisono.tests import tasks
from packages.unisono.tests.configs import configured
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.tasks import LinearTask
from unisono.config.schema.run import RunConfig
from unisono.data.sources import open_source
from unisono.launch import start
from unisono.launch.host import memory_allocators
from unisono.launch.processes import local_processes
from unisono.launch.resolving import layout, preflight, resolve, run_directory
from unisono.observe import events
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, RunError, UnisonoError
from unisono.task import run_setup
from unisono.task_config import read_run
from unisono.training.loop import Result

TASK = f"{tasks.__file__}:LinearTask"
SHORT = {"train.steps": 3, "train.global_batch": 8, "observe.progress": False, "layout.threads": 1}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def config(*overrides: str) -> RunConfig:
    return configured(TASK, *overrides)


# before processes start ---------------------------------------------------------------------------------------------


class NoNumbers(LinearTask):
    def data(self) -> Any:
        return (row for row in range(3))


class NoRows(LinearTask):
    def data(self) -> Any:
        return []


class Choosy(LinearTask):
    def check(self) -> None:
        raise DataError("the file of names is missing")


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (NoNumbers(), r"NoNumbers\.data\(\) returned a generator, whose rows cannot be accessed by index"),
        (NoRows(), r"NoRows\.data\(\) has no rows"),
        (Choosy(), "the file of names is missing"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(task: LinearTask, told: str):
    with pytest.raises(DataError, match=told):
        preflight.preflight(task, layout.resolve_layout(config(), None))


def test_less_than_one_row_of_an_epoch_is_refused():
    told = layout.resolve_layout(config("train.steps=null", "train.epochs=0.001"), None)
    with pytest.raises(ConfigError, match=r"train\.epochs=0\.001 of 40 rows is less than one row"):
        preflight.preflight(LinearTask(), told)


def test_the_facts_of_a_run_are_its_rows_its_steps_and_what_the_task_adds():
    class Telling(tasks.TransformerTask):
        def facts(self) -> dict[str, Any]:
            return {"words": 61}

    told = layout.resolve_layout(config("train.steps=null", "train.epochs=2", "train.global_batch=4"), None)
    assert preflight.preflight(Telling(), told).facts == {"rows": 27, "held_out": 11, "steps": 14, "words": 61}


def test_moments_that_are_not_there_are_refused_by_check_and_before_a_start(here: Path):
    """The launcher refuses them, not only the processes that it would start; a resumed run needs none any more."""
    words = ("train.steps=3", "optim.moments=none.safetensors", "run.name=a", "observe.progress=false")
    told = config(*words)
    for begin in (lambda: resolve.check_run(told, LinearTask()), lambda: unisono.train(TASK, told)):
        with pytest.raises(
            CheckpointError, match=r"optim.moments=none.safetensors cannot be read: .*; leave optim.mom"
        ):
            begin()
        assert list(here.iterdir()) == []
    entries = {"bias.exp_avg": torch.ones(1), "bias.exp_avg_sq": torch.ones(1), "bias.step": torch.ones(())}
    save_file(entries, "none.safetensors")
    assert unisono.train(TASK, config(*words, "run.stop_after=1")).step == 1
    Path("none.safetensors").unlink()
    assert resolve.check_run(told, LinearTask())[0].resume is not None


# train, from Python -------------------------------------------------------------------------------------------------


def test_a_task_object_is_trained_with_its_own_settings():
    result = unisono.train(LinearTask(LinearTask.Config(rows=9, features=2)), SHORT)
    assert read_run(result.folder, trust=True).task.model_dump() == {"rows": 9, "features": 2}
    assert json.loads((result.folder / "fingerprint.json").read_text())["data"]["rows"] == 9


def test_the_result_of_a_run_tells_its_folder_its_length_its_loss_and_its_evaluation():
    result = unisono.train(tasks.TransformerTask, {**SHORT, "run.name": "a"})
    told = events.read_events(result.folder / "events.jsonl")
    assert (result.folder, result.step) == (Path("runs/a"), 3)
    assert result.loss == [event["loss"] for event in told if not event.get("eval")][-1]
    assert result.evaluation["accuracy"] == told[-1]["accuracy"]
    assert set(result.evaluation) == {"loss", "loss/length", "loss/next", "accuracy"}


class Allocator(unisono.Callback):
    """Writes which options of the allocator a process has."""

    def on_start(self, run: unisono.RunInfo) -> None:
        found = {name: os.environ[name] for name in memory_allocators.DEVICE_NAMES if name in os.environ}
        (run.directory / f"allocator-{run.rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("own", [None, "max_split_size_mb:128"])
def test_every_process_has_segments_that_grow_unless_the_user_has_options(
    world: int, own: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in memory_allocators.DEVICE_NAMES:
        monkeypatch.delenv(name, raising=False)
    if own is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    before = dict(os.environ)
    result = unisono.train(TASK, {**SHORT, "layout.world_size": world}, callbacks=[Allocator()])
    assert dict(os.environ) == before
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if own is None else {"PYTORCH_CUDA_ALLOC_CONF": own}
    for rank in range(world):
        assert json.loads((result.folder / f"allocator-{rank}.json").read_text()) == expected


def test_a_reference_may_be_given_instead_of_a_class_and_texts_or_a_configuration_instead_of_a_dictionary():
    texts = ["train.steps=3", "train.global_batch=8", "observe.progress=false", "layout.threads=1"]
    ways = ((TASK, SHORT), (LinearTask, SHORT), (LinearTask, texts), (LinearTask, config(*texts)))
    assert len({unisono.train(task, how).loss for task, how in ways}) == 1


def test_an_override_changes_the_settings_of_a_task_object_and_leaves_the_others():
    task = LinearTask(LinearTask.Config(rows=9, features=2))
    result = unisono.train(task, {**SHORT, "task.features": 5})
    assert read_run(result.folder, trust=True).task.model_dump() == {"rows": 9, "features": 5}
    expected = unisono.train(LinearTask(LinearTask.Config(rows=9, features=5)), SHORT)
    assert result.loss == expected.loss  # what is written down is what was trained


def typed(**task: Any) -> RunConfig:
    return RunConfig(
        recipe="anything", optim={"kind": "sgd"}, train={"steps": 3, "global_batch": 8}, task=task,
        observe={"progress": False}, layout={"threads": 1},
    )  # fmt: skip


@pytest.mark.parametrize("task", [LinearTask, LinearTask(), TASK])
def test_a_typed_configuration_is_taken_with_a_class_an_object_or_a_reference(task: Any):
    result = unisono.train(task, typed(features=2))
    written = read_run(result.folder, trust=True)
    assert (written.task.features, written.optim.kind, result.step) == (2, "sgd", 3)


def test_a_typed_configuration_leaves_alone_what_it_does_not_say_about_a_task_object():
    result = unisono.train(LinearTask(LinearTask.Config(features=5)), typed(rows=9))
    assert read_run(result.folder, trust=True).task.model_dump() == {"rows": 9, "features": 5}


def test_a_mistake_in_an_override_is_told_as_on_the_command_line():
    with pytest.raises(
        ConfigError, match=r"unknown key 'optim\.lrr' \(override 'optim\.lrr=3'\), did you mean 'optim\.lr'\?"
    ):
        unisono.train(LinearTask, {"optim.lrr": 3})


def test_a_mistake_in_a_typed_configuration_s_task_is_told():
    with pytest.raises(ConfigError, match=r"unknown key 'task\.row' \(default\), did you mean 'task\.rows'\?"):
        unisono.train(LinearTask, typed(row=3))


def test_a_task_that_no_other_process_can_import_is_refused():
    class Inner(LinearTask):
        pass

    with pytest.raises(ConfigError, match="Inner is defined inside a function or class; move it to the top level"):
        unisono.train(Inner, SHORT)
    space: dict[str, Any] = {"LinearTask": LinearTask, "__name__": "nowhere"}
    exec("class Lost(LinearTask): pass", space)
    with pytest.raises(ConfigError, match="Lost is not defined in a file, so no other process can import it"):
        unisono.train(space["Lost"], SHORT)


def test_a_run_that_is_finished_is_not_trained_again():
    first = unisono.train(tasks.TransformerTask, {**SHORT, "run.name": "a"})
    again = unisono.train(tasks.TransformerTask, {**SHORT, "run.name": "a"})
    assert (again.step, again.loss, dict(again.evaluation)) == (3, None, dict(first.evaluation))


def test_every_error_that_a_caller_can_mend_is_a_unisono_error():
    for bad in ({"layout.device": "tpu9"}, {"train.global_batch": 7, "layout.world_size": 2}, {"zzz": 1}):
        with pytest.raises(UnisonoError):
            unisono.train(LinearTask, {**SHORT, **bad})


@pytest.mark.parametrize("guard", ["if True:", "if __name__ == '__main__':"])
def test_a_script_that_trains_its_own_task_runs_once(here: Path, guard: str):
    path = jobs.task_file(here, "script.py")
    call = f"{guard}\n    print('trained', unisono.train(Small, {SHORT}).step)\n"
    path.write_text(f"{path.read_text()}\n{call}")
    told = jobs.finished([sys.executable, "script.py"], here)
    assert (told.returncode, told.stdout) == (0, "trained 3\n"), told.stderr
    assert len(list((here / "runs").iterdir())) == 1


# one process of a launcher -------------------------------------------------------------------------------------------

ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize("variables", [ALONE, SLURM])
def test_the_only_process_of_a_launcher_is_a_single_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, host: Any
):
    host("cpu", 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = unisono.train(LinearTask, {**SHORT, "layout.world_size": 3})
    layout = read_run(result.folder, trust=True).layout
    assert (result.step, layout.strategy, layout.world_size) == (3, "single", 1)


@pytest.mark.parametrize(("shell", "name"), [(False, "tasks-job77"), (True, "tasks-2")])
def test_a_run_is_named_after_its_job_unless_a_person_sits_in_it(
    shell: bool, name: str, monkeypatch: pytest.MonkeyPatch, host: Any
):
    host("cpu", 0)
    for variable, value in {**SLURM, **({"SLURM_PTY_PORT": "1"} if shell else {})}.items():
        monkeypatch.setenv(variable, value)
    assert unisono.train(LinearTask, SHORT).folder.name.startswith(name)


# a task object that is more than its settings -----------------------------------------------------------------------


class Remembering(LinearTask):
    def setup(self) -> None:
        self.question = "?"

    @cached_property
    def answer(self) -> int:
        return 42


def remembering() -> Remembering:
    task = Remembering()
    assert task.answer == 42
    run_setup(task)
    assert task.question == "?"
    return task


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"layout.world_size": 2}, "other processes build their own"),
        ({"task.rows": 9}, "the configuration changes its settings"),
    ],
)
def test_a_task_object_with_state_of_its_own_is_refused_where_it_would_be_made_anew(
    here: Path, given: dict[str, Any], why: str
):
    task = remembering()
    task.more = 16
    with pytest.raises(ConfigError, match=f"the Remembering object has more in addition to its settings, but {why}"):
        unisono.train(task, {**SHORT, **given})
    assert not (here / "runs").exists()
    assert unisono.train(task, SHORT).step == 3


def test_what_a_task_object_has_worked_out_from_its_settings_is_no_state(monkeypatch: pytest.MonkeyPatch):
    started = []
    monkeypatch.setattr(local_processes, "launch", lambda config, *_, **__: started.append(config.layout.world_size))
    monkeypatch.setattr(start, "read_outcome", lambda path: Result(path, 3))
    unisono.train(remembering(), {**SHORT, "layout.world_size": 2})
    assert started == [2]


# one start at a time ------------------------------------------------------------------------------------------------


def test_a_start_in_the_same_second_takes_another_folder(monkeypatch: pytest.MonkeyPatch):
    real, taken = preflight.preflight, []

    def meanwhile(*arguments: Any) -> Any:
        name = run_directory.with_name(config()).run.name
        assert name is not None
        taken.append(Path("runs", name))
        taken[0].mkdir(parents=True)
        return real(*arguments)

    monkeypatch.setattr(run_directory.time, "strftime", lambda _: "now")
    monkeypatch.setattr(preflight, "preflight", meanwhile)
    result = unisono.train(LinearTask, SHORT)
    assert (taken, result.folder) == ([Path("runs/tasks-now")], Path("runs/tasks-now-2"))
    assert list(taken[0].iterdir()) == []


def test_a_run_that_another_start_has_finished_in_between_is_looked_at_again(monkeypatch: pytest.MonkeyPatch):
    real = preflight.preflight

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(preflight, "preflight", real)
        unisono.train(LinearTask, {**SHORT, "run.name": "a", "optim.lr": 0.5})
        return real(*arguments)

    monkeypatch.setattr(preflight, "preflight", meanwhile)
    with pytest.raises(RunError, match=r"runs/a already holds another run:\n  optim\.lr: 0\.5 there, 0\.0003 here"):
        unisono.train(LinearTask, {**SHORT, "run.name": "a"})


# accelerators that nobody uses --------------------------------------------------------------------------------------


def test_a_run_on_the_cpu_of_a_host_with_accelerators_is_told_so(host: Any, capsys: pytest.CaptureFixture[str]):
    host("mps", 1)
    unisono.train(LinearTask, {**SHORT, "train.precision": "fp64"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("unisono: WARNING: this run (1 × fp64) uses the CPU, although this host has 1 × mps")


@pytest.mark.parametrize(("kind", "count", "device"), [("mps", 1, "cpu"), ("cpu", 0, "auto")])
def test_a_run_that_is_meant_for_the_cpu_is_not_warned(
    kind: str, count: int, device: str, host: Any, capsys: pytest.CaptureFixture[str]
):
    host(kind, count)
    unisono.train(LinearTask, {**SHORT, "train.precision": "fp64", "layout.device": device})
    assert capsys.readouterr().err == ""


def test_one_process_with_all_devices_says_where_there_is_only_one(capsys: pytest.CaptureFixture[str]):
    made = unisono.train(LinearTask, {**SHORT, "layout.strategy": "dp", "layout.device": "cpu", "run.name": "dp"})
    assert "layout.strategy=dp splits rows over several devices" in capsys.readouterr().err
    alone = unisono.train(LinearTask, {**SHORT, "layout.strategy": "single", "layout.device": "cpu", "run.name": "one"})
    assert "splits rows" not in capsys.readouterr().err
    assert made.loss == alone.loss


# what a run left behind ---------------------------------------------------------------------------------------------


def test_the_outcome_of_a_run_without_a_step_is_empty(here: Path):
    (here / "events.jsonl").write_text("")
    found = start.read_outcome(here)
    assert (found.folder, found.step, found.loss, dict(found.evaluation)) == (here, 0, None, {})


def test_the_outcome_of_a_run_is_its_last_step_and_its_last_evaluation(here: Path):
    (here / "events.jsonl").write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 1, "eval": true, "loss": 9.0, "rows": 2, "seconds": 1.0}\n'
        '{"step": 2, "loss": 2.0}\n{"step": 2, "eval": true, "loss": 8.0, "accuracy": 0.5, "rows": 2, "seconds": 1.0}\n'
    )
    found = start.read_outcome(here)
    assert (found.step, found.loss, dict(found.evaluation)) == (2, 2.0, {"loss": 8.0, "accuracy": 0.5})


def test_a_process_that_died_over_a_file_that_changed_leaves_its_name_to_the_launcher(here: Path) -> None:
    path = here / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 9)
    watched = [open_source(path, "text")]
    with (
        pytest.raises(local_processes.LostWorkerError, match=r"^rank 1 died$"),
        preflight.report_changed_files(watched),
    ):
        raise local_processes.LostWorkerError("rank 1 died", 9)
    path.write_text("")
    with pytest.raises(local_processes.LostWorkerError) as lost, preflight.report_changed_files(watched):
        raise local_processes.LostWorkerError("rank 1 died", 9)
    assert f"rank 1 died {path} has changed since it was opened: it had 126 bytes and has 0;" in str(lost.value)
    assert lost.value.exit_code == 9
    with pytest.raises(RunError, match=r"^another reason$"), preflight.report_changed_files(watched):
        raise RunError("another reason")
