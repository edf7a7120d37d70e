"""Features and resampling, native and NumPy, against arrays that torchaudio made and against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unisono_audio as audio
from unisono_audio import native_core
from unisono_audio.batches import add_table, native_engine
from unisono_audio.features import Fbank
from unisono_audio.shared import ConfigError, DataError

from .backends import BACKENDS, native
from .make_golden import FBANKS, GOLDEN, MELS, RATES, clip

golden = np.load(GOLDEN)


def oracle(x: Any, rate: int, spec: Fbank) -> Any:
    """Kaldi's fbank in float64, written down once more from its definition."""
    window, hop = int(rate * spec.frame_length / 1000), int(rate * spec.frame_shift / 1000)
    size = 1 << int(np.ceil(np.log2(window)))
    count = 1 + (len(x) - window) // hop
    frames = np.stack([x[i * hop : i * hop + window] for i in range(count)]).astype(np.float64)
    if spec.remove_dc_offset:
        frames -= frames.mean(1, keepdims=True)
    before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
    frames = frames - spec.preemphasis_coefficient * before
    turn = 2 * np.pi * np.arange(window) / (window - 1)
    shape = {"povey": (0.5 - 0.5 * np.cos(turn)) ** 0.85, "hanning": 0.5 - 0.5 * np.cos(turn),
             "hamming": 0.54 - 0.46 * np.cos(turn)}[spec.window_type]  # fmt: skip
    spectrum = np.abs(np.fft.rfft(frames * shape, size)) ** (2 if spec.use_power else 1)
    mel = lambda hz: 1127 * np.log1p(hz / 700)  # noqa: E731
    high = spec.high_freq if spec.high_freq > 0 else rate / 2 + spec.high_freq
    edges = np.linspace(mel(spec.low_freq), mel(high), spec.num_mel_bins + 2)
    bins = mel(np.arange(size // 2) * rate / size)
    weights = np.stack([np.interp(bins, edges[b : b + 3], [0, 1, 0], 0, 0) for b in range(spec.num_mel_bins)])
    return np.log(np.maximum(spectrum[:, :-1] @ weights.T, np.finfo(np.float32).eps))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FBANKS)
def test_fbank_is_kaldis_and_as_close_to_float64_as_torchaudios(name: str, backend: Any) -> None:
    rate, settings = FBANKS[name]
    x, reference = clip(rate), golden[f"fbank/{name}"]
    made = audio.fbank(x, rate, backend=backend, **settings)
    assert made.dtype == np.float32
    assert made.shape == reference.shape
    assert made.std() > 1  # it is not all floor
    off = np.abs(made - reference)
    assert off.mean() < 2e-5
    assert np.quantile(off, 0.999) < 1e-3
    assert off.max() < 1e-2
    exact = oracle(x, rate, Fbank(**settings))
    ours, theirs = np.abs(made - exact), np.abs(reference - exact)
    assert ours.mean() <= 1.1 * theirs.mean()
    assert np.quantile(ours, 0.999) <= 1.5 * np.quantile(theirs, 0.999)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mfcc_is_kaldis(backend: Any) -> None:
    made = audio.mfcc(clip(16000), 16000, backend=backend)
    assert np.abs(made - golden["mfcc"]).max() < 1e-2
    assert np.abs(made - golden["mfcc"]).mean() < 1e-4
    assert np.abs(golden["mfcc"]).mean() > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MELS)
def test_log_mel_is_torchaudios(name: str, backend: Any) -> None:
    made = audio.log_mel(clip(16000), 16000, backend=backend, **MELS[name])
    reference = golden[f"mel/{name}"].astype(np.float32)
    assert made.shape == reference.shape
    off = np.abs(made - reference)
    assert off.mean() < 5e-5
    assert off.max() < 2e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("source", "target"), RATES)
def test_resampling_is_torchaudios_without_delay_and_with_its_tail(source: int, target: int, backend: Any) -> None:
    made = audio.resample(clip(source), source, target, backend=backend)
    reference = golden[f"resample/{source}/{target}"]
    assert made.shape == reference.shape
    assert np.abs(made - reference).max() < 2e-6 < np.abs(reference).max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_method_moves_features_a_thousand_times_more_than_the_implementation(backend: Any) -> None:
    x = clip(44100)
    kaiser = audio.resample(x, 44100, 16000, "kaiser_best", backend=backend)
    assert np.abs(kaiser - golden["resample/kaiser_best"]).max() < 2e-6
    hann = audio.resample(x, 44100, 16000, backend=backend)
    moved = np.abs(audio.fbank(kaiser, 16000) - audio.fbank(hann, 16000)).mean()
    same = np.abs(audio.fbank(hann, 16000, backend="numpy") - audio.fbank(hann, 16000)).mean()
    assert moved > 1000 * max(same, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_of_one_clip_reaches_the_next(backend: Any) -> None:
    quiet, loud = np.zeros(3000, np.float32), np.ones(5000, np.float32)
    audio.resample(loud, 44100, 32000, backend=backend)
    assert not audio.resample(quiet, 44100, 32000, backend=backend).any()
    one = audio.Pipeline(rate=32000, duration=0.05, features=None, backend=backend)
    rows = one([(loud, 44100), (quiet, 44100), (loud, 44100)]).values
    assert not rows[1].any()
    assert (rows[0] == rows[2]).all()


@native
def test_every_instruction_set_gives_the_same_bits() -> None:
    x, spec = clip(44100), Fbank(128, window_type="hanning")
    sets = native_core.instruction_sets()
    assert len(sets) > 1
    made = []
    for name in sets:
        engine = native_engine(spec.plan(32000), 32000, 0.0, instruction_set=name)
        add_table(engine, 44100, 32000, "sinc_hann")
        made.append(engine.run([(x, 44100)], np.zeros((1, 3)), None, 1)[0][5])
    assert made[0].std() > 1
    assert all((values == made[0]).all() for values in made[1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_whispers_features_are_within_its_range(backend: Any) -> None:
    pipeline = audio.Pipeline(16000, 1.0, audio.LogMel.whisper(), mean=-4, std=4, backend=backend)
    made = pipeline([(clip(16000, 1.0), 16000)]).values
    assert made.shape == (1, 100, 80)
    assert 0 < made.max() - made.min() <= 2.0 + 1e-6


def test_settings_that_do_not_fit_are_refused() -> None:
    x = clip(8000)
    with pytest.raises(ConfigError, match="bands from 20 to 6000 Hz do not fit a rate of 8000 Hz"):
        audio.fbank(x, 8000, high_freq=6000)
    with pytest.raises(ConfigError, match="n_fft=514"):
        audio.log_mel(x, 8000, n_fft=514)
    with pytest.raises(ConfigError, match="did you mean 'kaiser_best'"):
        audio.resample(x, 8000, 16000, "kaiser_bst")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="needs a kernel of"):
        audio.resample(x, 999_983, 31_991)
    with pytest.raises(DataError, match="mix the channels first"):
        audio.fbank(x.reshape(2, -1), 8000)
