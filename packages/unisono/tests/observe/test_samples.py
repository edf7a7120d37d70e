"""What a task shows after an evaluation: texts, pictures and tables, in its folder, its events and its trackers."""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.unisono.tests.launch import jobs
from unisono.observe import tensorboard, trackers
from unisono.observe.samples import encode_png, prepare_sample
from unisono.runtime.errors import ConfigError

Image = pytest.importorskip("PIL.Image")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

TASK = """
import numpy as np
import unisono
from packages.unisono.tests.tasks import LinearTask


class Shown(LinearTask):
    class Config(LinearTask.Config):
        fails: bool = False

    kept = ()

    def held_out(self):
        return self.data()[:8]

    def loss(self, outputs, batch, context):
        if not context.training and not len(self.kept):
            self.kept = outputs.detach().cpu().numpy()[:2]
        return super().loss(outputs, batch, context)

    def on_evaluation(self, step, values):
        kept, self.kept = self.kept, ()
        if self.config.fails:
            raise ValueError("nothing to show")
        rows = [{"row": number, "prediction": float(one.ravel()[0])} for number, one in enumerate(kept)]
        return {"grey": np.linspace(0, 1, 12).reshape(3, 4), "rows": rows, "words/said": f"step {step}: <b>"}
"""
WORDS = (
    "train.steps=2", "train.global_batch=8", "eval.every=1", "observe.progress=false", "layout.device=cpu",
    "layout.threads=1", "train.precision=fp64", "layout.micro_batch=4",
)  # fmt: skip


def run(folder: Path, name: str, *words: str) -> Path:
    (folder / "shown.py").write_text(TASK)
    here = f"{Path(__file__).parents[4]}"
    done = jobs.unisono("train", "shown.py", *WORDS, f"run.name={name}", *words, cwd=folder, PYTHONPATH=path(here))
    assert done.returncode == 0, done.stderr
    return folder / "runs" / name


def path(here: str) -> str:
    return f"{here}:{os.environ.get('PYTHONPATH', '')}"


def samples(folder: Path) -> list[dict[str, Any]]:
    return [event for event in jobs.events(folder) if "sample" in event]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    return run(folder, "alone", "layout.world_size=1", "observe.trackers=[tensorboard]")


def test_they_are_in_the_events_the_folder_and_tensorboard(alone: Path) -> None:
    shown = samples(alone)
    assert [(event["step"], event["sample"]) for event in shown] == [
        (step, name) for step in (1, 2) for name in ("grey", "rows", "words/said")
    ]
    assert shown[0]["file"] == "samples/step-00000001-grey.png"
    with Image.open(alone / shown[0]["file"]) as picture:
        assert np.asarray(picture)[0].tolist() == [0, 23, 46, 70]
    assert shown[1]["columns"] == ["row", "prediction"] and [row[0] for row in shown[1]["rows"]] == [0, 1]
    assert shown[5]["text"] == "step 2: <b>"
    board = accumulator.EventAccumulator(str(alone / "tensorboard"), size_guidance={"images": 0, "tensors": 0})
    board.Reload()
    assert [image.step for image in board.Images("grey")] == [1, 2]
    (_, last) = board.Tensors("words/said/text_summary")
    assert last.tensor_proto.string_val[0] == b"    step 2: <b>"
    table = board.Tensors("rows/text_summary")[0].tensor_proto.string_val[0].decode().splitlines()
    assert table[:2] == ["| row | prediction |", "| --- | --- |"] and table[2].startswith("| 0 | ")


def test_several_processes_show_once_what_one_shows(alone: Path) -> None:
    together = run(alone.parents[1], "together", "layout.world_size=2", "layout.strategy=ddp")
    assert len(samples(together)) == len(samples(alone)) == 6
    for one, other in zip(samples(alone), samples(together), strict=True):
        assert {**one, "rows": None} == {**other, "rows": None}
        assert np.array(one.get("rows", 0)) == pytest.approx(np.array(other.get("rows", 0)), rel=1e-12)


