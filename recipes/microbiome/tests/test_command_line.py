"""The recipe as a user runs it, and what it says before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.cli import main

SMALL = ("data.subjects=6", "data.visits=3", "data.taxa=24", "data.bases=16", "data.reads=300", "data.rarefy=100")


@pytest.mark.slow
def test_made_up_communities_are_trained_on_by_two_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "unisono", "train", "microbiome", *SMALL, f"data.cache={tmp_path / 'cache'}",
            "task=pretrain", "layout.world_size=2", "train.steps=2", "train.global_batch=6", f"run.dir={tmp_path}",
            "run.name=run",
            "checkpoint.every=null", "eval.every=null",
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 × cpu, ddp" in done.stdout
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert {"loss/distance", "loss/nucleotides", "distance/error", "nucleotides/accuracy"} <= events[0].keys()
    assert "distance/correlation" in events[-1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["task=target"], "task.weights.target needs a column of the metadata: set data.target"),
        (["task=pretrain", "model.encoder=taxon"], "model.encoder=transformer"),
        (["model.features=30", "model.heads=4"], "model.features=30 is not divisible by model.heads=4"),
        (["task.weights.distance=0"], "task.weights are all 0"),
        (["task.weights.distanc=1"], "did you mean 'task.weights.distance'"),
        (["data.covariates=[kind]"], "data.covariates is for the target: set data.target"),
        (["data.target_by=kind"], "data.target_by is for the target: set data.target"),
        (["model.kernel=4"], "model.kernel=4 is even, but must be odd; use 5"),
        (["data.metric=faith_pd"], "data.metric=faith_pd is of single samples"),
        (["model.freeze=true"], "set model.from_run to the run that trained them"),
        (["task.target.quantiles=[0.9,0.1]"], "distinct and ascending"),
        (["data=study"], "data.table"),
    ],
)
def test_what_does_not_fit_is_said_before_the_start(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [] if "data=study" in words else [*SMALL, f"data.cache={tmp_path}"]
    assert main.main(["check", "microbiome", *small, *words, f"run.dir={tmp_path}", "layout.world_size=1"]) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("task", ["distances", "pretrain", "target", "finetune"])
@pytest.mark.parametrize("model", ["tiny", "small"])
def test_every_ready_choice_can_run(
    task: str, model: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path_factory.getbasetemp() / "choices"
    words = [*SMALL, f"data.cache={cache}", f"task={task}", f"model={model}", "data.target=kind", f"run.dir={cache}"]
    assert main.main(["check", "microbiome", *words, "layout.world_size=1"]) == 0
    assert "microbiome can run" in capsys.readouterr().out
