"""Runs of the recipe by the command line: two processes compute what one computes, and a kill changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.engines.jax.test_processes import assert_same_runs, steps, unisono

pytestmark = pytest.mark.slow

SMALL = (
    "train", "birdsong", "train.steps=6", "train.global_batch=8", "train.precision=fp64", "run.dir=runs",
    "data.recordings=40", "data.held_out=6", "data.species=3", "data.rate=8000", "data.seconds=0.8",
    "model.sound={rate: 8000, duration: 0.5, window_ms: 32.0, hop_ms: 16.0, low_hz: 200.0}", "model.frames=32",
    "model.mels=16", "model.patch=[8,8]", "model.width=16", "model.depth=2", "model.heads=2", "model.layer_scale=0.5",
    "task.lejepa={views: 3, hidden: 24, width: 5, directions: 16}", "task.pixio={width: 16, depth: 2, heads: 2}",
    "observe.trackers=[]", "checkpoint.every=2", "eval.every=3",
)  # fmt: skip


def train(folder: Path, name: str, *words: str, code: int = 0) -> Path:
    done = unisono(folder, *SMALL, f"run.name={name}", *words)
    assert done.returncode == code, done.stderr
    return folder / "runs" / name


@pytest.mark.parametrize("objective", ["supervised", "lejepa", "pixio"])
def test_two_processes_compute_what_one_computes_and_a_kill_changes_nothing(tmp_path: Path, objective: str) -> None:
    """After a kill and resume: bit for bit on the same layout, to rounding on another."""
    task = f"task.objective={objective}"
    one = train(tmp_path, "one", task)
    losses = [step["loss"] for step in steps(one)]
    assert len(set(losses)) == 6
    two = ("layout.world_size=2", "layout.strategy=ddp")
    four = ("layout.world_size=2", "layout.devices=2", "layout.strategy=fsdp", "layout.micro_batch=1")
    assert_same_runs(train(tmp_path, "two", task, *two), one, 1e-12)
    assert_same_runs(train(tmp_path, "four", task, *four), one, 1e-12)
    for name, more, floor in (("same", (), 0.0), ("other", two, 1e-12)):
        cut = unisono(tmp_path, *SMALL, task, f"run.name={name}", "--fault", "rank=0,step=4,phase=forward,act=kill")
        assert cut.returncode == -9, cut.stderr
        assert 2 <= len(steps(tmp_path / "runs" / name)) < 6
        resumed = train(tmp_path, name, task, *more)
        assert [step["step"] for step in steps(resumed)] == [1, 2, 3, 4, 5, 6]
        assert_same_runs(resumed, one, floor)
