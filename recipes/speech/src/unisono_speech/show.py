"""What a model predicts of held-out samples, to be heard and seen: sound and spectrograms, for folder and trackers.

Each code is predicted from the true ones before it, as in the loss; what the model says by itself is `unisono
generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono import Callback, RunInfo
from unisono.recipe_tools import atomic_file, safe_writing
from unisono_speech.data.labels import IGNORED
from unisono_speech.data.voices import pcm_wav

if TYPE_CHECKING:
    from unisono_speech.codec import Codec

Codes = NDArray[np.int64]


class Shown(Protocol):
    """The task: what an evaluation has kept to be shown, and what turns codes into sound."""

    @property
    def shown(self) -> list[tuple[Codes, Codes]]:
        """Predicted and true codes of held-out rows."""

    @property
    def codec(self) -> Codec:
        """Between sound and codes."""


class Show(Callback):
    """Writes `samples/step-N-K-predicted.wav`, `-true.wav` and a picture of both at each evaluation."""

    def __init__(self, task: Shown) -> None:
        super().__init__()
        self._task = task

    def on_start(self, run: RunInfo) -> None:
        """Remember the run; what a trial step has kept is not shown."""
        self._run = run
        self._task.shown.clear()

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write what this evaluation has kept; only the first process writes."""
        kept, codec = list(self._task.shown), self._task.codec
        self._task.shown.clear()
        if not self._run.is_first:
            return
        folder = safe_writing.make_folder(self._run.directory, "samples")
        for number, (predicted, truth) in enumerate(kept):
            sounds = {"predicted": sound_of(predicted, truth, codec), "true": sound_of(truth, truth, codec)}
            stem = f"step-{step:08d}-{number}"
            for name, sound in sounds.items():
                write_wav(folder / f"{stem}-{name}.wav", sound, codec.rate)
                self._run.publish(step, f"samples/{number}/{name}", folder / f"{stem}-{name}.wav")
            draw(folder / f"{stem}.png", sounds, codec.rate)
            self._run.publish(step, f"samples/{number}/spectrograms", folder / f"{stem}.png")


def sound_of(predicted: Codes, truth: Codes, codec: Codec) -> NDArray[np.float32]:
    """The sound of codes at the places of targets (places, codebooks): of their streams, the delay taken back."""
    parts = []
    real = (truth[:, 0] != IGNORED) & (truth[:, 0] < codec.codes)
    for first, last in _runs(real):
        rows = [predicted[first + book : last + book, book] for book in range(codec.codebooks)]
        parts.append(np.minimum(np.stack(rows, axis=1), codec.codes - 1))
    return codec.decode(np.concatenate(parts)) if parts else np.zeros(0, dtype=np.float32)


def write_wav(path: Path, sound: NDArray[np.float32], rate: int) -> None:
    """Write sound (n,) in [-1, 1] as a WAV file of 16 bits."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(pcm_wav(np.clip(sound, -1, 1) * 32767, rate))


def draw(path: Path, sounds: Mapping[str, NDArray[np.float32]], rate: int) -> None:
    """Draw the spectrograms of sounds, one below the other."""
    from matplotlib.figure import Figure

    import unisono_audio as audio

    figure = Figure(figsize=(6, 2.2 * len(sounds)), layout="constrained")
    axes: Any = figure.subplots(len(sounds), 1, squeeze=False)[:, 0]
    for axis, (name, sound) in zip(axes, sounds.items(), strict=True):
        bands = audio.log_mel(
            np.pad(sound, (0, max(0, 1024 - len(sound)))), rate, 64, n_fft=512, hop_length=128, floor=1e-3
        )
        axis.imshow(bands.T, origin="lower", aspect="auto", extent=(0, len(sound) / rate, 0, 64), vmin=-7, vmax=6)
        axis.set(title=name, xlabel="seconds", ylabel="mel band")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=100, format="png")


def _runs(real: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where consecutive places are real, as (first, last + 1)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], real, [False]]).astype(np.int8)))
    return [(int(first), int(last)) for first, last in zip(edges[::2], edges[1::2], strict=True)]
