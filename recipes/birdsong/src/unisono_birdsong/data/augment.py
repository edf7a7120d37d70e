"""Views, masks and noise of a spectrogram before the model sees it, drawn by a row's own generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import unisono_audio as audio
from unisono_birdsong.settings import Augment

Array = NDArray[np.float32]


def augment_clip(clip: Array, rng: np.random.Generator, augment: Augment) -> Array:
    """A normalised clip (frames, mels) float32: louder or softer, with noise, stretches of time and bands hidden."""
    frames, mels = clip.shape
    out = clip
    if augment.gain:
        out = out + np.float32(rng.uniform(-augment.gain, augment.gain))
    if augment.noise:
        out = out + np.float32(rng.uniform(0, augment.noise)) * rng.standard_normal(clip.shape, dtype=np.float32)
    return audio.spec_augment(
        out, rng,
        frequency_masks=augment.frequency_masks, frequency_width=int(augment.frequency_width * mels),
        time_masks=augment.time_masks, time_width=int(augment.time_width * frames),
    )  # fmt: skip


def views(clip: Array, rng: np.random.Generator, count: int, length: int, augment: Augment | None) -> Array:
    """Stretches of a clip (frames, mels), each at its own place and augmented for itself, (count, length, mels)."""
    cut = []
    for _ in range(count):
        first = int(rng.integers(len(clip) - length + 1))
        view = clip[first : first + length]
        cut.append(view if augment is None else augment_clip(view, rng, augment))
    return np.stack(cut)


def mask_order(grid: tuple[int, int], masked: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """An order of all patches in which those that are hidden come last, (patches,) int32; its two parts are sorted.

    Blocks of 2 × 2 patches are hidden, a quarter as many as patches (rounded down), then single ones up to the number.
    The grid has patches in time and in frequency, numbered along the frequency first.
    """
    rows, columns = grid
    hidden = np.zeros(grid, dtype=bool)
    blocks_across = -(-columns // 2)
    blocks = rng.permutation(-(-rows // 2) * blocks_across)[: masked // 4]
    for block in blocks.tolist():
        row, column = 2 * (block // blocks_across), 2 * (block % blocks_across)
        hidden[row : row + 2, column : column + 2] = True
    flat = hidden.reshape(-1)
    rest = rng.permutation(np.flatnonzero(~flat))[: masked - int(flat.sum())]  # none, where blocks are enough
    flat[rest] = True
    return np.concatenate([np.flatnonzero(~flat), np.flatnonzero(flat)]).astype(np.int32)
