"""Every mistake is told at once, with its key, its value, where it was written, and the nearest key there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from unisono.config import fingerprint
from unisono.config.compose import ComposedConfig
from unisono.config.schema.run import RunConfig
from unisono.optim.schedules import schedule_factor
from unisono.runtime.errors import ConfigError
from unisono.task_config import find_task, load_config, read_config, validate_config

METHODS = """
    def data(self): return [{"x": 1.0}] * 8
    def build(self): ...
    def counts(self, batch): ...
    def outputs(self, model, batch, context): ...
    def loss(self, outputs, batch, context): ...
"""
TASKS = f"""
from typing import Annotated, Any, Literal
from pydantic import BaseModel, Field, field_validator, model_validator
import unisono

class Plain(unisono.Task):
    class Config(BaseModel):  # pydantic's own, which lets unknown keys pass
        class Inner(BaseModel):
            depth: int = 1
        width: int = 4
        inner: Inner = Inner()
        free: dict[str, Any] = {{}}
        @field_validator("width")
        @classmethod
        def _even(cls, width):
            if width % 2:
                raise ValueError("only even numbers here")
            return width
        @model_validator(mode="after")
        def _not_both(self):
            if self.width == 8 and self.inner.depth == 8:
                raise ValueError("too large a network")
            return self
{METHODS}

class Small(unisono.Settings):
    kind: Literal["small"]
    width: int = 3

class Large(unisono.Settings):
    kind: Literal["large"]
    depth: int

class Embedded(unisono.Data):
    kind: Literal["embedded"]
    held_out: int = 500
    seed: int = 0

class FromFile(unisono.Data):
    kind: Literal["file"]
    path: str
    held_out: float = 0.1
    seed: int = 0

class Sourced(unisono.Task):
    Data = Annotated[Embedded | FromFile, Field(discriminator="kind")]
{METHODS}

class Choosy(unisono.Task):
    class Config(unisono.Settings):
        width: int
    Model = Annotated[Small | Large, Field(discriminator="kind")]
    class Data(unisono.Data):
        path: str = "here"
{METHODS}

class Tagged(unisono.Task):
    class One(unisono.Settings):
        form: Literal["one"]
    class Two(unisono.Settings):
        form: Literal["two"]
    Model = Annotated[One | Two, Field(discriminator="form")]
{METHODS}

class Unfit(unisono.Task):
    class Data(unisono.Settings):
        path: str = "here"
{METHODS}

class Retiring(unisono.Task):
    class Config(unisono.Settings):
        class Inner(unisono.Settings):
            retired = {{"old": (3, "It was always 3.")}}
            depth: int = 1
        inner: Inner = Inner()
{METHODS}

class Halved(unisono.Task):
    def data(self): return []
    def build(self): ...

class NoTask:
    pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resolve")
    (path / "tasks.py").write_text(TASKS, encoding="utf-8")
    (path / "empty.py").write_text("", encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))  # importing a task's file adds its folder


def config(*overrides: str, task: str = "tasks.py:Plain") -> RunConfig:
    return load_config(task, overrides)[0]


