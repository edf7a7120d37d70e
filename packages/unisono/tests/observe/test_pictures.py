"""Pictures of a run that has ended, and sounds of one that trains, go to the trackers that have followed it."""

from __future__ import annotations

import json
import logging
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from packages.unisono.tests.observe.test_trackers import records
from unisono.observe import trackers
from unisono.observe.samples import prepare_sample

Image = pytest.importorskip("PIL.Image")
accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

RED = np.full((9, 14, 3), (200, 10, 20), dtype=np.uint8)


def ended(folder: Path, *names: str, of: tuple[str, ...] | None = None) -> dict[str, Path]:
    """A run that these trackers have followed for three steps; and a picture of it."""
    folder.mkdir()
    observe = {"trackers": list(of if of is not None else names), "project": "unisono", "tracker_timeout": 60.0}
    (folder / "config.yaml").write_text(yaml.safe_dump({"observe": observe}))
    with (folder / "events.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3))
    if names:
        opened = trackers.open_trackers(names, folder, "unisono", 0, {"width": 3}, {"host": "here"}, 60)
        opened.write(3, {"loss": 1.0})
        opened.close()
    Image.fromarray(RED).save(folder / "red.png")
    return {"looking/red": folder / "red.png"}


def test_they_stand_beside_the_curves_in_tensorboard(tmp_path: Path) -> None:
    made = ended(tmp_path / "run", "tensorboard")
    assert trackers.show_samples(tmp_path / "run", made) == ["tensorboard"]
    shown = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"images": 0})
    shown.Reload()
    (image,) = shown.Images("looking/red")
    assert (image.step, image.height, image.width) == (3, 9, 14)
    assert [point.step for point in shown.Scalars("loss")] == [3], "nothing is taken back"
    assert len(shown.Tensors("config/text_summary")) == 1, "what the tracker knows is not told again"


@pytest.mark.slow
def test_they_are_in_the_same_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = ended(tmp_path / "run", "wandb")
    id_ = json.loads((tmp_path / "run" / "trackers.json").read_text())["wandb"]
    assert trackers.show_samples(tmp_path / "run", made) == ["wandb"]
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == 2 * [f"run-{id_}.wandb"], "one per process; `wandb sync` joins them by id"
    rows: list[tuple[Path, dict[str, Any]]] = [
        (file, {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item})
        for file in files  # folders are named by the clock, which may be set back: not always in the order of writing
        for record in records(file)
        if record.WhichOneof("record_type") == "history"
    ]
    shown = [(file, row) for file, row in rows if "looking/red.path" in row]
    assert len(shown) == 1, f"of {[(file.parent.name, *row) for file, row in rows]}"
    ((file, row),) = shown
    assert row["step"] == 3
    kept = file.parent / "files" / row["looking/red.path"]
    assert (np.asarray(Image.open(kept).convert("RGB")) == RED).all()


def tone(folder: Path) -> Path:
    """A tenth of a second, 16 bits, mono."""
    path = folder / "tone.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes((3000 * np.sin(np.arange(800) / 5)).astype("<i2").tobytes())
    return path


def test_sounds_stand_there_too(tmp_path: Path) -> None:
    ended(tmp_path / "run")
    opened = trackers.open_trackers(["tensorboard"], tmp_path / "run", "unisono", 0, {}, {}, 60)
    opened.publish(2, "said/0", prepare_sample(tmp_path / "run", 2, "said/0", tone(tmp_path)))
    with pytest.raises(ValueError, match=r"PNG and WAV files, not a\.mp3"):
        prepare_sample(tmp_path / "run", 2, "said/0", tmp_path / "a.mp3")
    opened.close()
    shown = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"audio": 0})
    shown.Reload()
    (sound,) = shown.Audio("said/0")
    assert (sound.step, sound.sample_rate, sound.length_frames) == (2, 8000.0, 800)


@pytest.mark.slow
def test_sounds_are_in_a_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ended(tmp_path / "run", of=("wandb",))
    opened = trackers.open_trackers(["wandb"], tmp_path / "run", "unisono", 0, {}, {}, 60)
    opened.publish(2, "said/0", prepare_sample(tmp_path / "run", 2, "said/0", tone(tmp_path)))
    opened.close()
    (kept,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/audio/said/*.wav")
    assert kept.read_bytes() == tone(tmp_path).read_bytes()


def test_a_tracker_that_has_not_followed_the_run_is_not_begun(tmp_path: Path) -> None:
    made = ended(tmp_path / "run", of=("tensorboard",))
    assert trackers.show_samples(tmp_path / "run", made) == []
    assert not (tmp_path / "run" / "tensorboard").exists()
    assert not (tmp_path / "run" / trackers.IDS).exists()


def test_a_tracker_that_fails_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = ended(tmp_path / "run", "tensorboard")
    made["looking/red"].write_text("no picture")
    with caplog.at_level(logging.WARNING):
        assert trackers.show_samples(tmp_path / "run", made) == ["tensorboard"]
    assert "tensorboard failed (UnidentifiedImageError" in caplog.text
