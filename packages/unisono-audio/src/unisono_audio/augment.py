"""Augmentation, as pure functions of an array and a generator.

The generator passed to `Task.sample` is keyed by (seed, epoch, row), so a recording is augmented in the same way on any
layout, by any worker and after a resume. In evaluation, draw nothing: use `CENTRE`, `FIRST` or all `windows`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from unisono_audio.shared import ConfigError, DataError

Array = NDArray[np.float32]


def gain(x: Array, rng: np.random.Generator, low_db: float = -6.0, high_db: float = 6.0) -> Array:
    """Change the volume by a random number of dB.

    Args:
        x: (..., n) float32 samples.
        rng: to draw from.
        low_db: minimum gain.
        high_db: maximum gain.
    """
    return x * np.float32(10 ** (rng.uniform(low_db, high_db) / 20))


def add_noise(x: Array, rng: np.random.Generator, snr_db: float, noise: Array | None = None) -> Array:
    """Add noise at a signal-to-noise ratio.

    Args:
        x: (n,) float32 samples.
        rng: to draw from.
        snr_db: ratio of the energies of signal and noise in dB.
        noise: (m,) a recording to take a random segment from, repeated if it is shorter; None for white noise.
    """
    if noise is None:
        added = rng.standard_normal(len(x), dtype=np.float32)
    elif not len(noise):
        raise DataError("a noise recording has no samples")
    else:
        added = np.resize(np.roll(noise, -int(rng.integers(len(noise)))), len(x)).astype(np.float32)
    return x + added * _level(x, added, snr_db)


def mix(x: Array, other: Array, rng: np.random.Generator, low_db: float = -5.0, high_db: float = 5.0) -> Array:
    """Add a second recording, circularly shifted, at a random energy ratio.

    Args:
        x: (n,) float32 samples.
        other: (m,) samples of the second recording, cut or zero-padded to n.
        rng: to draw from.
        low_db: minimum ratio of the energies of the first and the second recording in dB.
        high_db: maximum ratio.
    """
    added = np.zeros_like(x)
    added[: len(other)] = other[: len(x)]
    added = np.roll(added, int(rng.integers(max(1, len(x)))))
    return x + added * _level(x, added, rng.uniform(low_db, high_db))


def time_shift(x: Array, rng: np.random.Generator, most: float = 1.0) -> Array:
    """Shift circularly by a random fraction of the length.

    Args:
        x: (n, ...) samples, or frames of features.
        rng: to draw from.
        most: maximum fraction, in either direction.
    """
    reach = int(len(x) * most)
    return np.roll(x, int(rng.integers(-reach, reach + 1)), axis=0)


def spec_augment(
    features: Array,
    rng: np.random.Generator,
    *,
    frequency_masks: int = 2,
    frequency_width: int = 27,
    time_masks: int = 2,
    time_width: int = 100,
    time_share: float = 1.0,
    value: float | None = None,
) -> Array:
    """Mask ranges of bands and of frames: SpecAugment (Park et al., 2019) without time warping.

    Args:
        features: (frames, bands) float32.
        rng: to draw from.
        frequency_masks: number of frequency masks.
        frequency_width: maximum number of bands of each; widths are uniform from 0.
        time_masks: number of time masks.
        time_width: maximum number of frames of each.
        time_share: maximum fraction of all frames of each.
        value: to fill masks with; None for the mean of the features.
    """
    frames, bands = features.shape
    out = features.copy()
    fill = np.float32(features.mean() if value is None else value)
    for count, width, size, axis in (
        (frequency_masks, min(frequency_width, bands), bands, 1),
        (time_masks, min(time_width, int(time_share * frames)), frames, 0),
    ):
        if width < 0:
            raise ConfigError("a mask cannot have a negative width")
        for _ in range(count):
            chosen = int(rng.integers(width + 1))
            first = int(rng.integers(size - chosen + 1))
            if axis:
                out[:, first : first + chosen] = fill
            else:
                out[first : first + chosen] = fill
    return out


def _level(x: Array, added: Array, ratio_db: float) -> np.float32:
    """The factor that puts `added` this many dB below `x`; 0 if either is silent."""
    signal = float(np.mean(np.square(x, dtype=np.float64))) if len(x) else 0.0
    energy = float(np.mean(np.square(added, dtype=np.float64))) if len(added) else 0.0
    return np.float32(np.sqrt(signal / energy * 10 ** (-ratio_db / 10))) if energy > 0 else np.float32(0)