def mistakes(*overrides: str, task: str = "tasks.py:Plain", config_dir: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(task, overrides, config_dir)
    return str(caught.value).splitlines()


def choosy(*overrides: str) -> list[str]:
    return mistakes("task.width=1", *overrides, task="tasks.py:Choosy")


# what is right ---------------------------------------------------------------------------------------------------


def test_a_configuration_is_typed_by_the_schema_and_by_the_task():
    found = config("task.width=6", "optim=sgd", "optim.lr=1", "layout.world_size=2", "task.free.anything.at_all=3")
    assert (found.task.width, found.optim.lr, found.layout.world_size) == (6, 1.0, 2)
    assert [type(part).__name__ for part in (found.task, found.optim, found.layout)] == ["Config", "Sgd", "Layout"]
    assert found.task.free == {"anything": {"at_all": 3}}, "a free dictionary takes any key"
    assert found.model.model_dump() == {}, "a task without settings needs none"
    assert config("task=null").task.width == 4, "null for a group means its defaults"


def test_a_choice_in_a_task_s_own_union_is_typed():
    found = config("task.width=1", "model.kind=large", "model.depth=3", "data.path=there", task="tasks.py:Choosy")
    assert (type(found.model).__name__, found.model.depth, found.data.path) == ("Large", 3, "there")


def test_a_configuration_that_was_written_is_read_back_the_same(tmp_path: Path):
    import yaml

    told = config("task.width=6", "optim.groups=[{match: '*.bias', lr_scale: 2}]", "schedules.x={kind: wsd, peak: 1}")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(fingerprint.to_json(told)), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml", told.recipe) == told


def test_another_kind_of_a_group_keeps_no_value_of_a_key_that_means_something_else(tmp_path: Path):
    recipe, other = "tasks.py:Sourced", ["data.kind=file", "data.path=x.csv"]
    values = {"recipe": recipe, "train": {"steps": 1}, "optim": {"kind": "sgd"}}
    values["data"] = {"kind": "embedded", "held_out": 500, "seed": 7}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    found = read_config(tmp_path / "config.yaml", recipe, other).data
    assert (found.held_out, found.seed) == (0.1, 7)  # a share of the rows, where it was a number of them
    assert read_config(tmp_path / "config.yaml", recipe, [*other, "data.held_out=0.3"]).data.held_out == 0.3


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ({"floor": 0.1}, "floor=0.1 has no effect on kind=constant"),
        ({"start": 0.1}, "start=0.1 has no effect without a warm-up"),
        ({"steps": 5}, "steps=5 has no effect on kind=constant"),
    ],
)
def test_a_setting_without_effect_is_refused_in_a_new_run_and_read_in_an_old_one(
    tmp_path: Path, setting: dict[str, Any], told: str
):
    """Runs that were trained with one could be neither resumed nor evaluated, exported or predicted with."""
    (key, value), now = next(iter(setting.items())), config("schedules.lr={kind: constant}")
    with pytest.raises(ConfigError, match=rf"schedules\.lr: {re.escape(told)}.*\(override 'schedules\.lr={{"):
        load_config(
            now.recipe, ["train.steps=2", "optim=sgd", "optim.lr=1", f"schedules.lr={{kind: constant, {key}: {value}}}"]
        )
    old = fingerprint.to_json(now)
    old["schedules"]["lr"] |= setting
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    found = read_config(tmp_path / "config.yaml", now.recipe)
    assert getattr(found.schedules["lr"], key) == value
    assert read_config(tmp_path / "config.yaml", now.recipe, ["train.steps=9"]).train.steps == 9


def test_a_warm_up_that_is_switched_off_takes_its_start_with_it():
    """Else a sweep over `warmup=0,100` with a `start` would be refused for the run that has none."""
    words = ["train.steps=9", "optim=sgd", "optim.lr=1", "schedules=cosine", "schedules.lr.start=0.1"]
    for warmup in (0, 4):
        made, _ = load_config("tasks.py:Plain", [*words, f"schedules.lr.warmup={warmup}"])
        assert schedule_factor(made.schedules["lr"], 0, 9) == (1.0 if warmup == 0 else pytest.approx(0.1 + 0.9 / 4))
    with pytest.raises(ConfigError, match=r"schedules\.lr: start=0\.1 has no effect without a warm-up"):
        load_config("tasks.py:Plain", [*words, "schedules.lr={kind: cosine, start: 0.1}"])


# keys that there were -------------------------------------------------------------------------------------------------


def test_a_key_that_was_removed_is_dropped_from_the_file_of_an_old_run_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    now = config("train.steps=2", task="tasks.py:Retiring")
    old = fingerprint.to_json(now)
    old["task"]["inner"]["old"] = 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    assert read_config(tmp_path / "config.yaml", now.recipe) == now
    assert capsys.readouterr().err == "unisono: old is no longer a setting, and is ignored. It was always 3.\n"
    assert fingerprint.changed_keys(old, now, random=False) == {}, "it is the same run"
    old["task"]["inner"]["old"] = 4
    assert list(fingerprint.changed_keys(old, now, random=False)) == ["task.inner.old"]


def test_a_key_that_was_removed_is_refused_with_another_value():
    (told,) = mistakes("task.inner.old=4", task="tasks.py:Retiring")
    assert told == ("'task.inner.old' is no longer a setting, got 4 (override 'task.inner.old=4'). It was always 3.")


