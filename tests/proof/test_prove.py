"""`unisono prove` from the command line, on real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.launch import jobs
from unisono.proof.prove import split_words
from unisono.runtime.errors import ConfigError

TASK = '''
import numpy as np, torch, unisono

class Good(unisono.Task):
    def data(self):
        rng = np.random.default_rng(0)
        return [{"x": x.astype(np.float32)} for x in rng.normal(size=(40, 3))]

    def held_out(self):
        return self.data()[:7]

    def build(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def counts(self, batch):
        return {"square": float((batch["x"][:, 0] > 0).sum())}

    def outputs(self, model, batch, context):
        return model(batch["x"])[:, 0]

    def loss(self, outputs, batch, context):
        wanted = batch["x"][:, 0] > 0
        return unisono.Loss({"square": ((outputs - batch["x"].sum(1)).square() * wanted).sum()})

class MeanOfMeans(Good):
    """Divides in the loss what counts() should divide."""

    def counts(self, batch):
        return {"square": 1.0}

    def loss(self, outputs, batch, context):
        wanted = batch["x"][:, 0] > 0
        squares = (outputs - batch["x"].sum(1)).square() * wanted
        return unisono.Loss({"square": squares.sum() / max(1, int(wanted.sum()))})
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prove")
    (path / "task.py").write_text(TASK)
    return path


def prove(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return jobs.unisono("prove", *words, cwd=folder)


def test_words_of_the_proof_are_told_from_those_of_the_recipe() -> None:
    own, rest = split_words(["layouts=[ddp:2,hsdp:2x2]", "optim.lr=1", "steps=4", "train.steps=9", "vary=[]"])
    assert own == {"layouts": ["ddp:2", "hsdp:2x2"], "steps": 4, "vary": []}
    assert rest == ["optim.lr=1", "train.steps=9"]


def test_a_word_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'layouts=\[ddp:2' cannot be read"):
        split_words(["layouts=[ddp:2"])


@pytest.mark.slow
def test_a_right_task_passes_and_leaves_a_certificate(folder: Path) -> None:
    done = prove(folder, "task.py:Good", "run.name=good", "layouts=[ddp:2,fsdp:2]")
    assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads((folder / "runs" / "good" / "certificate.json").read_text())
    assert held["verdict"] == "PASS"
    compared = {c["quantity"] for case in held["cases"] for c in case["compared"] if c["mark"] == "PASS"}
    assert {"raw gradients", "parameters", "evaluation"} <= compared
    assert "PASS; certificate:" in done.stderr
    assert jobs.unisono("train", "task.py:Good", "run.name=good", "train.steps=2", cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_mean_of_means_is_found_and_named(folder: Path) -> None:
    done = prove(folder, "task.py:MeanOfMeans", "layouts=[ddp:2]", "vary=[accumulate]", "precisions=[fp64]")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "single m1 fp64: FAIL loss" in done.stdout
    assert "likely: A mean of means" in done.stdout
    assert "page: docs/diagnoses.md#a-mean-of-means" in done.stdout


@pytest.mark.slow
def test_the_certificate_can_be_printed(folder: Path) -> None:
    done = prove(folder, "task.py:Good", "layouts=[ddp:2]", "vary=[]", "precisions=[fp64]", "--json")
    assert json.loads(done.stdout)["verdict"] == "PASS"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layouts=[tp:2]"], "layouts: 'tp:2' is not a layout"),
        (["layouts=[ddp:3]"], "divide global_batch=8"),
        (["vary=[speed]"], "vary: "),
        (["optim.lrr=1"], "unknown key 'optim.lrr'"),
    ],
)
def test_a_mistake_is_told_before_a_process_starts(folder: Path, words: list[str], message: str) -> None:
    done = prove(folder, "task.py:Good", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not any(line.startswith("1 process") for line in done.stderr.splitlines())
