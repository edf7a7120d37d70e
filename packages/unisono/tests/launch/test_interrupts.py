"""Ctrl-C in a terminal: the run saves, stops and says how to resume, or ends at once where there is nothing to save."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests.screen import show
from unisono.checkpoint.core import resume_point
from unisono.launch import interrupts
from unisono.runtime.errors import Interrupted

TASK = """
import time
import unisono
from packages.unisono.tests.tasks import LinearTask


class Slow(LinearTask):
    def loss(self, outputs, batch, context):
        print("computing", flush=True)
        time.sleep({wait})
        return super().loss(outputs, batch, context)
"""
WORDS = ["train.steps=500", "train.global_batch=4", "observe.log_every=1", "observe.progress=plain", "run.name=a"]
CTRL_C = "\x03"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, [Path(__file__).parents[4], *sys.path])))


def train(folder: Path, wait: float, processes: int, typed: list[tuple[str, str]], *more: str) -> tuple[int, str]:
    (folder / "slow.py").write_text(TASK.format(wait=wait))
    words = [*WORDS, f"layout.world_size={processes}", "layout.device=cpu", *more]
    shown = show([sys.executable, "-m", "unisono", "train", "slow.py:Slow", *words], folder, 100, typed=typed)
    return shown.code, shown.screen.text


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_without_a_checkpoint_saves_stops_and_says_how_to_resume(tmp_path: Path, processes: int) -> None:
    code, said = train(tmp_path, 0.05, processes, [("step   3/500", CTRL_C)])
    assert code == 130, said
    assert "the run saves and stops after this step" in said
    saved = resume_point.newest_readable(tmp_path / "runs/a/checkpoints").checkpoint
    assert saved is not None and saved.step >= 3
    assert f"stopped after step {saved.step} of 500" in said and "unisono train slow.py:Slow" in said
    assert "unisono: interrupted, and saved" in said and "Traceback" not in said
    code, said = train(tmp_path, 0.0, processes, [], f"run.stop_after={saved.step + 2}")
    assert (code, "Traceback" in said) == (0, False)
    assert f"step {saved.step + 1:3}/500" in said, "it goes on where it stopped"


def test_before_the_first_step_nothing_is_saved_and_that_is_said(tmp_path: Path) -> None:
    code, said = train(tmp_path, 30.0, 1, [("computing", CTRL_C)])
    assert code == 130
    assert "interrupted. There is no checkpoint yet. Start over with:" in said


def test_a_second_one_ends_the_run_at_once(tmp_path: Path) -> None:
    typed = [("step   2/500", CTRL_C), ("interrupt again to end it at once", CTRL_C)]
    code, said = train(tmp_path, 1.0, 1, typed)
    assert code == 130
    assert "interrupted. There is no checkpoint yet." in said


def test_steps_that_a_crash_has_left_are_not_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would look at a request to stop yet: it was taken for that of an older start, and the interrupt lost."""
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    log = tmp_path / "events.jsonl"
    step = '{{"step": {}, "loss": 1.0}}\n'
    log.write_text("".join(step.format(number) for number in range(1, 6)))
    run: Any = SimpleNamespace(directory=tmp_path, resume=SimpleNamespace(step=2))
    with pytest.raises(KeyboardInterrupt), interrupts.stop_on_interrupt(run):
        signal.raise_signal(signal.SIGINT)
    assert not (tmp_path / "stop").exists()
    with pytest.raises(Interrupted), interrupts.stop_on_interrupt(run):
        log.write_text("".join(step.format(number) for number in range(1, 4)))  # left out, and one step made
        signal.raise_signal(signal.SIGINT)
    assert (tmp_path / "stop").exists()
