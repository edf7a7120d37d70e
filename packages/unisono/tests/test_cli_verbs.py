"""Verbs of recipes and of users' files: plain functions, found by what the command is about, called with its words."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import unisono as face
from packages.unisono.tests.tasks import TransformerTask
from unisono.cli import verbs
from unisono.config.code import recipes
from unisono.config.code.recipes import Recipe
from unisono.config.compose import ComposedConfig, compose
from unisono.launch.resolving.layout import resolve_layout
from unisono.launch.task_objects import with_engine
from unisono.runtime.errors import ConfigError
from unisono.task_config import build_task, find_task, resolve_engine, validate_config

SPIRALS = f"{Path(__file__).parents[3]}/examples/spirals.py:Spirals"
SMALL = {"layout.world_size": 1, "layout.device": "cpu", "layout.threads": 1, "observe.progress": False}

FILE = '''
from pathlib import Path
from typing import Literal
import unisono
from packages.unisono.tests.tasks import LinearTask

class Mine(LinearTask):
    def held_out(self):
        return self.data()[:7]

def echo(text: str, times: int = 2, how: Literal["plain", "loud"] = "plain", out: Path | None = None):
    """Say it again.

    Args:
        text: what is said.
        times: how often.
        how: loud or plain.
        out: not used.
    """
    assert out is None or isinstance(out, Path)
    for _ in range(times):
        yield text.upper() if how == "loud" else text

def size(run: unisono.Run):
    return {"rows": len(run.task.data()), "step": run.load_model().weight.shape[1]}

def begin(overrides: list[str], count: int = 1):
    """Start runs.

    Args:
        overrides: settings of theirs.
        count: of them.
    """
    return overrides * count

VERBS = {"echo": echo, "size": size, "begin": begin}
'''

Told = tuple[int, str, str]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(FILE)
    return f"{tmp_path / 'mine.py'}:Mine"


# a user's file --------------------------------------------------------------------------------------------------------


def test_a_verb_of_a_file_is_called_with_the_words_of_the_command(mine: str, command: Callable[..., Told]) -> None:
    assert command("echo", mine, "a=b", "times=3", "how=loud") == (0, "A=B\nA=B\nA=B\n", "")
    code, told, _ = command("echo", mine, "--help")
    assert code == 0
    assert "echo " in told and "TEXT [times=2] [how=plain] [out=…]" in told
    assert "Say it again." in told and "  times: how often." in told


def test_a_verb_that_starts_runs_is_given_their_settings(mine: str, command: Callable[..., Told]) -> None:
    given = ("optim=adamw", "train.steps=3", "count=2", "data.x=1")
    assert command("begin", mine, *given) == (0, "optim=adamw\ntrain.steps=3\ndata.x=1\n" * 2, "")
    told = command("begin", mine, "--help")[1]
    assert "[count=1] [SETTING=…]" in told and "overrides" not in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "echo needs TEXT"),
        (("x", "y"), "'y': write key=value"),
        (("x", "tims=3"), "unknown word 'tims=3', did you mean 'times'?"),
        (("x", "times=few"), "times=few: input should be a valid integer"),
        (("x", "how=odd"), "how=odd: input should be 'plain' or 'loud'"),
        (("x", "data.lanes=3"), "unknown word 'data.lanes=3'"),
    ],
)
def test_words_that_do_not_fit_a_verb_are_refused(
    mine: str, command: Callable[..., Told], words: tuple[str, ...], told: str
) -> None:
    code, _, error = command("echo", mine, *words)
    assert code == 2
    assert told in error


def test_a_verb_about_a_run_is_given_it_opened(mine: str, tmp_path: Path, command: Callable[..., Told]) -> None:
    settings = {**SMALL, "train.steps": 1, "train.global_batch": 8, "run.dir": str(tmp_path), "run.name": "run"}
    folder = face.train(mine, settings).folder
    assert command("size", folder)[:2] == (0, "rows: 40\nstep: 3\n")
    assert command("size", folder, "task.rows=9")[:2] == (0, "rows: 9\nstep: 3\n")
    code, _, error = command("size", folder, "task.row=9")
    assert (code, "unknown key 'task.row'" in error and "did you mean 'task.rows'" in error) == (2, True)
    code, _, error = command("size", mine)
    assert (code, "size needs the folder of a run" in error) == (2, True)


def test_a_verb_that_nobody_has_is_refused_with_the_nearest(
    mine: str, spirals: Path, command: Callable[..., Told]
) -> None:
    assert "has no verb 'echoo'" in command("echoo", mine, "x")[2]
    assert "did you mean 'echo'?" in command("echoo", mine, "x")[2]
    assert "unknown verb 'weigths', did you mean 'weights'?" in command("weigths")[2]
    assert "unisono weights needs a run" in command("weights")[2]
    assert "unisono crossvalidate needs a recipe: unisono crossvalidate RECIPE" in command("crossvalidate")[2]
    assert command("crossvalidate", "--help")[1].startswith("usage: unisono crossvalidate RECIPE [out=")
    assert (
        "nowhere is neither a run (no nowhere/config.yaml), nor a model that a recipe opens"
        in command("weights", "nowhere", "x")[2]
    )


# recipes --------------------------------------------------------------------------------------------------------------


def test_help_lists_recipes_and_their_verbs_and_imports_no_task(spirals: Path) -> None:
    code = """