# unknown keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "hint"),
    [
        ("launhc.timeout=3", "launhc", "did you mean 'launch'?"),
        ("train.step=3", "train.step", "did you mean 'train.steps'?"),
        ("layout.micro_batches=3", "layout.micro_batches", "did you mean 'layout.micro_batch'?"),
        ("optim.weight_dcay=3", "optim.weight_dcay", "did you mean 'optim.weight_decay'?"),
        ("schedules.lr.flor=0.1", "schedules.lr.flor", "did you mean 'schedules.lr.floor'?"),
        ("optim.groups=[{match: a, lr_scal: 2}]", "optim.groups.0.lr_scal", "did you mean 'optim.groups.0.lr_scale'?"),
        (
            "optim.groups=[{match: a}, {match: b, weigth_decay: 2}]",
            "optim.groups.1.weigth_decay",
            "did you mean 'optim.groups.1.weight_decay'?",
        ),
        ("task.widht=2", "task.widht", "did you mean 'task.width'?"),
        ("task.inner.dept=2", "task.inner.dept", "did you mean 'task.inner.depth'?"),
        ("data.prefetsh=2", "data.prefetsh", "did you mean 'data.prefetch'?"),
        ("model.width=2", "model.width", "did you mean 'task.width'?"),
    ],
)
def test_an_unknown_key_is_told_with_its_origin_and_the_nearest_key(override: str, key: str, hint: str):
    assert [line for line in mistakes(override) if "unknown" in line] == [
        f"unknown key '{key}' (override '{override}'), {hint}"
    ]


@pytest.mark.parametrize(
    ("task", "override", "told"),
    [
        ("Plain", "ema.zzz=1", ["unknown key 'ema.zzz' (…), valid here: decay, every, exclude, start, warmup"]),
        (
            "Plain", "optim.groups=[{mach: a}]",
            [
                "'optim.groups.0.match' is missing (glob over parameter names, e.g. '*.embed_tokens.*')",
                "unknown key 'optim.groups.0.mach' (…), did you mean 'optim.groups.0.match'?",
            ],
        ),
        (
            "Plain", "schedules.temperature.peak=3",
            [
                "'schedules.temperature.kind' is missing; choose one of: constant, linear, cosine, wsd, inverse_sqrt, "
                "exponential, restarts, plateau"
            ],
        ),
        ("Plain", "adapter.rank=3", ["'adapter.kind' is missing; set adapter.kind=lora"]),
        ("Plain", "task.width=3", ["'task.width': only even numbers here, got 3 (…)"]),
        ("Choosy", "task.width=1", ["'model.kind' is missing; choose one of: small, large"]),
        ("Tagged", "train.steps=1", ["'model.form' is missing; choose one of: one, two"]),
        ("Tagged", "model.form=three", ["'model.form' must be one of: one, two, got 'three' (…)"]),
        ("Plan", "train.steps=1", ["tasks.py has no class 'Plan', did you mean 'Plain'?"]),
        (
            "Zzzzz", "train.steps=1",
            ["tasks.py has no class 'Zzzzz', valid here: Choosy, Halved, Plain, Retiring, Sourced, Tagged, Unfit"],
        ),
        ("Halved", "train.steps=1", ["tasks.py:Halved does not define loss(), outputs()"]),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_origin_and_what_is_valid(task: str, override: str, told: list[str]):
    expected = [line.replace("…", f"override '{override}'") for line in told]
    assert mistakes(override, task=f"tasks.py:{task}") == expected


def test_static_graph_of_ddp_is_no_setting_as_no_layout_knows_which_parameters_a_pass_leaves_out():
    (mistake,) = mistakes("layout.static_graph=true")
    assert mistake.startswith("unknown key 'layout.static_graph' (override 'layout.static_graph=true')")


@pytest.mark.parametrize(
    ("override", "right"),
    [
        ("lr=3", "optim.lr"),
        ("steps=3", "train.steps"),
        ("world_size=3", "layout.world_size"),
        ("seed=3", "run.seed"),
        ("width=3", "task.width"),
        ("train.lr=3", "optim.lr"),
        ("optim.global_batch=3", "train.global_batch"),
        ("layout.precision=bf16", "train.precision"),
        ("train.micro_batch=4", "layout.micro_batch"),
    ],
)
def test_a_key_given_at_the_wrong_level_is_told_where_it_belongs(override: str, right: str):
    key = override.split("=")[0]
    assert mistakes(override) == [f"unknown key '{key}' (override '{override}'), did you mean '{right}'?"]


def test_an_unknown_key_in_a_union_is_compared_with_the_keys_of_the_chosen_branch():
    for model, hint in (
        ("{kind: large, depth: 1, dept: 2}", "did you mean 'model.depth'?"),
        ("{kind: small, dept: 2}", "valid here: kind, width"),
    ):
        assert choosy(f"model={model}") == [f"unknown key 'model.dept' (override 'model={model}'), {hint}"]


def test_an_unknown_key_of_a_user_s_file_is_told_with_its_line(tmp_path: Path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "own.yaml").write_text("kind: sgd\n\nmomentun: 0.9\n", encoding="utf-8")
    told = mistakes("optim=own", config_dir=tmp_path)
    assert told == [f"unknown key 'optim.momentun' ({tmp_path}/optim/own.yaml:3), did you mean 'optim.momentum'?"]


@pytest.mark.parametrize("override", ["task.nothing=1", "task.inner.nothing=1"])
def test_a_plain_pydantic_model_of_a_task_lets_no_unknown_key_pass_either(override: str):
    assert mistakes(override)[0].startswith(f"unknown key '{override.split('=')[0]}'")


# wrong and missing values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "key", "value", "reason"),
    [
        ("train.steps=many", "train.steps", "'many'", "should be a valid integer"),
        ("train.steps=0", "train.steps", "0", "greater than 0"),
        ("train.steps=1.5", "train.steps", "1.5", "valid integer"),
        ("optim.lr=fast", "optim.lr", "'fast'", "should be a valid number"),
        ("optim.lr=-1", "optim.lr", "-1", "greater than or equal to 0"),
        ("optim.lr=inf", "optim.lr", "inf", "finite number"),
        ("optim.lr=nan", "optim.lr", "nan", "finite number"),
        ("optim.betas=[0.9, 2]", "optim.betas.1", "2", "less than or equal to 1"),
        ("train.precision=fp16", "train.precision", "'fp16'", "'fp64', 'fp32' or 'bf16'"),
        ("observe.progress=perhaps", "observe.progress", "'perhaps'", "valid boolean"),
        ("schedules.lr.floor=2", "schedules.lr.floor", "2", "less than or equal to 1"),
        ("layout.world_size=0", "layout.world_size", "0", "greater than 0"),
        ("optim.groups=[{match: a, lr_scale: x}]", "optim.groups.0.lr_scale", "'x'", "valid number"),
        ("optim.groups=3", "optim.groups", "3", "valid list"),
        ("run.seed=-1", "run.seed", "-1", "greater than or equal to 0"),
        ("task.width=wide", "task.width", "'wide'", "valid integer"),
        ("task.inner.depth=deep", "task.inner.depth", "'deep'", "valid integer"),
        ("data.workers=0", "data.workers", "0", "greater than 0"),
    ],
)
def test_a_wrong_value_is_told_with_its_key_its_origin_and_the_reason(
    override: str, key: str, value: str, reason: str
):  # fmt: skip
    told = mistakes(override)[0]
    assert told.startswith(f"'{key}': input ")
    assert told.endswith(f", got {value} (override '{override}')")
    assert reason in told


def test_a_wrong_value_in_the_branch_of_a_union_is_told_without_the_branch_s_name():
    assert choosy("model.kind=large", "model.depth=deep")[0].startswith(
        "'model.depth': input should be a valid integer"
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((), "task.width"),
        (("task.width=1", "model.kind=large"), "model.depth"),
        (("task.width=1", "model.kind=small", "optim.groups=[{}]"), "optim.groups.0.match"),
    ],
)
def test_a_missing_key_is_named_from_the_top(overrides: tuple[str, ...], key: str):
    (told,) = [line for line in mistakes(*overrides, task="tasks.py:Choosy") if line.startswith(f"'{key}' is missing")]
    assert told.endswith(f"; set {key}=…") or ".0." in key


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("layout=ddp", ["layout.engine", "layout.strategy"]),
        ("train=3", ["train.steps", "train.epochs"]),
        ("schedules.lr=0.1", ["schedules.lr.peak"]),
        ("task=3", ["task.width", "task.inner"]),
        ("task.inner=3", ["task.inner.depth"]),
    ],
)
def test_a_group_given_as_a_value_is_told_with_the_keys_in_it(override: str, keys: list[str]):
    key = override.split("=")[0]
    told = mistakes(override)[0]
    assert told.startswith(f"'{key}' is a group of keys, not a value (override '{override}'); set one of {keys[0]}")
    assert all(name in told for name in keys)


