"""What the issue's user types, by the command line: train on recordings, probe, export, and begin with the weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("equinox")
pytest.importorskip("soundfile")

from packages.unisono.tests.engines.jax.test_processes import steps, unisono
from recipes.birdsong.tests.data.test_recordings import birds, folder
from recipes.birdsong.tests.test_processes import SMALL as SYNTHETIC

pytestmark = pytest.mark.slow

SMALL = tuple(word for word in SYNTHETIC if not word.startswith("data."))


def test_an_encoder_is_trained_on_recordings_probed_on_others_exported_and_begun_with(tmp_path: Path) -> None:
    path, other = folder(tmp_path / "a", birds(24)), folder(tmp_path / "b", birds(18))
    recordings = ("data=recordings", f"data.path={path}", "data.group=recordist", "data.names=species")
    beside = ("task.probe_saves=true", "task.pictures=true")
    done = unisono(tmp_path, *SMALL, *recordings, "task.objective=lejepa", *beside, "run.name=one")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "one"
    losses = [step["loss"] for step in steps(run)]
    assert len(set(losses)) == len(losses) == 6
    saved = pq.read_table(run / "probes.parquet").to_pylist()
    assert sorted({row["step"] for row in saved}) == [2, 4, 6]
    assert len({row["checkpoint"] for row in saved}) == 3
    embeddings = {f"step-{step:08d}-embeddings.png" for step in (2, 4, 6)}
    assert set(pictures(run)) == {"learning_curves.png", *embeddings}

    probe = ("probe", "runs/one", "kinds=linear,centroid", "resamples=50", "data=recordings", f"data.path={other}")
    done = unisono(tmp_path, *probe, "data.group=auto")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("b@")
    assert unisono(tmp_path, *probe, "data.group=auto").stdout.splitlines()[1:-1] == done.stdout.splitlines()[1:-1]
    table = pq.read_table(tmp_path / "probes.parquet").to_pylist()
    assert [row["probe"] for row in table] == ["linear", "centroid"]
    assert {row["checkpoint"] for row in table} == {row["checkpoint"] for row in saved if row["step"] == 6}

    done = unisono(tmp_path, "export", "runs/one", "out=encoder")
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "encoder" / "encoder.json").read_text())
    assert told["digest"] == table[0]["checkpoint"]
    assert (told["about"]["step"], told["about"]["classes"]) == (6, ["bird 0", "bird 1", "bird 2"])

    begun = (*SMALL, *recordings, "task.weights=encoder", "train.steps=1", "run.name=two")
    refused = unisono(tmp_path, *begun, "model.qk_norm=false")
    assert refused.returncode != 0
    assert "encoder holds another encoder: model.qk_norm=true there and false here" in refused.stderr
    assert not (tmp_path / "runs" / "two").exists()
    done = unisono(tmp_path, *begun)
    assert done.returncode == 0, done.stderr
    (tmp_path / "encoder").rename(tmp_path / "gone")  # a run that began with weights needs them no more to be used
    done = unisono(tmp_path, "export", "runs/two", "out=again")
    assert done.returncode == 0, done.stderr


def pictures(run: Path) -> dict[str, float]:
    """Deviation of the pixels of each picture of a run."""
    from matplotlib.image import imread

    found = {path.name: float(imread(path).std()) for path in (run / "pictures").iterdir()}
    assert min(found.values()) > 0.01, "none is blank"
    return found


def test_two_processes_read_recordings_as_one_does(tmp_path: Path) -> None:
    """Multi-label windows with augmentation, in fp64: the same losses from 1 × 1 and 2 × 1 devices."""
    path = folder(tmp_path / "a", [{"file": f"{n}.wav"} for n in range(6)], seconds=4.0)
    events = ["recording,start,end,label", *(f"{n % 6}.wav,{n % 4}.1,{n % 4}.9,{n % 3}" for n in range(17))]
    (tmp_path / "events.csv").write_text("\n".join(events) + "\n")
    words = (
        *SMALL, "data=recordings", f"data.path={path}", "data.window_seconds=0.5", "data.events=events.csv",
        "data.overlap=0.1", "task.loss=asymmetric",
    )  # fmt: skip
    found = []
    for name, layout in (("one", ()), ("two", ("layout.world_size=2", "layout.strategy=ddp", "layout.micro_batch=2"))):
        done = unisono(tmp_path, *words, *layout, f"run.name={name}")
        assert done.returncode == 0, done.stderr
        found.append([step["loss"] for step in steps(tmp_path / "runs" / name)])
    assert len(set(found[0])) == 6
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
