"""What is drawn is what was computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("equinox")
pytest.importorskip("matplotlib")

import jax
from matplotlib.figure import Figure
from matplotlib.image import imread

from recipes.birdsong.tests.small import shown, task
from unisono import RunInfo
from unisono_birdsong.evaluation import pictures
from unisono_birdsong.evaluation.embeddings import Embedded
from unisono_birdsong.evaluation.pictures import plot_embeddings, plot_losses, plot_reconstruction
from unisono_birdsong.objectives.pixio import masked_patches


def _axes(count: int) -> list[Any]:
    return list(Figure().subplots(count, 1, squeeze=False).flat)


def test_a_reconstruction_shows_the_clip_what_is_seen_of_it_and_what_is_told_of_the_rest() -> None:
    made = task("pixio")
    model = made.build(jax.random.key(0))
    clip = shown(made, range(1))["clip"][0]
    axes = _axes(3)
    plot_reconstruction(axes, model, clip)
    whole, seen, told = (np.asarray(axis.images[0].get_array()) for axis in axes)
    assert np.allclose(whole, clip.T)
    hidden = seen != whole
    size = np.prod(model.encoder.settings.patch)
    assert hidden.sum() <= masked_patches(model.encoder.settings, made.config.pixio) * size
    assert hidden.mean() > 0.5
    assert (told[~hidden] == whole[~hidden]).all()
    assert (told[hidden] != whole[hidden]).mean() > 0.9


def test_embeddings_are_drawn_along_the_direction_in_which_they_differ_most() -> None:
    rng = np.random.default_rng(0)
    along = rng.normal(size=30)
    embeddings = 10 * along[:, None] * np.eye(6)[2] + rng.normal(size=(30, 6))
    (axis,) = _axes(1)
    plot_embeddings(axis, Embedded(embeddings, np.eye(3, dtype=bool)[np.arange(30) % 3], ["a"] * 30))
    points = np.asarray(axis.collections[0].get_offsets())
    assert abs(np.corrcoef(points[:, 0], along)[0, 1]) > 0.99
    assert axis.collections[0].get_array().tolist() == [float(n % 3) for n in range(30)]


def test_a_curve_has_each_step_once_and_evaluations_as_points(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}, {"step": 2, "eval": True, "loss": 2.75}, {"note": "again"},
        {"step": 2, "loss": 2.0}, {"step": 3, "loss": 1.0},
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = _axes(1)
    plot_losses(axis, tmp_path, "run")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
    assert drawn == {"run": [[1, 3.0], [2, 2.0], [3, 1.0]], "run, held out": [[2, 2.75]]}


def test_a_checkpoint_is_drawn_by_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = task("pixio")
    model = made.build(jax.random.key(0))
    monkeypatch.setattr(pictures, "open_run", lambda *_, **__: SimpleNamespace(load_model=lambda step: model))
    callback, published = pictures.Pictures(made), []
    for rank in (1, 0):
        run = RunInfo(tmp_path, None, 0, 10, rank, 2, publish=lambda *told: published.append(told))  # type: ignore[arg-type]
        callback.on_start(run)
        callback.on_save(5, tmp_path / "checkpoint")
        assert (tmp_path / "pictures").exists() == (rank == 0)
    paths = {name: tmp_path / "pictures" / f"step-00000005-{name}.png" for name in ("embeddings", "reconstruction")}
    assert published == [(5, f"pictures/{name}", path) for name, path in paths.items()]
    assert all(imread(path).std() > 0.01 for path in paths.values()), "none is blank"


def test_a_run_that_another_callback_ended_before_its_start_ends_without_pictures() -> None:
    pictures.Pictures(task("pixio")).on_end(0, "failed")
