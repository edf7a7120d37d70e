"""The command line: what it prints, what it refuses before any process starts, and its exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.launch import jobs
from packages.unisono.tests.security.runs import stranger
from unisono import task_config
from unisono.checkpoint.core import commit
from unisono.config.code import recipes
from unisono.engines.torch import devices
from unisono.launch import start
from unisono.launch.processes import local_processes
from unisono.runtime import errors
from unisono.training import loop
from unisono.version import __version__

SPIRALS = f"{Path(__file__).parents[3]}/examples/spirals.py:Spirals"
LINEAR = f"{tasks.__file__}:LinearTask"
TRANSFORMER = f"{tasks.__file__}:TransformerTask"
SHORT = ("train.steps=3", "train.global_batch=8", "observe.progress=false", "layout.threads=1", "layout.world_size=1")

TASK = "from packages.unisono.tests.tasks import LinearTask\n"
ONE = f"{TASK}class Mine(LinearTask): pass\n"

Told = tuple[int, str, str]
Command = Callable[..., Told]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.fixture
def unisono(here: Path, command: Command) -> Command:
    return command


@pytest.fixture
def refused(unisono: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The error of a `train` that may start nothing and leave nothing behind."""
    monkeypatch.setattr(local_processes, "launch", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr(loop, "train", lambda *_: pytest.fail("training was started"))

    def list_files() -> list[Path]:
        # Python keeps what it has compiled of a file beside it, as of everything that it imports.
        return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)

    def run(*words: object) -> str:
        before = list_files()
        code, _, told = unisono("train", *words)
        assert code == 2
        assert told.startswith("unisono: error: ")
        assert "Traceback" not in told
        assert list_files() == before
        return told.removeprefix("unisono: error: ").rstrip("\n")

    return run


# help ---------------------------------------------------------------------------------------------------------------


def loaded(*words: str) -> set[str]:
    """The modules that a command loads, in a process of its own."""
    command = [sys.executable, "-X", "importtime", "-m", "unisono", *words]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {line.rpartition("|")[2].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("--version",), ()])
def test_asking_for_help_loads_nothing_heavy(words: tuple[str, ...]):
    found = loaded(*words)
    assert "unisono.cli.main" in found
    roots = {name.split(".")[0] for name in found}
    assert not roots & {"torch", "jax", "pydantic", "hydra", "omegaconf", "numpy", "yaml", "rich", "transformers"}
    assert not {"email", "importlib.metadata", "asyncio", "multiprocessing"} & found  # most of the time that it took