import sys
from unisono.cli import main, verbs
try:
    main.main(["--help"])
except SystemExit:
    pass
print(sorted({"torch", "numpy", "pydantic", "hydra", "transformers"} & set(sys.modules)))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert "  weights    spirals      list the tensors of a trained model" in told
    assert "  predict    every task" in told
    assert told.endswith("[]\n")


def test_the_version_is_told_without_what_only_some_verbs_need() -> None:
    """Half of what `--version` imported, and a fifth of its time, was for launchers, scripts and tracebacks."""
    needless = {"ast", "dataclasses", "hashlib", "inspect", "json", "traceback", "unisono.runtime.untrusted"}
    code = """
import sys
from unisono.cli import main
try:
    main.main(["--version"])
except SystemExit:
    pass
print(*sys.modules)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert needless.isdisjoint(told.split())


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lets these be the recipes that are installed: each a recipe, or an error that its package raises."""

    def load(recipe: Any) -> Any:
        if isinstance(recipe, Exception):
            raise recipe
        return recipe

    def replace(**found: Any) -> None:
        entries = {
            name: SimpleNamespace(
                value=f"{name}:RECIPE", module="packages.unisono.tests.tasks", load=lambda recipe=recipe: load(recipe)
            )
            for name, recipe in found.items()
        }
        recipes.find_recipe.cache_clear()
        monkeypatch.setattr(recipes, "_entry_points", lambda: entries)

    yield replace
    recipes.find_recipe.cache_clear()


def test_a_recipe_that_cannot_be_imported_is_listed_and_stops_nobody_else(
    register: Callable[..., None], command: Callable[..., Told]
) -> None:
    good = Recipe(
        tasks={"torch": "packages.unisono.tests.tasks:LinearTask"}, verbs={"count": ("builtins:len", "count")}
    )
    register(good=good, broken=ImportError("no such library"))
    told = verbs.list_verbs()
    assert "count      good         count" in told
    assert "broken       cannot be imported" in told
    assert recipes.find_recipe_name("packages.unisono.tests.tasks:LinearTask") == "good"
    with pytest.raises(ConfigError, match=r"recipe 'broken' \(broken:RECIPE\) cannot be imported: no such library"):
        recipes.find_recipe("broken")


def test_what_an_entry_point_names_has_to_be_a_recipe(register: Callable[..., None]) -> None:
    register(odd=3)
    with pytest.raises(ConfigError, match=r"recipe 'odd': odd:RECIPE is a int, not a unisono\.Recipe"):
        recipes.find_recipe("odd")
    with pytest.raises(ConfigError, match="unknown recipe 'od', did you mean 'odd'"):
        recipes.find_recipe("od")
    register()
    with pytest.raises(ConfigError, match=r"'language', which is not installed: pip install 'unisono\[language\]'$"):
        recipes.find_recipe("language")
    with pytest.raises(ConfigError, match="unknown recipe 'langage', did you mean 'language'"):
        recipes.find_recipe("langage")


