"""Every verb that computes outputs of a trained run says of the same rows what `unisono evaluate` says."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import unisono
from recipes.birdsong.tests import small
from recipes.language.tests.corpora import GROUPED, sentences, write_jsonl
from recipes.microbiome.tests import made as studies
from recipes.speech.tests import made as speech
from unisono.cli import main
from unisono.config.code import recipes

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A small run of a recipe.

    Attributes:
        settings: of it, given a folder for its data.
        of_rows: metrics that follow from the table alone; None where the recipe's own table has no targets.
        printed: names of the evaluation, by those that the verb prints; None where it prints the same ones, and all.
        precisions: in which it is trained.
    """

    settings: Callable[[Path], Mapping[str, Any]]
    of_rows: Callable[[Rows], dict[str, float]] | None
    printed: Mapping[str, str] | None = None
    precisions: tuple[str, ...] = ("fp32",)


def rows_of(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_targets(rows: Rows, **columns: str) -> dict[str, float]:
    targets = np.array([float(row["targets"]) for row in rows])
    return {
        name: float((targets * [float(row[column]) for row in rows]).sum() / targets.sum())
        for name, column in columns.items()
    }


def mean(rows: Rows, **columns: str) -> dict[str, float]:
    return {name: float(np.mean([float(row[column]) for row in rows])) for name, column in columns.items()}


def language(folder: Path) -> dict[str, Any]:
    write_jsonl(folder / "corpus" / "a.jsonl", sentences(40))
    return {
        "model.settings": {**GROUPED, "tie_word_embeddings": True}, "data": "corpus", "data.vocab_size": 300,
        "data.path": str(folder / "corpus"), "data.cache": str(folder / "cache"), "data.held_out": 0.3,
        "task.sequence": 16, "task.pad_to_multiple": 4, "train.steps": 12, "train.global_batch": 8, "optim.lr": 1e-2,
    }  # fmt: skip


def speech_settings(_: Path) -> dict[str, Any]:
    pairs = (word.split("=", 1) for word in speech.OVERRIDES)
    return {"train.steps": 2, **{name: yaml.safe_load(value) for name, value in pairs}}


def puzzles(_: Path) -> dict[str, Any]:
    return {
        "data.side": 4, "data.clues": [6, 8], "data.puzzles": 16, "data.held_out": 4, "train.steps": 2,
        "train.global_batch": 8, "task.halt_steps": 2, "model.width": 16, "model.heads": 2, "model.embedding": 16,
        "model.prefix": 2, "model.inner_multiple": 8,
    }  # fmt: skip


def birdsong(_: Path) -> dict[str, Any]:
    groups = {"data": small.DATA, "model": small.ENCODER, "task": {**small.TASK, "objective": "supervised"}}
    return {
        "train.steps": 2, "train.global_batch": 8, "layout.micro_batch": 8,
        **{f"{group}.{name}": value for group, values in groups.items() for name, value in values.items()
           if name != "kind"},
    }  # fmt: skip


def microbiome(folder: Path) -> dict[str, Any]:
    data = studies.data(folder / "cache", rarefy=None).model_dump(exclude_unset=True, mode="json")
    return {
        **{f"data.{key}": value for key, value in data.items() if key != "kind"},
        **{f"model.{key}": value for key, value in studies.TINY.items()},
        "task.weights": {"target": 1.0}, "train.steps": 3, "train.global_batch": 6,
    }  # fmt: skip


CASES = {
    "language": Case(
        language,
        lambda rows: by_targets(rows, accuracy="accuracy", loss="nats_per_target"),
        precisions=("fp32", "bf16", "fp64"),
    ),
    "puzzles": Case(puzzles, lambda rows: mean(rows, exact="exact", cells="cells")),
    "speech": Case(speech_settings, lambda rows: by_targets(rows, accuracy="accuracy")),
    "birdsong": Case(birdsong, lambda rows: mean(rows, classes_accuracy="classes_right"), printed={}),
    "microbiome": Case(
        microbiome,
        None,
        printed={
            "distance/mae": "distance/error",
            "target/mae": "target/error",
            **{name: name for name in ("distance/correlation", "distance/sd_ratio", "target/sd_ratio")},
        },
    ),
}


def told(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, float]:
    """The named numbers that a command prints."""
    capsys.readouterr()
    assert main.main([str(argument) for argument in arguments]) == 0
    lines = [line.rpartition(": ") for line in capsys.readouterr().out.splitlines()]
    return {
        name: float(value) for name, found, value in lines if found and value.lstrip("-").replace(".", "").isdigit()
    }


def test_every_recipe_has_a_case() -> None:
    assert CASES.keys() == set(recipes.recipe_names())


@pytest.mark.parametrize(
    ("name", "precision"), [(name, precision) for name, case in CASES.items() for precision in case.precisions]
)
def test_predict_says_what_evaluate_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, precision: str
) -> None:
    case = CASES[name]
    run = unisono.train(
        name,
        {
            **case.settings(tmp_path), "train.precision": precision, "eval.every": None, "checkpoint.every": None,
            "observe.progress": False, "observe.trackers": [], "layout.world_size": 1, "layout.threads": 1,
            "layout.device": "cpu", "run.dir": str(tmp_path / "runs"), "run.name": "run",
        },
    ).folder  # fmt: skip
    evaluated = told(capsys, "evaluate", run)
    predicted = told(capsys, "predict", run, f"out={tmp_path / 'p.jsonl'}")
    rest = {name: value for name, value in evaluated.items() if name != "step" and not name.startswith("ema/")}
    if case.printed is None:
        for found in (predicted, rest):  # e to the loss, by which its rounding is multiplied
            if "perplexity" in found:
                found["perplexity"] = math.log(found["perplexity"])
        assert predicted == pytest.approx(rest, abs=2e-6)
    for mine, theirs in (case.printed or {}).items():
        assert predicted[mine] == pytest.approx(evaluated[theirs], abs=6e-5), mine
    found = case.of_rows(rows_of(tmp_path / "p.jsonl")) if case.of_rows else {}
    assert found == pytest.approx({name: evaluated[name] for name in found}, abs=2e-6)
    averaged = {name.removeprefix("ema/"): value for name, value in evaluated.items() if name.startswith("ema/")}
    if averaged:
        again = told(capsys, "predict", run, f"out={tmp_path / 'e.jsonl'}", "ema=true")
        assert again == pytest.approx(averaged, abs=2e-6) != predicted
    assert len({*rest.values()}) > 1, "of a model that predicts nothing, all would be equal"