def test_help_lists_every_verb(unisono: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        unisono("--help")
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert all(f"  {verb} " in told for verb in ("train", "check", "config", "evaluate", "resume", "list"))


def test_the_word_alone_says_in_three_lines_what_to_type_first(unisono: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recipes, "recipe_names", list)
    assert "pip install 'unisono[language]'" in unisono()[1].splitlines()[0]
    monkeypatch.setattr(recipes, "recipe_names", lambda: ["birds", "language"])
    code, told, _ = unisono()
    assert (code, len(told.splitlines())) == (0, 3)
    first, own, rest = told.splitlines()
    assert "unisono train language" in first and "unisono train my_task.py" in own and "unisono --help" in rest
    pages = re.findall(r"docs/\w+\.md", told)
    assert pages and all((Path(__file__).parents[3] / page).is_file() for page in pages)


def test_the_version_is_told(unisono: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        unisono("--version")
    assert capsys.readouterr().out == f"unisono {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [("train",), ("train", LINEAR, "--confg-dir", "x"), ("config", LINEAR, "x=1", "-v")],
)
def test_a_command_that_is_spelt_wrongly_is_refused_with_the_usage(
    unisono: Command, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        unisono(*words)
    assert caught.value.code == 2
    assert "usage: unisono" in capsys.readouterr().err


def test_a_command_without_its_run_asks_for_the_run_alone(unisono: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        unisono("resume")
    assert capsys.readouterr().err.endswith("the following arguments are required: RUN\n")


def test_a_verb_that_is_spelt_wrongly_is_refused_with_the_nearest(unisono: Command):
    code, _, error = unisono("trian", LINEAR)
    assert code == 2
    assert "unknown verb 'trian', did you mean 'train'?" in error


def test_a_verb_that_is_spelt_wrongly_is_told_before_what_is_wrong_with_the_run(unisono: Command, tmp_path: Path):
    theirs, _ = stranger(tmp_path)
    assert "unknown verb 'evalute', did you mean 'evaluate'?" in unisono("evalute", theirs)[2]
    assert "--trust" in unisono("summarise_all", theirs)[2]  # which may be a verb of its own


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\ndef f(:\n", 'File "{here}/bad.py", line 2\n    def f(:\n          ^\nSyntaxError: invalid syntax'),
        (
            "import faulty_beside\n",
            'File "{here}/faulty_beside.py", line 1, in <module>\n    {}["key"]\n    ~~^^^^^^^',
        ),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_the_user_s_frames_alone(
    refused: Callable[..., str], here: Path, text: str, told: str
):
    (here / "bad.py").write_text(text)
    (here / "faulty_beside.py").write_text('{}["key"]\n')
    error = refused("bad.py:Mine")
    assert error.startswith(f"{here}/bad.py cannot be imported:\n")
    assert told.replace("{here}", str(here)) in error
    assert set(re.findall(r'File "(.*?)"', error)) <= {f"{here}/bad.py", f"{here}/faulty_beside.py"}


# config and check ---------------------------------------------------------------------------------------------------


def test_config_prints_every_setting_with_its_value_and_its_origin(unisono: Command):
    code, told, _ = unisono("config", LINEAR, "optim.lr=0.5", "task.rows=9")
    lines = {line.split(": ")[0]: line for line in told.splitlines()}
    assert code == 0
    assert lines["optim.lr"].split() == ["optim.lr:", "0.5", "#", "override", "'optim.lr=0.5'"]
    assert lines["task.rows"].split() == ["task.rows:", "9", "#", "override", "'task.rows=9'"]
    assert lines["schedules.lr.kind"].endswith("# unisono/config/groups/schedules/cosine.yaml:2")
    assert lines["launch.timeout"].split() == ["launch.timeout:", "600.0", "#", "default"]


def test_config_prints_required_keys_as_missing_and_all_others(unisono: Command, here: Path):
    (here / "mine.py").write_text(
        f"import unisono\n{TASK}class Mine(LinearTask):\n"
        "    class Config(unisono.Settings):\n        size: int\n        rows: int = 9\n"
    )
    code, told, error = unisono("config", "mine.py", "train.steps=5")
    lines = {line.split(": ")[0]: line.split() for line in told.splitlines()}
    assert (code, error.splitlines()[0]) == (2, "unisono: error: 'task.size' is missing; set task.size=…")
    assert lines["task.size"] == ["task.size:", "missing", "#", "has", "no", "default"]
    assert lines["task.rows"][1] == "9" and lines["train.steps"][1] == "5" and lines["optim.lr"][1] == "0.0003"
    code, told, error = unisono("config", "mine.py", "optim.lrr=5")  # another mistake: nothing is printed
    assert (code, told, "unknown key 'optim.lrr'" in error) == (2, "", True)


def test_a_config_dir_without_yaml_is_warned_of(unisono: Command, here: Path):
    (here / "conf").mkdir()
    (here / "conf" / "mine.yml").touch()
    error = unisono("config", LINEAR, "--config-dir", "conf")[2]
    assert "WARNING: --config-dir conf holds no .yaml file (files named .yml are not read), so it changes" in error


@pytest.mark.parametrize("before", [True, False])
def test_an_option_may_stand_before_or_after_the_overrides(unisono: Command, here: Path, before: bool):
    (here / "conf" / "task").mkdir(parents=True)
    (here / "conf" / "task" / "few.yaml").write_text("rows: 5\n")
    overrides = ("task=few", "optim.lr=1")
    words = ("--config-dir", "conf", LINEAR, *overrides) if before else (LINEAR, "--config-dir", "conf", *overrides)
    code, told, _ = unisono("config", *words)
    assert code == 0
    assert "# conf/task/few.yaml:1" in told
    assert "# override 'optim.lr=1'" in told


def test_overrides_may_stand_on_both_sides_of_an_option(unisono: Command, here: Path):
    (here / "conf").mkdir()
    code, told, _ = unisono("config", LINEAR, "optim.lr=1", "--config-dir", "conf", "optim.lr=2")
    assert code == 0
    assert "# override 'optim.lr=2'" in told


def test_check_says_what_would_run_and_leaves_nothing_behind(unisono: Command, here: Path):
    code, told, _ = unisono("check", SPIRALS, *SHORT, "run.name=a", "layout.device=cpu")
    assert code == 0
    assert told.splitlines() == [
        f"{SPIRALS} can run: 1 × cpu, single, fp32", "  rows: 2000", "  held_out: 500", "  steps: 3",
        "  parameters: 4,417", "  adamw, lr 0.0003, weight decay 0.01: 4,288 parameters in *.weight",
        "  adamw, lr 0.0003, weight decay 0: 129 parameters in *.bias", "  run: runs/a",
    ]  # fmt: skip
    assert list(here.iterdir()) == []


# a file of the user's, named without its class -----------------------------------------------------------------------


def test_a_file_with_one_task_is_trained_by_its_path_alone_and_used_by_it(unisono: Command, here: Path):
    (here / "mine.py").write_text(ONE)
    assert unisono("train", "mine.py", *SHORT, "run.name=a")[0] == 0
    assert f"recipe: {here}/mine.py:Mine" in Path("runs/a/config.yaml").read_text()
    assert unisono("predict", "runs/a", "rows=training", "--task", "mine.py")[0] == 0


def test_of_several_tasks_in_a_file_one_is_asked_for_with_what_to_type(refused: Callable[..., str], here: Path):
    (here / "mine.py").write_text(f"{ONE}class Other(Mine): pass\n")
    assert refused("mine.py") == "mine.py has 2 tasks; write which one: mine.py:Mine or mine.py:Other"


def test_a_class_that_is_only_extended_in_the_file_is_not_asked_about(here: Path):
    (here / "mine.py").write_text(
        f"import unisono\n{TASK}class Base(unisono.Task): pass\nclass Mine(LinearTask): pass\n"
    )
    assert task_config.find_task("mine.py").__name__ == "Mine"


def test_a_file_without_a_task_says_so_and_one_that_was_meant_is_suggested(refused: Callable[..., str], here: Path):
    (here / "mine.py").write_text(TASK)
    said = refused("mine.py")
    assert said.startswith("mine.py has no class that extends unisono.Task")
    assert said.endswith("\n  unisono prove mine.py worlds=[1,2]"), "it may be a training script"
    assert refused("mine") == "unknown recipe 'mine', did you mean the file mine.py?"
    told = "no such file; a task is given as path/to/file.py, or path/to/file.py:Class"
    assert refused("mien.py") == f"{here}/mien.py: {told}"


# train, on one process ----------------------------------------------------------------------------------------------


def test_train_leaves_a_run_with_its_events_its_configuration_and_a_checkpoint(unisono: Command):
    code, *_ = unisono("train", SPIRALS, *SHORT, "run.name=a")
    assert code == 0
    assert [event["step"] for event in jobs.events(Path("runs/a"))] == [1, 2, 3, 3]
    assert [path.name for path in commit.find_checkpoints(Path("runs/a/checkpoints"))] == ["step-00000003"]
    assert Path("runs/a/config.yaml").is_file()


def test_the_same_command_again_makes_no_step_twice(unisono: Command):
    words = ("train", LINEAR, *SHORT, "run.name=a")
    assert [unisono(*words)[0], unisono(*words)[0]] == [0, 0]
    assert [event["step"] for event in jobs.events(Path("runs/a"))] == [1, 2, 3]


def test_evaluate_tells_what_the_run_told_at_its_end(unisono: Command):
    unisono("train", TRANSFORMER, *SHORT, "run.name=a")
    code, told, _ = unisono("evaluate", "runs/a")
    values = dict(line.split(": ") for line in told.splitlines())
    last = jobs.events(Path("runs/a"))[-1]
    assert code == 0
    assert values["step"] == str(last["step"])  # a whole number, not 30.000000
    assert float(values["loss"]) == pytest.approx(last["loss"], rel=1e-5)
    assert float(values["accuracy"]) == pytest.approx(last["accuracy"], abs=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("evaluate",), "is not a run directory (no config.yaml), nor a model that a recipe opens"),
        (("generate", "a prompt"), "is neither a run (no"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(unisono: Command, here: Path, words: tuple[str, ...], told: str):
    code, _, error = unisono(words[0], here, *words[1:])
    assert code == 2
    assert error.startswith(f"unisono: error: {here} {told}")


def test_a_run_without_a_checkpoint_cannot_be_evaluated(unisono: Command):
    unisono("train", TRANSFORMER, *SHORT, "run.name=a", "checkpoint.at_end=false")
    code, _, told = unisono("evaluate", "runs/a")
    assert (code, told) == (2, "unisono: error: runs/a has no checkpoint yet\n")


def test_a_task_that_holds_no_rows_out_cannot_be_evaluated(unisono: Command):
    unisono("train", LINEAR, *SHORT, "run.name=a")
    code, _, told = unisono("evaluate", "runs/a")
    assert (code, told) == (2, "unisono: error: runs/a: the task has no held-out rows\n")


# exit codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("no"), 2),
        (errors.DataError("no"), 2),
        (errors.NonFiniteError("no"), 3),
        (errors.GuardError("no"), 4),
        (errors.DeadlineError("no"), 5),
        (local_processes.WorkerError("no", 7), 7),
    ],
)
def test_an_error_ends_in_one_line_and_its_own_exit_code(
    unisono: Command, monkeypatch: pytest.MonkeyPatch, error: errors.UnisonoError, code: int
):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(start, "start_run", fail)
    assert unisono("train", LINEAR) == (code, "", "unisono: error: no\n")


def test_an_interruption_ends_in_130_without_a_traceback_and_a_fault_of_our_own_keeps_its(
    unisono: Command, monkeypatch: pytest.MonkeyPatch
):
    def fail(error: BaseException) -> None:
        raise error

    monkeypatch.setattr(start, "start_run", lambda *_, **__: fail(KeyboardInterrupt()))
    code, _, told = unisono("train", LINEAR)
    assert (code, told) == (130, "\nunisono: interrupted\n")
    monkeypatch.setattr(start, "start_run", lambda *_, **__: fail(KeyError("ours")))
    with pytest.raises(KeyError, match="ours"):
        unisono("train", LINEAR)


def test_check_refuses_what_train_would_refuse_and_tells_where_its_keys_were_written(unisono: Command):
    code, _, told = unisono("check", LINEAR, "layout.world_size=3", "train.global_batch=8")
    assert code == 2
    assert "train.global_batch=8 cannot be split evenly over layout.world_size=3" in told
    assert told.splitlines()[1:] == [
        "  train.global_batch is from override 'train.global_batch=8'",
        "  layout.world_size is from override 'layout.world_size=3'",
    ]


# what is refused before any process starts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (f"{LINEAR} optim.lrr=3", "unknown key 'optim.lrr' (override 'optim.lrr=3'), did you mean 'optim.lr'?"),
        (f"{LINEAR} train.steps=many", "'train.steps': input should be a valid integer"),
        (f"{LINEAR} run.dir=file run.name=a", "cannot be written to (Not a directory); choose another run.dir"),
        (f"{LINEAR} train.global_batch=1", "layout.world_size is from override 'layout.world_size=2'"),
        (f"{LINEAR} train.global_batch=7", "These world sizes can: [1, 7]; or these global batches: [6, 8]"),
        (f"{LINEAR} train.global_batch=8 layout.micro_batch=3", "These micro-batches do: [1, 2, 4]; or these global b"),
        (f"{LINEAR} layout.device=cuda", "layout.device is from override 'layout.device=cuda'"),
        (f"{LINEAR} train.steps=10 schedules.lr.warmup=20", "schedules.lr"),
        (f"{LINEAR} run.name=a run.resume=must", "runs/a has no checkpoint to resume from, and run.resume=must"),
        (f"{LINEAR} callbacks=[:Stop]", "':Stop' names no class; it is given as path/to/file.py:Class"),
        (":Mine", "':Mine' names no class; it is given as path/to/file.py:Class"),
        ("nowhere.py:Mine", "nowhere.py: no such file; a task is given as path/to/file.py, or path/to/file.py:Class"),
    ],
)
def test_what_can_be_refused_is_refused_before_any_process_starts_and_leaves_nothing_behind(
    refused: Callable[..., str], here: Path, monkeypatch: pytest.MonkeyPatch, words: str, told: str
):
    monkeypatch.setattr(devices, "accelerators", lambda: ("cpu", 0))
    (here / "file").write_text("no folder")
    assert told in refused(*words.split(), "layout.world_size=2")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("steps=x", "steps: input should be a valid integer, unable to parse string as an integer, got 'x'\n"),
        ("engines=[torch]", "engines=['torch'] has to be [torch,jax]: two engines are compared\n"),
    ],
)
def test_a_proof_of_other_settings_than_there_are_is_refused(unisono: Command, word: str, told: str):
    assert unisono("prove", LINEAR, word) == (2, "", f"unisono: error: {told}")


def test_a_directory_that_holds_another_run_is_refused(unisono: Command, monkeypatch: pytest.MonkeyPatch):
    unisono("train", LINEAR, *SHORT, "run.name=a")
    monkeypatch.setattr(local_processes, "launch", lambda *_: pytest.fail("processes were started"))
    code, _, told = unisono("train", LINEAR, *SHORT[:-1], "run.name=a", "optim.lr=0.5", "layout.world_size=2")
    assert code == 2
    assert told.splitlines()[:3] == [
        "unisono: error: runs/a already holds another run:",
        "  optim.lr: 0.0003 there, 0.5 here",
        "Choose another run.name, or resume with these changes: run.allow_change=[optim.lr]",
    ]
    assert "  optim.lr is from override 'optim.lr=0.5'" in told
