"""An exported ONNX model computes what torch does, on rows of the run, in any number; another one is not written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono
from packages.unisono.tests.tasks import LinearTask
from unisono.cli import main
from unisono.config.schema.verbs import Export
from unisono.launch.trained import onnx_export
from unisono.launch.trained.onnx_export import MODEL_FILE, export_onnx
from unisono.launch.trained.run import Run
from unisono.runtime.errors import DataError, RunError
from unisono.task import Context
from unisono.task_config import load_config

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
FILE = Path(__file__).parents[2] / "tasks.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        "train.steps": 2, "layout.world_size": 1, "layout.threads": 1, "run.dir": str(tmp_path_factory.mktemp("onnx")),
        "run.name": "r", "observe.progress": False, "launch.monitor": False,
    }  # fmt: skip
    return Path(unisono.train(LinearTask(), changes).folder)


@pytest.mark.slow
def test_a_task_of_one_s_own_is_exported_without_its_targets(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["export", str(run), "to=onnx", "--task", f"{FILE}:LinearTask"]) == 0
    told = capsys.readouterr().out
    out = run / "exports" / "step-00000002-onnx"
    assert f"{out}: ONNX, step 2" in told and "equal to torch on 9 real rows" in told
    session = onnxruntime.InferenceSession(out / MODEL_FILE)
    assert [one.name for one in session.get_inputs()] == ["x"]
    assert [one.name for one in session.get_outputs()] == ["output"]
    model = unisono.load_model(run, task=LinearTask).float()
    rows = np.random.default_rng(0).standard_normal((40, model.in_features)).astype(np.float32)
    wanted = model(torch.from_numpy(rows)).detach().numpy()
    assert np.abs(session.run(None, {"x": rows})[0] - wanted).max() < 1e-6
    assert main.main(["export", str(run), "to=onnx", "--task", f"{FILE}:LinearTask"]) == 2
    assert "already exists and is not overwritten" in capsys.readouterr().err


class Counting(LinearTask):
    """Its model computes something else whenever it is called, which a graph cannot."""

    calls = 0

    def outputs(self, model: torch.nn.Module, batch: Any, context: Context) -> Any:
        type(self).calls += 1
        return super().outputs(model, batch, context) * self.calls


class Branching(LinearTask):
    """Its model depends on values in Python."""

    def outputs(self, model: torch.nn.Module, batch: Any, context: Context) -> Any:
        return super().outputs(model, batch, context) * (2.0 if float(batch["x"].sum()) > 0 else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "why"), [(Counting, "computes other numbers than torch"), (Branching, "cannot export")]
)
def test_a_model_that_differs_or_cannot_be_a_graph_is_not_written(
    run: Path, task: type[LinearTask], why: str, tmp_path: Path
) -> None:
    opened = unisono.open_run(run, task=LinearTask)
    opened = type(opened)(opened.folder, opened.config, task(opened.task.config))
    with pytest.raises(RunError, match=why):
        export_onnx(opened, Export(to="onnx", out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


class Damaged(LinearTask):
    """Its held-out file cannot be read."""

    def held_out(self) -> Any:
        raise DataError("held.arrow cannot be read")


class TwoRows(LinearTask):
    """Its data are two rows."""

    def data(self) -> Any:
        return super().data()[:2]

    def held_out(self) -> Any:
        return None


def opened(task: LinearTask, tmp_path: Path) -> Run:
    return Run(tmp_path, load_config(f"{FILE}:LinearTask", [])[0], task)


def test_held_out_rows_that_cannot_be_read_are_not_replaced_by_others(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"held\.arrow cannot be read"):
        onnx_export._real_batches(opened(Damaged(), tmp_path))


def test_rows_that_are_compared_twice_are_counted_once(tmp_path: Path) -> None:
    batches, rows = onnx_export._real_batches(opened(TwoRows(), tmp_path))
    assert [len(batch["x"]) for batch in batches] == [2, 2, 1] and rows == 2


def test_an_input_and_an_output_of_one_name_are_refused() -> None:
    graph = type("Graph", (), {"__iter__": lambda self: iter(()), "inputs": [], "outputs": []})()
    with pytest.raises(RunError, match=r"'x' is the name of an input and of an output.*give it two names"):
        onnx_export._name(graph, ["x"], ["x"])


def test_a_model_that_onnxruntime_cannot_open_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(b"no model")
    with pytest.raises(RunError, match="onnxruntime cannot open the exported model, so it was not written: "):
        onnx_export._open_session(tmp_path / MODEL_FILE)


@pytest.mark.parametrize("words", [{"dtype": "bf16"}, {"merge": True}, {"processes": 2}, {"shard_mb": 10}])
def test_words_that_mean_nothing_to_a_graph_are_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(words))}=.* has no effect on to=onnx"):
        Export(to="onnx", **words)
