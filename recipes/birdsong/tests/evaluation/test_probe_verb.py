"""Embeddings and the verb: what a run's encoder is measured on, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("equinox")
pytest.importorskip("soundfile")

import jax

from recipes.birdsong.tests.data.test_recordings import birds, folder
from recipes.birdsong.tests.small import ENCODER, task
from unisono import ConfigError, DataError, RunInfo
from unisono_audio import CENTRE
from unisono_birdsong.data.library import open_library
from unisono_birdsong.evaluation import probe_verb
from unisono_birdsong.evaluation.embeddings import embed
from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.settings import EncoderSettings, RecordingsData


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(EncoderSettings.model_validate(ENCODER), jax.random.key(3))


def opened(path: Path, **settings: Any) -> Any:
    return open_library(RecordingsData(kind="recordings", path=str(path), **settings))


def run_of(path: Path, encoder: Encoder, **settings: Any) -> Any:
    """What the verb asks of a run: its task, with these recordings, and its model."""
    own = task("supervised")
    own.data_config = RecordingsData(kind="recordings", path=str(path), **settings)
    model = SimpleNamespace(encoder=encoder)
    return SimpleNamespace(folder=Path("runs/a"), task=own, newest_step=7, load_model=lambda ema, step: model)


def test_embeddings_belong_to_their_rows_whatever_the_micro_batch(encoder: Encoder, tmp_path: Path) -> None:
    rows = birds(7)
    rows[2]["label"] = ""  # not known: left out
    source = opened(folder(tmp_path, rows), held_out=0).training
    one, three = embed(encoder, source, micro_batch=1), embed(encoder, source, micro_batch=3)
    assert one.embeddings.shape == (6, encoder.settings.width)
    np.testing.assert_allclose(one.embeddings, three.embeddings, atol=1e-5)
    assert one.embeddings.std(axis=0).max() > 1e-3  # rows differ
    there = [n for n in range(7) if n != 2]
    np.testing.assert_array_equal(one.truth, np.eye(3, dtype=bool)[[n % 3 for n in there]])
    clip = encoder.settings.pipeline()([source[5]["audio"]], [CENTRE]).values[0]
    np.testing.assert_allclose(one.embeddings[4], np.asarray(encoder.embedding(clip)), atol=1e-5)
    assert one.groups == [f"{n}.wav" for n in there]


def test_the_verb_prints_a_table_and_files_its_results_once(encoder: Encoder, tmp_path: Path) -> None:
    run, out = run_of(folder(tmp_path / "a", birds(24)), encoder, held_out=0.5), tmp_path / "probes.parquet"
    words: dict[str, Any] = {"out": out, "kinds": "linear,centroid", "seeds": 2, "resamples": 50}
    lines = list(probe_verb.probe(run, **words))
    assert "12 rows to fit, 12 held out in 12 groups" in lines[0]
    assert [line.split()[:2] for line in lines[2:6]] == [
        ["linear", "0"],
        ["centroid", "0"],
        ["linear", "1"],
        ["centroid", "1"],
    ]
    assert lines[-1].endswith("4 results")
    table = pq.read_table(out).to_pylist()
    assert {row["objective"] for row in table} == {"cross_entropy", "cosine"}
    assert all(0 <= row["cmap_low"] <= row["cmap_high"] <= 1 and row["step"] == 7 for row in table)
    assert list(probe_verb.probe(run, **words))[-1].endswith("4 results")
    assert [{**row, "time": ""} for row in pq.read_table(out).to_pylist()] == [{**row, "time": ""} for row in table]


def test_a_probe_hears_what_labels_mean_and_nothing_where_they_mean_nothing(encoder: Encoder, tmp_path: Path) -> None:
    rows = birds(36)
    for number, row in enumerate(rows):  # recordings rise in pitch; the label is the part of the scale
        row["label"] = number // 12
    run = run_of(folder(tmp_path / "a", rows), encoder, held_out=0.25)
    list(probe_verb.probe(run, out=tmp_path / "a.parquet", kinds="linear", resamples=0))
    rng = np.random.default_rng(1)
    for row in rows:
        row["label"] = int(rng.integers(3))
    run = run_of(folder(tmp_path / "a", rows), encoder, held_out=0.25)
    list(probe_verb.probe(run, out=tmp_path / "b.parquet", kinds="linear", resamples=0))
    found = [pq.read_table(tmp_path / name)["auroc"][0].as_py() for name in ("a.parquet", "b.parquet")]
    assert found[0] > 0.85 > found[1]


def test_what_cannot_be_measured_is_refused_before_the_model_is_loaded(encoder: Encoder, tmp_path: Path) -> None:
    path = folder(tmp_path / "a", birds())
    run = run_of(path, encoder)
    run.load_model = None
    for words, told in (
        ({"kinds": "linaer"}, r"kinds=linaer: 'linaer' is not a probe, did you mean 'linear'"),
        ({"kinds": ","}, r"names no probe"),
        ({"seeds": 0}, r"seeds=0"),
        ({"out": tmp_path / "x.csv"}, r"ends in .parquet"),
    ):
        with pytest.raises(ConfigError, match=told):
            list(probe_verb.probe(run, **{"out": tmp_path / "x.parquet", **words}))
    run.task = run_of(path, encoder, held_out=0).task
    with pytest.raises(DataError, match=r"held-out recordings, and there are none; set data.held_out, or data.test"):
        list(probe_verb.probe(run, out=tmp_path / "x.parquet"))


def test_a_group_on_both_sides_and_sides_without_labels_are_refused(encoder: Encoder, tmp_path: Path) -> None:
    source = opened(folder(tmp_path, birds()), held_out=0).training
    rows = embed(encoder, source)
    with pytest.raises(DataError, match=r"is on both sides; choose data\.group"):
        probe_verb.check_sides(rows, rows)
    with pytest.raises(DataError, match="no row with labels to measure one on"):
        probe_verb.check_sides(rows, replace(rows, truth=np.zeros_like(rows.truth), groups=[]))


def test_a_checkpoint_is_probed_by_rank_0_alone_and_filed_under_its_step(
    encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(folder(tmp_path / "a", birds(12)), encoder, held_out=0.5, group="auto")
    monkeypatch.setattr(
        probe_verb,
        "open_run",
        lambda folder, task: SimpleNamespace(load_model=lambda step: SimpleNamespace(encoder=encoder)),
    )
    callback = probe_verb.ProbeSaves(run.task)
    for rank in (1, 0):
        info = RunInfo(tmp_path / "run", run.task.config, 0, 10, rank=rank, world_size=2)  # type: ignore[arg-type]
        callback.on_start(info)
        callback.on_save(5, tmp_path / "checkpoint")
        assert (tmp_path / "run" / "probes.parquet").exists() == (rank == 0)
    assert {(row["step"], row["probe"]) for row in pq.read_table(tmp_path / "run" / "probes.parquet").to_pylist()} == {
        (5, "linear"),
        (5, "centroid"),
    }
    for asked in (False, True):
        found = task("supervised", probe_saves=asked).callbacks()
        assert any(isinstance(one, probe_verb.ProbeSaves) for one in found) == asked
