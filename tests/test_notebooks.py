"""Runs from a notebook: the two of `examples/notebooks`, and what an interrupt, a new kernel and an error come to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packages.unisono.tests.kernels import execute, htmls, pictures, texts

pytestmark = pytest.mark.slow

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
TASK = """
import os, signal, threading, time
from pathlib import Path
import torch, unisono

class Line(unisono.Task):
    def data(self): return [{"x": float(n % 7)} for n in range(64)]
    def build(self): return torch.nn.Linear(1, 1)
    def outputs(self, model, batch, context): return model(batch["x"][:, None].float())[:, 0]
    def loss(self, outputs, batch, context): return unisono.Loss({"square": ((outputs - batch["x"]) ** 2).sum()})

def interrupt(run):  # as the button of a notebook does, once the run has made ten steps
    events = Path("runs", run, "events.jsonl")
    def wait():
        while not (events.exists() and events.read_text().count('"loss"') > 10):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=wait, daemon=True).start()
"""
LONG = '{"train.steps": 100000, "run.name": "long", "layout.device": "cpu", "layout.world_size": WORLD}'


def test_a_classifier_of_images_learns_below_its_cell_with_pictures(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    cells = execute(NOTEBOOKS / "images.ipynb", tmp_path)
    by_start = {cell.source.partition("\n")[0]: cell for cell in cells}

    trained = by_start["result = unisono.train("]
    assert "Shapes: 6.9k parameters, 1 × " in texts(trained)
    accuracy = float(re.findall(r"^ +300 +\S+ +(\S+)$", texts(trained), re.MULTILINE)[-1])
    assert accuracy > 0.9
    assert len([one for one in trained.outputs if "data" in one]) == 1, "one bar, updated in place"
    assert '<progress value="300" max="300"' in htmls(trained)
    assert "<th>accuracy</th>" in htmls(trained)

    table = next(cell for start, cell in by_start.items() if start.startswith("result.history"))
    assert re.search(r"^300 .* 0\.9\d+", texts(table), re.MULTILINE)
    assert f"{accuracy:.4f}".rstrip("0") in texts(table)
    assert "<table" in htmls(table)

    drawn = {start: pictures(cell) for start, cell in by_start.items() if pictures(cell)}
    assert list(drawn) == ["rng = np.random.default_rng(0)", "result.plot()", "rows = Shapes().rows(seed=3, count=10)"]
    assert all(len(shown) == 1 for shown in drawn.values()), "a figure is shown once"
    curves = drawn["result.plot()"][0]
    colours = {tuple(pixel) for pixel in (curves[..., :3].reshape(-1, 3) * 255).round().astype(int).tolist()}
    assert {(31, 119, 180), (255, 127, 14)} <= colours, "the curves of training and of the held-out rows"
    assert f"accuracy: {accuracy:.4f}" in texts(by_start["!unisono evaluate runs/shapes"]), "a terminal finds the class"


def test_several_processes_compute_below_a_cell_what_one_does(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    cells = execute(NOTEBOOKS / "processes.ipynb", tmp_path)
    said = {cell.source.partition(" ")[0]: texts(cell) for cell in cells}
    assert "single" in said["one"]
    assert "ddp" in said["two"]
    assert "fsdp" in said["sharded"]
    evaluations = {re.findall(r"^ +120 +(\S+)", said[name], re.MULTILINE)[0] for name in ("one", "two", "sharded")}
    assert len(evaluations) == 1
    assert said["two"].count("120/120") == 1, "the processes print no bar beside that of the notebook"
    assert "\x1b" not in said["two"]
    assert float(re.findall(r"differ by at most (\S+)", said["difference"])[0]) < 1e-5
    assert said["proof"].splitlines()[-1] == "True"
    assert "step 40, then 120" in said["stopped"]
    assert said["stopped"].rstrip().endswith("True")
    assert "Remembering uses table (a ndarray), which only its notebook has" in said["table"]
    assert len(pictures(cells[4])) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_an_interrupted_kernel_saves_and_another_resumes(world: int, tmp_path: Path) -> None:
    train = f"interrupt('long')\nresult = unisono.train(Line, {LONG.replace('WORLD', str(world))})"
    first = execute(
        [TASK, train, "print(result.step, result.stopped, len(result.history), result.model.weight)"], tmp_path
    )
    assert "interrupted: the run saves and stops after this step" in texts(first[1])
    assert 'unisono.resume("runs/long")' in texts(first[1])
    step = int(re.findall(r"stopped after step (\d+) of 100000: as requested", texts(first[1]))[0])
    assert texts(first[2]).startswith(f"{step} as requested {step} Parameter containing")

    more = f"result = unisono.resume('runs/long', {{'run.stop_after': {step + 5}}})"
    again = execute(["import unisono", more, "print(result.step, len(result.history))"], tmp_path)
    assert f"resuming after step {step}" in texts(again[1])
    assert "environment:" not in texts(again[1]), "nothing has changed between the kernels"
    assert texts(again[2]).startswith(f"{step + 5} {step + 5}")


def test_an_error_is_its_text_without_a_traceback(tmp_path: Path) -> None:
    cells = execute([TASK, "unisono.train(Line, {'optim.lrr': 3})"], tmp_path, fails=True)
    assert texts(cells[1]) == "ConfigError: unknown key 'optim.lrr' (override 'optim.lrr=3'), did you mean 'optim.lr'?"
    assert not list(tmp_path.glob("runs/line*"))


def test_worker_processes_have_a_class_of_a_cell(tmp_path: Path) -> None:
    how = '{"train.steps": 5, "data.worker_kind": "processes", "layout.world_size": 1, "layout.device": "cpu"}'
    cells = execute([TASK, f"unisono.train(Line, {how}).step"], tmp_path)
    assert texts(cells[1]).splitlines()[-1] == "5"