def test_a_recipe_has_a_task_for_each_engine_and_refuses_others(register: Callable[..., None]) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    both = Recipe(
        tasks={"torch": "packages.unisono.tests.tasks:LinearTask", "jax": "packages.unisono.tests.jax_tasks:UnevenTask"}
    )
    one = Recipe(tasks={"jax": "packages.unisono.tests.jax_tasks:UnevenTask"})
    register(both=both, one=one)
    assert [find_task("both", engine).engine for engine in ("auto", "torch", "jax")] == ["torch", "torch", "jax"]
    assert find_task("one").engine == find_task("one", "jax").engine == "jax"
    with pytest.raises(
        ConfigError, match=r"layout\.engine=torch: the recipe 'one' has no task for it; use layout\.engine=jax"
    ):
        find_task("one", "torch")
    with pytest.raises(ConfigError, match="at least one task"):
        Recipe(tasks={})


def test_the_layout_of_a_run_chooses_the_task_of_its_recipe(register: Callable[..., None]) -> None:
    pytest.importorskip("jax", reason="jax is not installed")
    tasks = {"torch": "packages.unisono.tests.tasks:LinearTask", "jax": "packages.unisono.tests.jax_tasks:UnevenTask"}
    register(both=Recipe(tasks=tasks), one=Recipe(tasks={"jax": tasks["jax"]}))

    def engine(recipe: str, **layout: str) -> str:
        composed = compose(tasks["torch"], ["layout.device=cpu", *(f"layout.{key}={layout[key]}" for key in layout)])
        config = validate_config(ComposedConfig({**composed.values, "recipe": recipe}, {}))
        made = resolve_layout(config, None)
        assert build_task(made).engine == resolve_engine(config) == made.layout.engine
        return made.layout.engine

    assert [engine("both"), engine("both", engine="jax"), engine("one")] == ["torch", "jax", "jax"]
    with pytest.raises(ConfigError, match="the recipe 'one' has no task for it"):
        engine("one", engine="torch")
    with pytest.raises(
        ConfigError, match=r"layout\.engine=jax, but packages.unisono.tests.tasks:LinearTask is written for torch"
    ):
        engine(tasks["torch"], engine="jax")
    composed = ComposedConfig({"recipe": "both", "layout": {"strategy": "single"}}, {})
    assert with_engine(composed, find_task(tasks["jax"])).values["layout"] == {"strategy": "single", "engine": "jax"}
    with pytest.raises(ConfigError, match=r"layout\.engine=jax, but LinearTask is written in torch"):
        with_engine(ComposedConfig({"recipe": "both", "layout": {"engine": "jax"}}, {}), find_task(tasks["torch"]))


