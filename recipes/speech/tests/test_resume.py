"""A speech run that is killed goes on as if nothing had happened, references drawn anew in each epoch included."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.engines.jax.test_processes import assert_same_runs, steps, unisono
from recipes.speech.tests import made

pytestmark = pytest.mark.slow

TRAIN = (
    "train", "speech", *made.OVERRIDES, "run.dir=runs", "train.steps=6", "train.precision=fp64", "checkpoint.every=2",
    "eval.every=3", "task.shown=0", "layout.device=cpu", "layout.micro_batch=2", "adapter=higgs",
)  # fmt: skip


def train(folder: Path, name: str, *words: str) -> Path:
    done = unisono(folder, *TRAIN, f"run.name={name}", *words, UNISONO_CACHE=str(folder / "cache"))
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def test_a_kill_changes_nothing_after_the_resume(tmp_path: Path) -> None:
    """Bit for bit on the same layout, dropout of the adapters included; to rounding on another."""
    whole = train(tmp_path, "whole")
    assert len({step["loss"] for step in steps(whole)}) == 6
    for name, more, floor in (("same", (), 0.0), ("other", ("layout.world_size=2", "layout.strategy=ddp"), 1e-12)):
        cut = unisono(
            tmp_path, *TRAIN, f"run.name={name}", "--fault", "rank=0,step=4,phase=forward,act=kill",
            UNISONO_CACHE=str(tmp_path / "cache"),
        )  # fmt: skip
        assert cut.returncode == -9, cut.stderr
        assert 2 <= len(steps(tmp_path / "runs" / name)) < 6
        resumed = train(tmp_path, name, *more)
        assert [step["step"] for step in steps(resumed)] == [1, 2, 3, 4, 5, 6]
        assert_same_runs(resumed, whole, floor)
