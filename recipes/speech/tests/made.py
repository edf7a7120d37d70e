"""Small speech for tests: two made-up voices, a small codec, a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono import SampleContext, generator
from unisono_speech.data import voices
from unisono_speech.data.labels import Row
from unisono_speech.settings import Embedded, FromConfig, KMeans, SpeechConfig
from unisono_speech.task import Speech

CODEC = KMeans(rate=8000, mels=8, codes=8, phase_steps=2)
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
OVERRIDES = (
    "train.global_batch=4", "layout.threads=1", "observe.progress=false", "observe.trackers=[]", "data.speakers=2",
    "data.clips=4", "data.held_out=0.25", "data.codec.codes=8", "data.codec.mels=8", "data.codec.phase_steps=2",
    *(f"model.settings.{name}={value}" for name, value in SMALL.items() if isinstance(value, int)),
)  # fmt: skip


def task(cache: Path, task_type: type[Speech] = Speech, data: Any = None, **config: Any) -> Speech:
    """A task on made-up voices, or on other data."""
    if data is None:
        data = Embedded(kind="embedded", speakers=2, clips=4, held_out=0.25, codec=CODEC, cache=cache)
    made = task_type(SpeechConfig(**config), model=FromConfig(kind="config", settings=SMALL), data=data)
    made.setup()
    return made


def rows(made: Speech, count: int, training: bool = True) -> list[Row]:
    """The first rows of a task."""
    source = made.data() if training else made.held_out()
    return [made.sample(source[n], SampleContext(generator("test", n), training)) for n in range(count)]


def batch(made: Speech, count: int) -> dict[str, Any]:
    """The first micro-batch as tensors."""
    return {name: torch.from_numpy(value) for name, value in made.collate(rows(made, count)).items()}


def folder(path: Path, speakers: int = 2, clips: int = 3) -> Path:
    """A folder of recordings with its metadata.json."""
    path.mkdir(parents=True, exist_ok=True)
    entries = []
    for speaker in range(speakers):
        for take in range(clips):
            said, name = voices.text(speaker, take), f"{speaker}_{take}"
            (path / f"{name}.wav").write_bytes(voices.wav(speaker, said, take))
            (path / f"{name}.txt").write_text(said + "\n", encoding="utf-8")
            entries.append(
                {
                    "id": name, "audio_file": f"{name}.wav", "transcript_file": f"{name}.txt", "sample_rate": 8000,
                    "speaker_id": f"voice {speaker}", "scene": "quiet_room", "task_type": "audio_generation",
                }
            )  # fmt: skip
    (path / "metadata.json").write_text(json.dumps({"dataset_info": {}, "samples": entries}), encoding="utf-8")
    return path


def changed(path: Path, number: int, **fields: Any) -> Path:
    """The folder with other fields in one entry; None takes a field out."""
    found = json.loads((path / "metadata.json").read_text(encoding="utf-8"))
    entry = {**found["samples"][number], **fields}
    found["samples"][number] = {name: value for name, value in entry.items() if value is not None}
    (path / "metadata.json").write_text(json.dumps(found), encoding="utf-8")
    return path


def random_codes(count: int, codes: int = 8, books: int = 8) -> np.ndarray:
    return generator("test", "codes", count).integers(0, codes, (count, books))
