"""How the command's own process ends: with its exit code, whatever threads are in the middle of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TASK = """
import atexit, threading, time
import torch
from packages.unisono.tests.tasks import LinearTask

atexit.register(print, "the user's own end")


def busy():
    parameter = torch.ones(200, 200, requires_grad=True)
    torch.autograd.graph.register_multi_grad_hook([parameter], lambda gradients: time.sleep(0.001))
    while True:  # a callback of C++ into Python: where the interpreter stops such a thread, it unwinds C++
        (parameter @ parameter).sum().backward()


class Busy(LinearTask):
    def build(self):
        for _ in range(4):
            threading.Thread(target=busy, daemon=True).start()
        return super().build()

    def loss(self, outputs, batch, context):
        if self.config.rows == 13:
            raise RuntimeError("a mistake of the user")
        return super().loss(outputs, batch, context)
"""
WORDS = ["train.steps=2", "train.global_batch=4", "observe.progress=false", "layout.threads=1", "layout.world_size=1"]


def command(folder: Path, *words: str) -> dict[str, Any]:
    """What `subprocess` needs for a command in this folder that can import the tasks of tests."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = (sys.executable, "-m", "unisono", *words)
    return {"args": words, "cwd": folder, "env": {**os.environ, "PYTHONPATH": path}, **pipes}


@pytest.mark.parametrize(
    ("rows", "lr", "code", "told"), [(8, 0.1, 0, ""), (8, 1e38, 3, "is not finite"), (13, 0.1, 1, "a mistake of the")]
)
def test_threads_in_the_middle_of_torch_do_not_change_the_exit_code(
    tmp_path: Path, rows: int, lr: float, code: int, told: str
) -> None:
    (tmp_path / "busy.py").write_text(TASK)
    words = [*WORDS, f"task.rows={rows}", "train.steps=4", f"optim.lr={lr}"]
    ended = subprocess.run(**command(tmp_path, "train", "busy.py:Busy", *words), timeout=120)
    assert (ended.returncode, told in ended.stderr) == (code, True), ended.stderr
    assert ended.stdout.endswith("the user's own end\n")


@pytest.mark.parametrize(
    "words", [["config", "busy.py:LinearTask"], ["train", "busy.py:LinearTask", *WORDS, "train.steps=9"]]
)
def test_a_reader_that_goes_away_ends_nothing(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "busy.py").write_text(
        "from packages.unisono.tests.tasks import LinearTask as Base\n\nclass LinearTask(Base): ...\n"
    )
    more = ["observe.progress=true"] if words[0] == "train" else []
    with subprocess.Popen(**command(tmp_path, *words, *more)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()  # as `head -1` does
        errors = process.stderr.read()
        assert (process.wait(timeout=120), errors) == (0, "")
    if words[0] == "train":
        (events,) = tmp_path.glob("runs/*/events.jsonl")
        assert '"step": 9' in events.read_text()