def test_steps_and_evaluations_are_read_beside_them(alone: Path) -> None:
    done = jobs.unisono("list", cwd=alone.parents[1])
    assert "2/2" in done.stdout, done.stderr
    report = jobs.unisono("report", str(alone), cwd=alone.parents[1])
    assert report.returncode == 0, report.stderr
    page = (alone / "report.html").read_text()
    assert "words/said, after step 2" in page and "step 2: &lt;b&gt;" in page and "rows, after step 2" in page
    assert page.count("data:image/png") == 2


def test_an_error_ends_the_run_on_all_processes_and_names_the_task_s_method(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(TASK)
    more = ("layout.world_size=2", "layout.strategy=ddp", "task.fails=true")
    done = jobs.unisono(
        "train", "shown.py", *WORDS, *more, cwd=tmp_path, PYTHONPATH=path(str(Path(__file__).parents[4]))
    )
    assert done.returncode == 1
    assert "callback TaskSamples on rank 0, on_evaluation after step 1: ValueError: nothing to show" in done.stderr


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 1), (5, 7, 3), (5, 7, 4)])
def test_a_picture_is_written_as_it_is(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    for given in (pixels, pixels / 255):
        with Image.open(io.BytesIO(encode_png("it", given))) as picture:
            assert (np.asarray(picture).reshape(shape) == pixels).all()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.zeros(3), r"a picture has the shape \(rows, columns\)"),
        (np.full((2, 2), 1.5), "numbers from 0 to 1"),
        (np.full((2, 2), np.nan), "numbers from 0 to 1"),
        (b"GIF89a", "if they are a PNG file"),
        (object(), "a object cannot be shown"),
        (Path("a.mp3"), "PNG and WAV files, not a.mp3"),
    ],
)
def test_what_cannot_be_shown_is_refused(value: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"'it': .*{told}"):
        prepare_sample(tmp_path, 1, "it", value)


def test_what_the_events_get_is_bounded_and_a_name_leads_nowhere(tmp_path: Path) -> None:
    text = prepare_sample(tmp_path, 1, "t", "x" * 10**6)
    table = prepare_sample(tmp_path, 1, "t", [{f"c{n}": "y" * 10**4 for n in range(99)} for _ in range(10**3)])
    assert len(json.dumps([text.event, table.event])) < 300_000
    picture = prepare_sample(tmp_path, 1, "../../../etc/x", np.zeros((2, 2)))
    assert picture.event == {"file": "samples/step-00000001-..-..-..-etc-x.png"}
    numbers = prepare_sample(tmp_path, 1, "n", [{"a": np.float32(0.5), "b": float("nan"), "c": None, "d": np.zeros(2)}])
    assert numbers.event == {"columns": ["a", "b", "c", "d"], "rows": [[0.5, "nan", None, "[0. 0.]"]]}


def test_a_tracker_without_texts_leaves_them_out_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tensorboard.Tracker, "text")
    opened = trackers.open_trackers(["tensorboard"], tmp_path, "unisono", 0, {}, {}, 60)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            opened.publish(step, "said", prepare_sample(tmp_path, step, "said", "hello"))
        opened.write(2, {"loss": 1.0})
        opened.close()
    assert caplog.text.count("tensorboard cannot show a text; it is left out there") == 1
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [point.step for point in board.Scalars("loss")] == [2]


@pytest.mark.slow
def test_wandb_has_texts_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    opened = trackers.open_trackers(["wandb"], tmp_path, "unisono", 0, {}, {}, 60)
    opened.publish(1, "said", prepare_sample(tmp_path, 1, "said", "<hello>"))
    opened.publish(1, "rows", prepare_sample(tmp_path, 1, "rows", [{"a": 1, "b": "x"}]))
    opened.close()
    (page,) = (tmp_path / "wandb").glob("offline-run-*/files/media/html/said*.html")
    (table,) = (tmp_path / "wandb").glob("offline-run-*/files/media/table/rows*.json")
    assert "<pre>&lt;hello&gt;</pre>" in page.read_text()
    assert json.loads(table.read_text())["data"] == [[1, "x"]]
