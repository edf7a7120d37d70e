"""A run over recordings that is killed and resumed on another layout uses the same tensors, and its audit passes."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from packages.unisono.tests.engines.jax.test_processes import assert_same_runs, steps, unisono

from .written import BAD, write

pytest.importorskip("soundfile")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]
STEPS = 6
TASK = '''
import torch

import unisono
import importlib
Listener = importlib.import_module("packages.unisono-audio.tests.sources.written").Listener


class Trained(Listener):
    """The mean of a recording's features, by least squares."""

    class Config(unisono.Settings):
        path: str

    def __init__(self, config, **more):
        super().__init__(config.path, config=config, **more)

    def build(self):
        return torch.nn.Linear(20, 1)

    def outputs(self, model, batch, context):
        return model(batch["features"].mean(1))

    def loss(self, outputs, batch, context):
        return unisono.Loss({"row": (outputs - batch["features"].mean((1, 2))[:, None]).square().sum()})
'''


def contents(run: Path) -> dict[int, int]:
    """The digest of what the samples of each step contained, over all ranks; of repeated steps the last one counts."""
    starts: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for path in (run / "ledger").glob("*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if "start" in line:
                steps_of_start = starts[line["first"], line["start"]]
            elif "content" in line:
                steps_of_start[line["step"]] += int(line["content"], 16)
    return {step: value % 2**64 for key in sorted(starts) for step, value in starts[key].items()}


def test_a_kill_changes_no_tensor_on_any_layout(tmp_path: Path) -> None:
    """By threads on one process, by worker processes on two, killed between them."""
    write(tmp_path / "clips", "arrow stream")
    (tmp_path / "trained.py").write_text(TASK)
    words = (
        "train", "trained.py:Trained", f"task.path={tmp_path / 'clips'}", "data.on_error=mask", "run.dir=runs",
        f"train.steps={STEPS}", "train.global_batch=8", "train.precision=fp64", "checkpoint.every=2",
        "layout.device=cpu", "observe.trackers=[]",
    )  # fmt: skip
    threads = ("layout.world_size=1", "data.workers=2")
    processes = ("layout.world_size=2", "data.workers=2", "data.worker_kind=processes")

    def run(name: str, *more: str, code: int = 0) -> Path:
        done = unisono(tmp_path, *words, f"run.name={name}", *more, PYTHONPATH=str(ROOT))
        assert done.returncode == code, done.stderr
        return tmp_path / "runs" / name

    whole = run("whole", *threads)
    losses = [step["loss"] for step in steps(whole)]
    assert len(set(losses)) == STEPS
    used = contents(whole)
    assert len(used) == STEPS == len(set(used.values()))
    run("killed", *processes, "--fault", "rank=1,step=5,phase=forward,act=kill", code=9)
    assert 2 <= len(steps(tmp_path / "runs" / "killed")) < STEPS
    killed = run("killed", *threads)
    assert contents(killed) == used
    assert_same_runs(killed, whole, 1e-12)
    for name in ("whole", "killed"):
        audited = unisono(
            tmp_path, "data", "audit", f"runs/{name}", "--task", "trained.py:Trained", PYTHONPATH=str(ROOT)
        )
        assert audited.returncode == 0, audited.stdout + audited.stderr
        assert all(f"row {row}" in audited.stdout for row in BAD), audited.stdout
