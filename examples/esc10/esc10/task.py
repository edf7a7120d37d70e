"""Environmental sounds as pictures of their spectrum, and a small network that tells them apart."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from pydantic import Field, PositiveInt
from torch import nn

import unisono

Array = NDArray[np.float32]
RATE, WINDOW, HOP = 44_100, 2048, 1024


class Esc10(unisono.Task):
    """Clips in folds, one of which is held out: what was cut from one recording is all in one fold."""

    class Config(unisono.Settings):
        mels: PositiveInt = Field(64, description="bands of the spectrum")
        seconds: float = Field(2.5, gt=0, description="of a clip that training sees at a time, drawn anew each time")
        masked: float = Field(0.15, ge=0, lt=1, description="part of the bands and of the time that training hides")

    class Model(unisono.Settings):
        width: PositiveInt = Field(32, description="channels of the first block; each of the others has twice as many")

    class Data(unisono.Data):
        folder: Path = Field(description="with metadata.csv (file, category, fold) and the clips")
        fold: int = Field(4, description="which is held out")

    def setup(self) -> None:
        _ = self._spectra  # before there are threads

    def data(self) -> unisono.Subset:
        return self._part(held_out=False)

    def held_out(self) -> unisono.Subset:
        return self._part(held_out=True)

    def sample(self, record: dict[str, Any], context: unisono.SampleContext) -> dict[str, Any]:
        spectrum: Array = self._spectra[record["number"]]
        if context.training:
            spectrum = augment(spectrum, self.config, context.rng)
        return {"spectrum": spectrum, "label": np.int64(self.classes.index(record["category"]))}

    def build(self) -> nn.Module:
        width = self.model_config.width
        channels = [1, width, 2 * width, 4 * width, 8 * width]
        blocks = [block(*pair) for pair in pairwise(channels)]
        pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3)]
        return nn.Sequential(*blocks, *pooled, nn.Linear(channels[-1], len(self.classes)))

    def counts(self, batch: unisono.Batch) -> dict[str, float]:
        return {"label": float(len(batch["label"]))}

    def outputs(self, model: nn.Module, batch: unisono.Batch, context: unisono.Context) -> torch.Tensor:
        logits: torch.Tensor = model(batch["spectrum"][:, None])
        return logits

    def loss(self, outputs: torch.Tensor, batch: unisono.Batch, context: unisono.Context) -> unisono.Loss:
        total = F.cross_entropy(outputs, batch["label"], reduction="sum", label_smoothing=0.1 * context.training)
        right = (outputs.argmax(1) == batch["label"]).sum()
        return unisono.Loss({"label": total}, metrics={"accuracy": (right, len(outputs))})

    def predictions(self, outputs: torch.Tensor, batch: unisono.Batch) -> dict[str, Any]:
        best = outputs.softmax(1).max(1)
        names = [self.classes[number] for number in best.indices]
        return {"predicted": names, "probability": best.values, "true": [self.classes[n] for n in batch["label"]]}

    def save_assets(self, directory: Path) -> None:
        unisono.write_table(directory / "classes.csv", {"class": self.classes})

    def load_assets(self, directory: Path) -> None:
        self.classes = unisono.read_table(directory / "classes.csv")["class"]

    @cached_property
    def classes(self) -> list[str]:
        return sorted({row["category"] for row in self._rows})

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        rows = unisono.open_source(self.data_config.folder / "metadata.csv", key="data.folder")
        return [{**row, "number": number} for number, row in enumerate(rows)]

    def _part(self, held_out: bool) -> unisono.Subset:
        folds = np.array([row["fold"] for row in self._rows])
        if self.data_config.fold not in folds:
            raise unisono.ConfigError(f"data.fold={self.data_config.fold}: the folds are {sorted(set(folds.tolist()))}")
        return unisono.Subset(self._rows, np.flatnonzero((folds == self.data_config.fold) == held_out))

    @cached_property
    def _spectra(self) -> Array:
        """Of all clips, (clips, mels, frames), computed once and kept in the cache."""
        paths = [self.data_config.folder / row["file"] for row in self._rows]
        address = [RATE, WINDOW, HOP, self.config.mels, [unisono.file_hash(path) for path in paths]]

        def compute() -> Array:
            spectra = [log_mel(path, self.config.mels) for path in paths]
            frames = max(spectrum.shape[1] for spectrum in spectra)
            return np.stack([np.pad(one, ((0, 0), (0, frames - one.shape[1])), mode="wrap") for one in spectra])

        return unisono.compute_array_once("esc10", address, compute)


def block(before: int, after: int) -> nn.Module:
    """A convolution with a norm that looks at one row alone, so that no row depends on those beside it."""
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(8, after), nn.GELU(), nn.MaxPool2d(2))


def augment(spectrum: Array, config: Esc10.Config, rng: np.random.Generator) -> Array:
    """A stretch of the clip, of which a band and a moment are hidden."""
    frames = min(spectrum.shape[1], int(config.seconds * RATE / HOP))
    first = int(rng.integers(spectrum.shape[1] - frames + 1))
    part = spectrum[:, first : first + frames].copy()
    for axis, size in enumerate(part.shape):
        hidden = int(rng.integers(int(config.masked * size) + 1))
        begin = int(rng.integers(size - hidden + 1))
        part[(slice(None),) * axis + (slice(begin, begin + hidden),)] = 0.0
    return part


def log_mel(path: Path, mels: int) -> Array:
    """Log power in mel bands, (mels, frames), with mean 0 and standard deviation 1."""
    sound, rate = soundfile.read(path, dtype="float64", always_2d=True)
    if rate != RATE:
        raise unisono.DataError(f"{path} has {rate} samples a second, not {RATE}; convert it first")
    sound = np.pad(sound.mean(1), (0, max(0, WINDOW - len(sound))))
    frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP] * np.hanning(WINDOW)
    power = np.square(np.abs(np.fft.rfft(frames)))  # (frames, bins)
    spectrum = np.log(power @ filters(mels) + 1e-6).T
    return ((spectrum - spectrum.mean()) / (spectrum.std() + 1e-6)).astype(np.float32)


def filters(mels: int) -> NDArray[np.float64]:
    """Triangles of equal width on the mel scale (O'Shaughnessy, 1987), (bins, mels)."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 1400), mels + 2) / 2595) - 1)
    bins = np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None]
    low, middle, high = edges[:-2], edges[1:-1], edges[2:]
    return np.clip(np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)), 0, None)


def listen(run: unisono.Run, sound: Path) -> Iterator[str]:
    """Say what a sound file is, the likeliest three kinds first.

    Args:
        run: its folder.
        sound: file to listen to.
    """
    spectrum = torch.from_numpy(log_mel(sound, run.task.config.mels))
    with torch.no_grad():
        chances = run.load_model()(spectrum[None, None]).softmax(1)[0]
    for chance, number in zip(*chances.topk(min(3, len(chances))), strict=True):
        yield f"{chance:.2f}  {run.task.classes[number]}"
