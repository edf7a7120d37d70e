"""The puzzles trained in JAX by the command line: two processes of two devices compute what one device computes."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed: pip install 'unisono[jax]'")

from packages.unisono.tests.engines.jax.test_processes import steps, unisono
from packages.unisono.tests.runs import saved_arrays

pytestmark = pytest.mark.slow
WORDS = (
    "train", "puzzles", "layout.engine=jax", "train.precision=fp64", "train.steps=10", "train.global_batch=8",
    "data.side=4", "data.clues=[6,8]", "data.puzzles=40", "data.held_out=8", "task.halt_steps=3",
    "task.halt_exploration=0.5", "model.width=16", "model.prefix=2", "model.embedding=16", "model.inner_multiple=8",
    "eval.every=10", "checkpoint.every=10", "layout.micro_batch=2", "layout.device=cpu", "run.dir=runs",
)  # fmt: skip
TWO_BY_TWO = ("layout.world_size=2", "layout.devices=2")


def train(folder: Path, name: str, *words: str) -> Path:
    done = unisono(folder, *WORDS, f"run.name={name}", *words)
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def assert_same(mine: Path, one: Path) -> None:
    """Weights, averages, carry, losses and norms to 1e-12; moments, which sum the rounding of all steps, to 1e-11.

    The largest differences after ten steps of two processes of two devices were 1.7e-12 in a second moment, and below
    8e-13 in all else.
    """
    a, b = saved_arrays(mine), saved_arrays(one)
    assert a.keys() == b.keys()
    for name in a:
        floor = 1e-11 if name.startswith("optimizer/") else 1e-12
        assert np.abs(np.float64(a[name]) - b[name]).max() <= floor * max(np.abs(b[name]).max(), 1e-300), name
    for kind in ("loss", "grad_norm"):
        mine_, ones = ([step[kind] for step in steps(run)] for run in (mine, one))
        np.testing.assert_allclose(mine_, ones, rtol=1e-12, atol=0)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = train(tmp_path_factory.mktemp("one"), "one")
    assert len({step["loss"] for step in steps(run)}) == 10 and min(step["grad_norm"] for step in steps(run)) > 1e-3
    arrays = saved_arrays(run)
    learnt = next(value for name, value in arrays.items() if name.endswith("learnt"))
    assert learnt.min() < learnt.max() or learnt.min() > 1  # rows have halted
    assert all(np.abs(value).max() > 0 for name, value in arrays.items() if name.endswith("puzzles.weight"))
    return run


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_of_two_devices_compute_what_one_device_computes(
    one: Path, tmp_path: Path, strategy: str
) -> None:
    assert_same(train(tmp_path, "many", *TWO_BY_TWO, f"layout.strategy={strategy}"), one)


def test_a_run_is_not_continued_on_the_other_engine(one: Path) -> None:
    words = [word for word in WORDS if not word.startswith("layout.engine")]
    done = unisono(one.parents[1], *words, "run.name=one", "train.steps=12")
    assert done.returncode != 0
    assert "layout.engine: 'jax' there, 'torch' here" in done.stderr


def test_a_run_of_several_kinds_solves_the_held_out_puzzles_of_each(tmp_path: Path) -> None:
    """Kinds of which neither the micro-batch nor that of the prediction divides the held-out puzzles."""
    part = "{{kind: embedded, side: {side}, clues: [{clues}], puzzles: 40, held_out: {held_out}}}"
    kinds = {"small": (4, "6,8", 5), "larger": (6, "20,24", 3)}
    parts = ", ".join(
        f"{name}: {part.format(side=side, clues=clues, held_out=held_out)}"
        for name, (side, clues, held_out) in kinds.items()
    )
    words = [word for word in WORDS if not word.startswith(("data.", "train.steps", "eval.every", "checkpoint."))]
    data = f"data={{kind: several, parts: {{{parts}}}}}"
    done = unisono(tmp_path, *words, data, "train.steps=3", "eval.every=3", "layout.devices=2", "run.name=both")
    assert done.returncode == 0, done.stderr
    assert all(f"{kind}/exact" in done.stdout + done.stderr for kind in kinds)
    done = unisono(tmp_path, "predict", "runs/both", "out=solved.csv")
    assert done.returncode == 0, done.stderr
    with (tmp_path / "solved.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert sorted(len(row["solution"]) for row in rows) == [16] * 5 + [36] * 3
    assert all(len(row["answer"]) == len(row["solution"]) and 0 <= float(row["cells"]) <= 1 for row in rows)
