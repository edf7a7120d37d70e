"""What Hydra makes of groups and overrides, and where every value is said to come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import unisono
from unisono.config.code.recipes import config_folders
from unisono.config.compose import ComposedConfig, compose
from unisono.runtime.errors import ConfigError

OWN = "task.py:Anything"  # composing does not open the task's file
pytestmark = pytest.mark.usefixtures("spirals")
CHOICES = "adafactor, adam_atan2, adamw, lion, muon, sgd"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own folder of YAML files, beside the place where the command runs."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "conf"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def values(*overrides: str, recipe: str = OWN, folder: Path | None = None) -> dict:
    return compose(recipe, overrides, folder).values


def refusal(*overrides: str, recipe: str = OWN, folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(recipe, overrides, folder)
    return str(caught.value)


# groups and values -----------------------------------------------------------------------------------------------


def test_a_recipe_is_composed_from_its_defaults_list():
    found = values(recipe="spirals")
    assert found["optim"]["kind"] == "adamw"
    assert found["schedules"]["lr"]["kind"] == "wsd"
    assert found["data"] == {"points": 100}
    assert found["model"] == {"width": 128}


def test_a_recipe_s_own_values_count_more_than_those_of_its_groups(folder: Path):
    write(folder / "mine.yaml", "defaults:\n  - task\n  - _self_\ntrain:\n  steps: 7\n")
    assert values(recipe="mine", folder=folder)["train"] == {"steps": 7}


def test_a_task_of_ones_own_stands_on_adamw_cosine_and_a_length():
    found = values()
    assert (found["recipe"], found["optim"], found["train"]) == (OWN, {"kind": "adamw"}, {"steps": 1000})
    assert found["schedules"]["lr"]["kind"] == "cosine"


LR = "schedules.lr="


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        pytest.param("schedules=constant", "schedules", {"lr": {"kind": "constant"}}, id="a choice replaces the group"),
        pytest.param("optim=sgd optim=adamw", "optim", {"kind": "adamw"}, id="the last choice counts"),
        pytest.param("optim.kind=own optim=sgd", "optim", {"kind": "own"}, id="a value counts more than a choice"),
        pytest.param("optim=sgd optim.lrr=3", "optim", {"kind": "sgd", "lrr": 3}, id="the schema judges unknown keys"),
        pytest.param("+optim=sgd +optim.lr=3", "optim", {"kind": "sgd", "lr": 3}, id="a plus changes nothing"),
        pytest.param("++optim=sgd ++optim.lr=3", "optim", {"kind": "sgd", "lr": 3}, id="two pluses change nothing"),
        pytest.param("task.x=${train.steps}", "task", {"x": 1000}, id="a value may refer to another key"),
        pytest.param("task.x=_target_", "task", {"x": "_target_"}, id="a text may look like a forbidden key"),
        pytest.param(LR + "{warmup:9}", "schedules", {"lr": {"kind": "cosine", "warmup": 9, "floor": 0.1}}, id="merge"),
        pytest.param(LR + "{kind:wsd,warmup:9}", "schedules", {"lr": {"kind": "wsd", "warmup": 9}}, id="replace"),
        pytest.param("schedules={lr:{kind:wsd}}", "schedules", {"lr": {"kind": "wsd"}}, id="a kind replaces inside"),
        pytest.param("optim={kind:sgd}", "optim", {"kind": "sgd"}, id="a kind replaces a group"),
        pytest.param(
            "schedules.lr={kind:linear} schedules.lr.floor=0.5 schedules.lr={warmup:3}",
            "schedules", {"lr": {"kind": "linear", "floor": 0.5, "warmup": 3}}, id="overrides apply in their order",
        ),
    ],
)  # fmt: skip
def test_overrides_choose_replace_and_merge(overrides: str, key: str, value: object):
    assert values(*overrides.split())[key] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("null", None),
        ("word", "word"),
        ("", ""),
        ("two words", "two words"),
        ("[1,2]", [1, 2]),
        ("[]", []),
        ("[{match: a, lr_scale: 2}]", [{"match": "a", "lr_scale": 2}]),
        ("{a: 1, b: {c: x}}", {"a": 1, "b": {"c": "x"}}),
        ("'3'", "3"),
        ("'null'", "null"),
        ("'a, b: {c} [d] = \"e\" #'", 'a, b: {c} [d] = "e" #'),
        ('"it\'s"', "it's"),
        (r"'it\'s'", "it's"),
        ("/data/with space/a-b.txt", "/data/with space/a-b.txt"),
        ("'/data/ä-ö.txt'", "/data/ä-ö.txt"),
        (r"'C:\data\new'", r"C:\data\new"),
        ("*.embed_tokens.*", "*.embed_tokens.*"),
        ("10.0.0.1:29400", "10.0.0.1:29400"),
        ("[fd00::1]:29400", "[fd00::1]:29400"),
    ],
)
def test_a_value_is_read_as_it_is_written(text: str, value: object):
    assert values(f"task.x={text}")["task"]["x"] == value


# what a user brings along ----------------------------------------------------------------------------------------


def test_a_choice_of_the_user_s_own_joins_a_packaged_group(folder: Path):
    write(folder / "optim" / "fast.yaml", "kind: sgd\nlr: 5\n")
    assert values("optim=fast", folder=folder)["optim"] == {"kind": "sgd", "lr": 5}


def test_a_choice_of_the_user_s_own_serves_a_packaged_recipe(folder: Path):
    write(folder / "model" / "mini.yaml", "width: 4\n")
    assert values("model=mini", recipe="spirals", folder=folder)["model"] == {"width": 4}


@pytest.mark.parametrize("override", ["task=wide", "+task=wide"])
def test_a_group_of_the_user_s_own_can_be_chosen_though_no_defaults_list_has_it(folder: Path, override: str):
    write(folder / "task" / "wide.yaml", "width: 128\n")
    assert values(override, folder=folder)["task"] == {"width": 128}


def test_a_file_of_the_user_s_own_can_set_keys_of_several_groups(folder: Path):
    write(folder / "experiment" / "big.yaml", "# @package _global_\ntrain:\n  global_batch: 64\noptim:\n  lr: 0.5\n")
    found = compose(OWN, ["experiment=big"], folder)
    assert (found.values["train"]["global_batch"], found.values["optim"]["lr"]) == (64, 0.5)
    assert found.origin("optim.lr") == "conf/experiment/big.yaml:5"


def test_a_config_of_the_user_s_own_may_stand_on_a_packaged_recipe(folder: Path):
    text = "defaults:\n  - spirals\n  - override model: narrow\n  - _self_\ntrain:\n  steps: 7\n"
    write(folder / "mine.yaml", text)
    found = values(recipe="mine", folder=folder)
    assert (found["recipe"], found["model"]["width"], found["train"]["steps"]) == ("spirals", 8, 7)


def test_a_config_of_the_user_s_own_may_name_a_task_file(folder: Path):
    write(folder / "mine.yaml", "defaults:\n  - task\n  - _self_\nrecipe: tasks.py:Mine\ntask:\n  width: 6\n")
    found = values(recipe="mine", folder=folder)
    assert (found["recipe"], found["task"], found["optim"]) == ("tasks.py:Mine", {"width": 6}, {"kind": "adamw"})


@pytest.mark.parametrize("recipe", [OWN, "spirals", "mine"])
def test_a_user_s_file_that_would_shadow_a_packaged_one_is_refused(folder: Path, recipe: str):
    write(folder / "mine.yaml", "defaults:\n  - spirals\n")
    write(folder / "optim" / "adamw.yaml", "kind: adamw\nlr: 5\n")
    told = refusal(recipe=recipe, folder=folder)
    assert "conf/optim/adamw.yaml has the name of a packaged file" in told


def test_a_user_s_config_with_the_name_of_a_packaged_recipe_is_refused(folder: Path):
    write(folder / "spirals.yaml", "train:\n  steps: 7\n")
    assert "conf/spirals.yaml has the name of a packaged recipe" in refusal(recipe="spirals", folder=folder)


def test_a_config_folder_that_is_not_there_is_named(folder: Path):
    assert refusal(folder=folder) == f"--config-dir {folder}: no such folder"


# refusals --------------------------------------------------------------------------------------------------------


SEVERAL, GROUP = "has several values; for a list write key=[a,b]", f"'optim' is a group, choose one of {CHOICES}"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.lr=1,2", SEVERAL),
        ("optim=adamw,sgd", SEVERAL),
        ("train.steps=choice(1,2)", SEVERAL),
        ("optim.lr=range(1,3)", SEVERAL),
        ("~train.steps", ": keys cannot be removed; set train.steps=null instead"),
        ("~optim", f": {GROUP}"),
        ("optim=null", f": {GROUP}"),
        ("~optim=adamw", f": {GROUP}"),
        ("optim=sgdd", ": 'optim' has no choice 'sgdd', did you mean 'sgd'?"),
        ("optim=xyz", f": 'optim' has no choice 'xyz', valid here: {CHOICES}"),
    ],
)
def test_sweeps_removals_and_unknown_choices_are_refused_with_what_to_write(override: str, told: str):
    assert refusal(override) == f"override '{override}'{'' if told.startswith(':') else ' '}{told}"


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_an_optimizer_in_8_bits_is_refused_with_why(name: str) -> None:
    assert "There is no AdamW in 8 bits: its scales belong to blocks of what a process" in refusal(f"optim={name}")


@pytest.mark.parametrize("word", ["train.steps:3", "=3", "+=3", "=", "canary5f0c9d1e7a", "task.canary5f0c9d1e7a"])
def test_a_word_that_is_no_override_is_refused_and_not_repeated_if_it_may_be_a_password(word: str):
    assert refusal(word) == "one of the words is not an override: write key=value or group=choice"
    assert refusal("train.steps") == "'train.steps' is not an override: write key=value or group=choice"
    assert refusal("my.yaml").endswith("; to train what NAME.yaml says: unisono train NAME --config-dir FOLDER")


def test_a_value_that_cannot_be_read_is_refused_with_the_way_to_quote_it():
    told = refusal("task.x=canary5f0c9d1e7a=b(c")
    assert told.startswith("override 'task.x=…' cannot be read: ")
    assert "canary" not in told
    assert told.endswith("Quote values with special characters: key='\"a, b\"'")


def test_a_reference_to_a_key_that_is_not_there_names_the_key():
    assert "Interpolation key 'nowhere' not found" in refusal("task.x=${nowhere}")


@pytest.mark.parametrize("override", ["hydra.run.dir=x", "hydra.searchpath=[file:///tmp]", "hydra/launcher=basic"])
def test_hydra_s_own_settings_are_refused_as_unknown_keys(override: str):
    assert refusal(override).startswith(f"unknown key '{override.split('=')[0]}' (override '{override}')")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("_target_=os.system", "_target_"),
        ("task._target_=os.system", "task._target_"),
        ("model.settings.rope._target_=os.system", "model.settings.rope._target_"),
        ("model.settings={rope: {_target_: os.system}}", "model.settings.rope._target_"),
        ("task.x=[1, {_target_: os.system}]", "task.x.1._target_"),
        ("task._partial_=true", "task._partial_"),
        ("+optim._args_=[1]", "optim._args_"),
    ],
)
def test_an_override_that_would_instantiate_something_is_refused_at_any_depth(override: str, key: str):
    told = refusal(override)
    assert told.startswith(f"'{key}' (override '{override}'): classes cannot be instantiated from a configuration")


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("_target_: os.system\n", "task._target_", 1),
        ("width: 3\nnested:\n  deeper:\n    _target_: os.system\n", "task.nested.deeper._target_", 4),
        ("layers:\n  - {_target_: os.system}\n", "task.layers.0._target_", 2),
    ],
)
def test_a_file_that_would_instantiate_something_is_refused_at_any_depth(folder: Path, text: str, key: str, line: int):
    write(folder / "task" / "wide.yaml", text)
    told = refusal("task=wide", folder=folder)
    assert told.startswith(f"'{key}' (conf/task/wide.yaml:{line}): classes cannot be instantiated from a configuration")


def test_a_yaml_file_that_cannot_be_parsed_is_refused_in_one_sentence(folder: Path):
    write(folder / "task" / "wide.yaml", "width: [1\n")
    assert "wide.yaml" in refusal("task=wide", folder=folder)


def test_an_unknown_recipe_is_refused_with_the_nearest_one():
    told = refusal(recipe="spirls")
    assert told == "unknown recipe 'spirls', did you mean 'spirals'? (or a task of your own: path/to/file.py:Class)"


def test_an_unknown_recipe_is_compared_with_the_user_s_own_configs_too(folder: Path):
    write(folder / "ablation.yaml", "defaults:\n  - task\n")
    assert "did you mean 'ablation'?" in refusal(recipe="ablaton", folder=folder)


# origins ---------------------------------------------------------------------------------------------------------


def test_every_value_of_a_recipe_has_a_file_and_a_line_that_hold_it(spirals: Path):
    places = spirals, Path(unisono.__file__).parents[1]
    found = compose("spirals")
    assert found.origins
    for key, origin in found.origins.items():
        file, line = origin.split(":")
        (path,) = (place / file for place in places if (place / file).is_file())
        name, value = path.read_text(encoding="utf-8").splitlines()[int(line) - 1].strip().split(": ")
        at = found.values
        for part in key.split("."):
            at = at[part]
        assert name == key.rpartition(".")[2], (key, origin)
        assert value == str(at).lower() or yaml.safe_load(value) == at, (key, origin)


def test_a_value_of_the_user_s_file_is_said_to_come_from_its_line(folder: Path):
    write(folder / "task" / "wide.yaml", "# wide\n\nwidth: 128\nnested:\n  depth: 3\n")
    found = compose(OWN, ["task=wide"], folder)
    assert found.origin("task.width") == "conf/task/wide.yaml:3"
    assert found.origin("task.nested.depth") == "conf/task/wide.yaml:5"


def test_a_file_counts_as_the_origin_before_the_group_it_overrules(folder: Path):
    write(folder / "mine.yaml", "defaults:\n  - spirals\n  - _self_\n\noptim:\n  lr: 1\n")
    assert compose("mine", (), folder).origin("optim.lr") == "conf/mine.yaml:6"


SGD = "unisono/config/groups/optim/sgd.yaml:1"


@pytest.mark.parametrize(
    ("override", "key", "origin"),
    [
        pytest.param("optim.lr=1", "optim.lr", "override", id="an override"),
        pytest.param("++train.steps=3", "train.steps", "override", id="an override with pluses"),
        pytest.param("task={a: 1, b: {c: 2}}", "task.b.c", "override", id="all keys of a dictionary"),
        pytest.param("schedules.lr={warmup: 3}", "schedules.lr.warmup", "override", id="a key of a merged dictionary"),
        pytest.param("schedules.lr={kind: wsd}", "schedules.lr.decay", "default", id="what a kind leaves out"),
        pytest.param("optim.groups=[{mach: a}]", "optim.groups.0.mach", "override", id="a value inside a list"),
        pytest.param("optim=sgd", "optim.kind", SGD, id="a chosen group has its file"),
        pytest.param("optim=sgd", "layout.micro_batch", "default", id="the schema's default"),
        pytest.param("optim=sgd", "recipe", "command line", id="the task of the command line"),
    ],
)
def test_a_value_s_origin_is_an_override_a_file_or_the_default(override: str, key: str, origin: str):
    expected = f"override '{override}'" if origin == "override" else origin
    assert compose(OWN, [override]).origin(key) == expected


def test_a_merged_dictionary_is_the_origin_of_no_other_keys():
    assert ".yaml:" in compose("spirals", ["schedules.lr={warmup: 3}"]).origin("schedules.lr.decay")


def test_explaining_a_message_adds_the_origin_of_every_key_it_names():
    composed = ComposedConfig(
        {}, {"train.steps": "a.yaml:3", "optim.lr": "override 'optim.lr=3'", "run.name": "b.yaml:1"}
    )
    told = composed.explain("train.steps=3 and optim.lr=3 do not fit, and train.steps is odd")
    assert told.splitlines()[1:] == ["  train.steps is from a.yaml:3", "  optim.lr is from override 'optim.lr=3'"]


@pytest.mark.parametrize("message", ["train.epochs is odd", "'train.steps' (a.yaml:3) is odd"])
def test_explaining_a_message_adds_nothing_for_unwritten_keys_and_origins_that_it_has(message: str):
    assert ComposedConfig({}, {"train.steps": "a.yaml:3"}).explain(message) == message


def test_every_packaged_recipe_can_be_composed():
    assert "spirals" in config_folders()
    assert [compose(name).values["recipe"] for name in config_folders()] == list(config_folders())


# the settings of a task object ----------------------------------------------------------------------------------------

OBJECT = {"model": {"features": 48, "encoder": "taxon"}, "data": {"kind": "study", "table": "${seed}/a.biom"}}


def test_the_settings_of_an_object_replace_those_of_the_files_and_overrides_change_them():
    made = compose("spirals", ["model.features=64", "data.target=ibd"], settings=OBJECT)
    assert made.values["model"] == {"features": 64, "encoder": "taxon"}, "nothing of model=wide"
    assert made.values["data"] == {"kind": "study", "table": "${seed}/a.biom", "target": "ibd"}, "a text is a text"
    assert made.origin("model.features") == "override 'model.features=64'"
    assert made.origin("model.encoder") == "the task object"


def test_a_choice_replaces_the_settings_of_an_object():
    made = compose("spirals", ["model=narrow"], settings=OBJECT)
    assert made.values["model"] == {"width": 8}
    assert made.values["data"]["table"] == "${seed}/a.biom"