@pytest.mark.parametrize("override", ["model=3", "task.free=3"])
def test_a_group_given_as_a_value_is_not_told_of_keys_that_it_does_not_have(override: str):
    key = override.split("=")[0]
    assert mistakes(override) == [f"'{key}' is a group of keys, not a value (override '{override}')"]


def test_a_task_s_own_check_of_a_group_is_told_with_the_group():
    told = mistakes("task.width=8", "task.inner.depth=8")
    assert len(told) == 1
    assert told[0].startswith("'task': too large a network, got ")


def test_several_mistakes_are_told_at_once_each_on_its_line():
    told = mistakes("task.width=wide", "train.steps=-1", "lr=3", "layout=ddp", "model.x=1")
    starts = ["'task.width'", "unknown key 'model.x'", "'layout' is a group", "'train.steps'", "unknown key 'lr'"]
    assert [next(start for start in starts if line.startswith(start)) for line in told] == starts


def test_a_mistake_that_lies_between_two_keys_is_told_too():
    assert mistakes("train.epochs=2", "train.steps=1000") == [
        "give one of train.steps, train.epochs and train.tokens (got steps=1000 and epochs=2); set the others to null"
    ]


def test_a_data_group_that_is_not_made_from_unisono_s_is_refused():
    assert mistakes(task="tasks.py:Unfit") == ["tasks.py:Unfit: the task's Data type must extend unisono.Data"]


