"""A task without `counts`: every term counts the rows of the batch, which gives what such a `counts` would give.

A loss or a batch for which that would be wrong is refused, with what to do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests import tasks
from packages.unisono.tests.launch import jobs
from unisono import load_model, train
from unisono.runtime.errors import ConfigError
from unisono.task import Context, Loss, Task

OVERRIDES = {"train.steps": 3, "train.global_batch": 16, "layout.micro_batch": 4, "observe.progress": False}


class Counted(tasks.LinearTask):
    """Two terms and a short last batch, with `counts`."""

    def counts(self, batch: Any) -> dict[str, float]:
        return {"square": len(batch["x"]), "size": len(batch["x"])}

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum(), "size": outputs.square().sum()}, {"size": 0.1})


class Uncounted(Counted):
    counts = Task.counts  # type: ignore[assignment]


class Mean(Uncounted):
    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().mean()})


class MeanOfZeros(Uncounted):
    """All rows have the same loss in the first step, which no constant is."""

    def build(self) -> torch.nn.Module:
        model = super().build()
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        return model

    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - 1).square().mean()})


class Penalty(Uncounted):
    def loss(self, outputs: Any, batch: Any, context: Context) -> Loss:
        return Loss({"square": (outputs - batch["y"]).square().sum(), "penalty": torch.full((), 3.0)})


class Ragged(Uncounted):
    def collate(self, samples: Any) -> Any:
        batch = super().collate(samples)
        return {**batch, "words": np.concatenate([row["x"] for row in samples])}


class Flat(Uncounted):
    def collate(self, samples: Any) -> Any:
        return {name: value.ravel().repeat(1 if name == "x" else 3) for name, value in super().collate(samples).items()}


class Packed(Uncounted):
    def length(self, sample: Any) -> int:
        return 1

    def cut(self, sample: Any, first: int, last: int) -> Any:
        return sample

    def pack(self, samples: Any) -> Any:
        return samples[0]


def test_training_and_evaluation_are_those_of_a_task_that_counts_rows(tmp_path: Path) -> None:
    weights = []
    for kind in (Counted, Uncounted):
        options = {**OVERRIDES, "train.steps": None, "train.epochs": 1, "run.dir": str(tmp_path / kind.__name__)}
        weights.append(list(load_model(train(kind, options).folder, task=kind).parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@pytest.mark.parametrize(
    "kind, term",
    [(Mean, "'square' is .* a mean"), (MeanOfZeros, "'square' is .* a mean"), (Penalty, "'penalty' is .* a constant")],
)
def test_a_mean_or_a_constant_is_refused_before_the_first_step_and_says_what_a_sum_is(
    kind: type[Task], term: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"the term {term}\. Return the sum.*reduction=\"sum\""):
        train(kind, {**OVERRIDES, "run.dir": str(tmp_path)})


@pytest.mark.parametrize(
    "kind, told",
    [
        (Ragged, r"rows of the batch cannot be counted \(x has 4, y has 4, words has 12\); define counts\(batch\)"),
        (Flat, r"collate made arrays of length 12 from 4 samples, so their first axis is not the row"),
    ],
)
def test_a_batch_whose_rows_cannot_be_counted_is_refused(kind: type[Task], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        train(kind, {**OVERRIDES, "run.dir": str(tmp_path)})


def test_packed_rows_are_not_counted_by_default(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several samples in a row, so Packed has to say what its loss counts"):
        train(Packed, {**OVERRIDES, "data.packing.length": 3, "run.dir": str(tmp_path)})


def test_a_proof_holds_without_counts_and_fails_for_a_mean(tmp_path: Path) -> None:
    text = jobs.SMALL.replace('    def counts(self, batch):\n        return {"square": float(len(batch["x"]))}\n', "")
    assert "counts" not in text
    (tmp_path / "small.py").write_text(text)
    (tmp_path / "mean.py").write_text(text.replace('batch["y"]).square().sum()', 'batch["y"]).square().mean()'))
    words = "layouts=[ddp:2]", "precisions=[fp64]"
    proof, mean = (jobs.unisono("prove", f"{name}.py:Small", *words, cwd=tmp_path) for name in ("small", "mean"))
    assert "PASS; certificate" in proof.stdout + proof.stderr, proof.stdout
    assert "likely: A mean of means" in mean.stdout + mean.stderr, mean.stdout
