"""The learning-rate range test: what its curve shows, and that it leaves everything else alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from packages.unisono.tests import tasks
from unisono.config.schema.verbs import FindLr
from unisono.launch.find_lr import RangeTest, judge_curve

LINEAR = f"{tasks.__file__}:LinearTask"
SHORT = ("train.global_batch=16", "layout.threads=1", "layout.device=cpu", "optim=sgd", "steps=40", "min_lr=1e-4")

Command = Callable[..., tuple[int, str, str]]


def curve(steepest: float, noise: float = 0.0, steps: int = 200, *, diverged: bool = True) -> RangeTest:
    """A loss that falls by two around one rate, and rises ten times later."""
    asked = FindLr(min_lr=1e-6, max_lr=10.0, steps=steps)
    rates = np.geomspace(asked.min_lr, asked.max_lr, steps)
    place = np.log10(rates / steepest)
    losses = 2.5 - 2.0 / (1 + np.exp(-6 * place)) + noise * np.random.default_rng(0).normal(size=steps)
    if diverged:
        losses += np.exp(5 * (place - 1.5))
        end = int(np.argmax(losses > 10)) or steps
        rates, losses = rates[:end], losses[:end]
    return judge_curve(rates.tolist(), losses.tolist(), asked, diverged=diverged)


@pytest.mark.parametrize("steepest", [1e-4, 3e-3, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_suggestion_is_where_the_loss_falls_fastest(steepest: float, noise: float) -> None:
    found = curve(steepest, noise)
    assert found.suggestion is not None
    assert abs(math.log10(found.suggestion / steepest)) < (0.05 if noise == 0 else 0.3)
    assert "Smith 2017" in found.why and found.diverged


def test_noise_alone_a_fall_at_either_end_and_an_early_divergence_suggest_nothing() -> None:
    asked = FindLr(min_lr=1e-6, max_lr=10.0, steps=200)
    rates = np.geomspace(asked.min_lr, asked.max_lr, 200).tolist()
    for seed in range(20):
        flat = (2.3 + 0.1 * np.random.default_rng(seed).normal(size=200)).tolist()
        found = judge_curve(rates, flat, asked, diverged=False)
        assert found.suggestion is None and "little beside its noise" in found.why, seed
    assert "falls fastest at the largest rate; try max_lr=1000" in curve(20.0, diverged=False).why
    assert "falls fastest at the smallest rate; try min_lr=1e-09" in curve(5e-7).why
    early = judge_curve(rates[:4], [2.3, 2.4, 5.0, 99.0], asked, diverged=True)
    assert early.suggestion is None and "diverged after 4 steps" in early.why
    assert [*early.lines()]


def test_the_table_marks_the_suggestion_and_fits_sixty_columns() -> None:
    for found in (curve(1e-2, 0.05), curve(20.0, diverged=False), curve(1e-3)):
        lines = [*found.lines()]
        assert max(map(len, lines)) <= 60, lines
        assert any("suggested" in line for line in lines) == (found.suggestion is not None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("min_lr=1", "max_lr=0.1"), "min_lr=1 has to be smaller than max_lr=0.1"),
        (("steps=5",), "steps: input should be greater than or equal to 20, got 5"),
        (("launch.nodes=2", "launch.rendezvous=a:1", "launch.node_rank=0"), "without torchrun or srun"),
    ],
)
def test_what_cannot_be_tested_is_refused(words: tuple[str, ...], told: str, command: Command) -> None:
    code, _, error = command("find-lr", LINEAR, *words)
    assert code == 2 and told in error


def test_under_another_launcher_it_is_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    code, _, error = command("find-lr", LINEAR, *SHORT)
    assert code == 2 and "without torchrun or srun" in error


def test_one_process_and_two_find_the_same_and_leave_runs_and_the_disk_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    run = ("layout.world_size=1", "run.name=kept", "train.steps=2", "checkpoint.every=1", "observe.progress=false")
    assert command("train", LINEAR, *SHORT[:4], *run)[0] == 0
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.rglob("*") if path.is_file()}
    found = []
    for layout in (("layout.world_size=1",), ("layout.world_size=2", "layout.strategy=ddp")):
        code, told, error = command("find-lr", LINEAR, *SHORT, *run[1:], *layout)
        assert code == 0, error
        assert "suggestion: optim.lr=" in told and "the loss diverged at lr" in told, told
        found.append(told)
    after = {path: hashlib.sha256(path.read_bytes()).digest() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before
    assert not [*(tmp_path / "tmp").glob("unisono-*")]
    assert found[0] == found[1], "rounding is in no digit that is shown"


def test_an_error_of_the_task_ends_it_as_a_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    lines = (
        "from packages.unisono.tests.tasks import LinearTask",
        "class Broken(LinearTask):",
        "    def loss(self, outputs, batch, context):",
        "        return super().loss(outputs * float('nan'), batch, context)",
    )
    (tmp_path / "broken.py").write_text("\n".join(lines))
    code, _, error = command("find-lr", "broken.py", *SHORT, "layout.world_size=1")
    assert code == 3 and "not finite" in error
    assert not (tmp_path / "runs").exists() and not [*(tmp_path / "tmp").glob("unisono-*")]