# the task --------------------------------------------------------------------------------------------------------


def test_a_task_file_that_is_not_there_is_named(folder: Path):
    told = mistakes(task="nowhere.py:Plain")
    assert told == [
        f"{folder.resolve()}/nowhere.py: no such file; a task is given as path/to/file.py, or path/to/file.py:Class"
    ]


def test_a_file_without_tasks_is_told_to_have_none():
    assert mistakes(task="empty.py:Plain") == ["empty.py has no class 'Plain', and there is none to choose from"]


@pytest.mark.parametrize("name", ["NoTask", "METHODS", "Annotated", "BaseModel"])
def test_a_name_that_is_no_task_is_refused(name: str, folder: Path):
    (folder / "names.py").write_text(TASKS + "\nMETHODS = 3\n", encoding="utf-8")
    assert mistakes(task=f"names.py:{name}") == [f"names.py:{name} is not a unisono.Task"]


def test_a_task_may_lie_in_an_installed_package():
    assert find_task("packages.unisono.tests.tasks:LinearTask").__name__ == "LinearTask"


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"^nowhere\.tasks:Mine: there is no module 'nowhere\.tasks'$"):
        find_task("nowhere.tasks:Mine")


def test_a_recipe_whose_packages_are_missing_is_told_what_to_install(spirals: Path):
    code = "import sys; sys.modules['torch'] = None; import unisono.task_config as c; c.find_task('spirals')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(r"ConfigError: spirals needs the package 'torch': pip install torch$", last)


def test_two_files_of_the_same_name_in_folders_of_the_same_name_are_two_tasks(tmp_path: Path):
    for number in (1, 2):
        path = tmp_path / str(number) / "project" / "task.py"
        path.parent.mkdir(parents=True)
        path.write_text(
            f"import unisono\nclass Mine(unisono.Task):\n    number = {number}\n{METHODS}", encoding="utf-8"
        )
    found = [find_task(f"{tmp_path}/{number}/project/task.py:Mine").number for number in (1, 2, 1)]
    assert found == [1, 2, 1]


def test_a_file_is_imported_once_however_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(f"import unisono\nclass Mine(unisono.Task):\n{METHODS}", encoding="utf-8")
    assert find_task("once.py:Mine") is find_task(f"{tmp_path}/./once.py:Mine")


def test_a_file_whose_import_failed_is_tried_again(tmp_path: Path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('not today')", encoding="utf-8")
    with pytest.raises(ConfigError, match="not today"):
        find_task(f"{path}:Mine")
    path.write_text(f"import unisono\nclass Mine(unisono.Task):\n{METHODS}\n", encoding="utf-8")
    assert find_task(f"{path}:Mine").__name__ == "Mine"


def test_a_task_file_can_import_its_neighbours(tmp_path: Path):
    (tmp_path / "neighbour_of_a_task.py").write_text("NUMBER = 7", encoding="utf-8")
    text = "import neighbour_of_a_task, unisono\nclass Mine(unisono.Task):\n    n = neighbour_of_a_task.NUMBER\n"
    (tmp_path / "task.py").write_text(text + METHODS, encoding="utf-8")
    assert find_task(f"{tmp_path}/task.py:Mine").n == 7


# files -----------------------------------------------------------------------------------------------------------


def test_a_configuration_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read as a configuration: .*No such file"):
        read_config(tmp_path / "config.yaml", "tasks.py:Plain")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [1", "cannot be read as a configuration"),
        ("- 1\n- 2\n", "holds a list, not keys and values"),
        ("", "holds a NoneType, not keys and values"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, told: str):
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        read_config(tmp_path / "config.yaml", "tasks.py:Plain")


def test_a_mistake_in_a_run_s_configuration_is_told_with_the_file(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("recipe: tasks.py:Plain\ntrain: {stesp: 3}\noptim: {kind: sgd}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_config(path, "tasks.py:Plain")
    assert f"unknown key 'train.stesp' ({path}), did you mean 'train.steps'?" in str(caught.value)


def test_a_configuration_without_a_task_is_refused():
    with pytest.raises(ConfigError, match="set recipe=NAME"):
        validate_config(ComposedConfig({"train": {"steps": 1}}, {}))
