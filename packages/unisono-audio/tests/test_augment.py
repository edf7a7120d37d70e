"""Augmentation: pure functions of an array and a generator that is keyed by the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unisono_audio as audio

from .make_golden import clip

x = clip(16000, 1.0)
noise = clip(16000, 0.4, seed=3)
features = audio.fbank(x, 16000, 40, backend="numpy")
ACTS: dict[str, Any] = {
    "gain": lambda rng: audio.gain(x, rng),
    "white noise": lambda rng: audio.add_noise(x, rng, 10.0),
    "noise": lambda rng: audio.add_noise(x, rng, 10.0, noise),
    "mix": lambda rng: audio.mix(x, noise, rng),
    "shift": lambda rng: audio.time_shift(x, rng),
    "spec_augment": lambda rng: audio.spec_augment(features, rng, frequency_width=8, time_width=20),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_row_is_augmented_alike_whenever_it_is_made_and_another_otherwise(name: str) -> None:
    before = x.copy(), features.copy()
    made = {(epoch, row): ACTS[name](np.random.default_rng((7, epoch, row))) for epoch in range(2) for row in range(2)}
    again = ACTS[name](np.random.default_rng((7, 1, 0)))
    assert (made[1, 0] == again).all()
    assert made[1, 0].dtype == np.float32
    assert len({values.tobytes() for values in made.values()}) == 4
    assert (before[0] == x).all()
    assert (before[1] == features).all()


@pytest.mark.parametrize("ratio", [-5.0, 0.0, 20.0])
def test_noise_has_the_ratio_that_is_asked_for(ratio: float) -> None:
    for recording in (None, noise):
        added = audio.add_noise(x, np.random.default_rng(0), ratio, recording) - x
        measured = 10 * np.log10(np.mean(x.astype(float) ** 2) / np.mean(added.astype(float) ** 2))
        assert measured == pytest.approx(ratio, abs=0.01)


def test_silence_stays_finite() -> None:
    silence = np.zeros(100, np.float32)
    rng = np.random.default_rng(0)
    for made in (
        audio.add_noise(silence, rng, 10.0),
        audio.add_noise(x, rng, 10.0, silence),
        audio.mix(silence, silence, rng),
    ):
        assert np.isfinite(made).all()


def test_gain_and_shift_do_what_they_say() -> None:
    rng = np.random.default_rng(0)
    gains = [20 * np.log10(audio.gain(x, rng, -3.0, 9.0)[0] / x[0]) for _ in range(200)]
    assert -3 <= min(gains) < -2
    assert 8 < max(gains) <= 9
    assert np.allclose(np.sort(audio.time_shift(x, rng)), np.sort(x))


def test_spec_augment_masks_no_more_than_it_may() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        made = audio.spec_augment(
            features, rng, frequency_masks=1, frequency_width=8, time_masks=1, time_width=20, value=99.0
        )
        bands, frames = (made == 99).all(0).sum(), (made == 99).all(1).sum()
        assert bands <= 8
        assert frames <= 20
        assert ((made == 99) | (made == features)).all()