def test_a_recipe_s_own_export_is_the_one_for_its_runs_unless_a_form_is_named(
    register: Callable[..., None], tmp_path: Path
) -> None:
    own = Recipe(
        tasks={"torch": "packages.unisono.tests.tasks:LinearTask"}, verbs={"export": ("builtins:len", "export")}
    )
    none = Recipe(tasks={"torch": "packages.unisono.tests.tasks:TransformerTask"})
    register(own=own, none=none)
    for name, reference in (
        ("own", "own"),
        ("task", "packages.unisono.tests.tasks:LinearTask"),
        ("none", "none"),
        ("file", "x.py:X"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"recipe: {reference}\n")
    found = [verbs.replaces_core(["export", str(tmp_path / name), "out=x"]) for name in ("own", "task", "none", "file")]
    assert found == [True, True, False, False]
    assert not verbs.replaces_core(["export", str(tmp_path / "own"), "to=safetensors"])
    assert not verbs.replaces_core(["evaluate", str(tmp_path / "own")])
    assert not verbs.replaces_core(["export", str(tmp_path / "nowhere")])
    (tmp_path / "own" / "config.yaml").write_text("recipe: [")
    assert not verbs.replaces_core(["export", str(tmp_path / "own")])


# predict, which every task has ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spirals_run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("spirals")
    steps = {"train.steps": 40, "train.global_batch": 64, "optim.lr": 1e-2, "task.width": 16}
    return face.train(SPIRALS, {**SMALL, **steps, "run.dir": str(folder), "run.name": "run"})


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_held_out_rows_are_predicted_beside_what_is_known_of_them(
    spirals_run: Any, command: Callable[..., Told]
) -> None:
    code, told, _ = command("predict", spirals_run.folder)
    rows = rows_of(spirals_run.folder / "predictions.csv")
    assert (code, len(rows), list(rows[0])) == (0, 500, ["row", "output", "side"])
    right = sum((float(row["output"]) > 0) == (row["side"] == "1") for row in rows) / 500
    assert right > 0.6
    values = dict(line.split(": ") for line in told.splitlines()[1:])
    assert float(values["accuracy"]) == pytest.approx(right, abs=1e-6)
    assert float(values["accuracy"]) == pytest.approx(spirals_run.evaluation["accuracy"], abs=1e-6)
    assert float(values["loss"]) == pytest.approx(spirals_run.evaluation["loss"], rel=1e-4)


def test_predictions_do_not_depend_on_the_micro_batch_or_the_format(
    spirals_run: Any, tmp_path: Path, command: Callable[..., Told]
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    assert command("predict", spirals_run.folder, f"out={one}", "micro_batch=7")[0] == 0
    assert command("predict", spirals_run.folder, f"out={other}", "micro_batch=500")[0] == 0
    first, second = ([json.loads(line) for line in path.read_text().splitlines()] for path in (one, other))
    assert [row["row"] for row in first] == list(range(500)) == [row["row"] for row in second]
    assert [row["output"] for row in first] == pytest.approx([row["output"] for row in second], rel=1e-4, abs=1e-5)


def test_rows_that_were_trained_on_are_predicted_too_and_not_augmented(
    spirals_run: Any, tmp_path: Path, command: Callable[..., Told]
) -> None:
    out = tmp_path / "all.csv"
    assert command("predict", spirals_run.folder, "rows=all", f"out={out}")[0] == 0
    rows = rows_of(out)
    assert [row["source"] for row in rows] == ["training"] * 2000 + ["held_out"] * 500
    again = tmp_path / "again.csv"
    assert command("predict", spirals_run.folder, "rows=training", f"out={again}")[0] == 0
    assert [row["output"] for row in rows_of(again)] == [row["output"] for row in rows[:2000]]


def test_another_table_format_and_rows_that_are_not_there_are_refused(
    spirals_run: Any, mine: str, tmp_path: Path, command: Callable[..., Told]
) -> None:
    assert (
        "tables are written as .csv, .tsv, .jsonl, .parquet" in command("predict", spirals_run.folder, "out=x.xlsx")[2]
    )
    from packages.unisono.tests import tasks

    settings = {**SMALL, "train.steps": 1, "train.global_batch": 8, "run.dir": str(tmp_path), "run.name": "linear"}
    folder = face.train(f"{tasks.__file__}:LinearTask", settings).folder
    assert "rows=held_out: LinearTask has no such rows; use rows=training" in command("predict", folder)[2]
    assert command("predict", folder, "rows=training")[0] == 0
    assert list(rows_of(folder / "predictions.csv")[0]) == ["row", "output", "y"]


class Wide(TransformerTask):
    """Its outputs are a matrix per row."""


class Telling(TransformerTask):
    """Says what is worth writing of a row."""

    def predictions(self, outputs: Any, batch: Any) -> dict[str, Any]:
        return {"length": batch["lengths"], "likeliest": outputs[:, 0].argmax(-1)}


def test_a_task_says_what_is_written_where_its_outputs_do_not_fit_a_table(
    tmp_path: Path, command: Callable[..., Told]
) -> None:
    settings = {**SMALL, "train.steps": 1, "train.global_batch": 8, "run.dir": str(tmp_path)}
    wide = face.train(Wide, {**settings, "run.name": "wide"}).folder
    code, _, error = command("predict", wide)
    assert (code, "define predictions(outputs, batch)" in error) == (2, True)
    telling = face.train(Telling, {**settings, "run.name": "telling"}).folder
    assert command("predict", telling)[0] == 0
    rows = rows_of(telling / "predictions.csv")
    assert (len(rows), list(rows[0])) == (11, ["row", "length", "likeliest"])
