"""From recordings to normalised features, for training with any framework: NumPy arrays in and out.

import unisono_audio as audio

x, rate = audio.decode("recording.flac", start=12.0, duration=5.0)
x = audio.resample(x, rate, 32_000)
features = audio.fbank(x, 32_000, num_mel_bins=128)             # Kaldi's, (498, 128)

pipeline = audio.Pipeline(rate=32_000, duration=5.0, frames=512, mean=-7.2, std=8.86)
batch = pipeline(["a.flac", "b.ogg"], threads=2).values         # (2, 512, 128), in one call
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unisono_audio import codecs
from unisono_audio.augment import add_noise, gain, mix, spec_augment, time_shift
from unisono_audio.batches import (
    GOOD,
    NEEDS_FFMPEG,
    Answer,
    Backend,
    Batch,
    Pipeline,
    add_table,
    decode_window,
    native_engine,
    pad_and_normalise,
)
from unisono_audio.codecs import Header
from unisono_audio.features import Fbank, Features, LogMel, Mfcc, plan_of
from unisono_audio.recordings import CENTRE, FIRST, ByteRange, Recording, Window, data_of, name_of, windows
from unisono_audio.resample import Method, kernel, resample_numpy
from unisono_audio.shared import ConfigError, DataError

__all__ = [
    "CENTRE",
    "FIRST",
    "Batch",
    "ByteRange",
    "Decoded",
    "Fbank",
    "Header",
    "LogMel",
    "Mfcc",
    "Pipeline",
    "Window",
    "add_noise",
    "decode",
    "fbank",
    "gain",
    "log_mel",
    "mfcc",
    "mix",
    "pad_and_normalise",
    "probe",
    "resample",
    "spec_augment",
    "time_shift",
    "windows",
]

Array = NDArray[np.float32]


class Decoded(NamedTuple):
    """Samples of a recording.

    Attributes:
        samples: (n,) float32 in [-1, 1], mixed to mono.
        rate: in Hz.
    """

    samples: Array
    rate: int


def probe(recording: Recording) -> Header:
    """Read a recording's header: format, rate, channels and frames.

    Raises:
        DataError: if it is not audio, or its header is damaged.
    """
    try:
        return codecs.probe(data_of(recording))
    except codecs.NeedsFFmpeg as need:
        samples, rate = codecs.ffmpeg(data_of(recording), str(need))
        return Header("other", rate, 1, len(samples))
    except codecs.BadRecording as error:
        raise DataError(f"{name_of(recording)} {error}") from error


def decode(
    recording: Recording, start: float = 0.0, duration: float | None = None, *, backend: Backend = "auto"
) -> Decoded:
    """Decode a recording, or a part of it without decoding what comes before.

    Args:
        recording: bytes, a path, a URL, or a `ByteRange`.
        start: in seconds.
        duration: in seconds; None for the rest of the recording.
        backend: `native` or `numpy`; `auto` uses the native core if it is available.

    Raises:
        DataError: if the recording cannot be used, with its name and the reason.
    """
    pipeline = Pipeline(duration=duration, features=None, backend=backend)
    data, window = data_of(recording), Window(start)
    if pipeline.native:
        answer = _run(_engine(None, 0), data, start, duration)
        if answer.kind == GOOD:
            return Decoded(answer.values, answer.rate)
        if answer.kind != NEEDS_FFMPEG:
            raise DataError(f"{name_of(recording)} {answer.text}")
    try:
        values, rate, _ = decode_window(data, window, duration)
    except codecs.BadRecording as error:
        raise DataError(f"{name_of(recording)} {error}") from error
    return Decoded(values, rate)


def resample(
    x: Array, from_rate: int, to_rate: int, method: Method = "sinc_hann", *, backend: Backend = "auto"
) -> Array:
    """Resample with a windowed sinc: no delay, the tail is kept, and clips do not affect each other.

    Args:
        x: (n,) float32 samples.
        from_rate: in Hz.
        to_rate: in Hz.
        method: `sinc_hann` (torchaudio's default), `kaiser_fast` or `kaiser_best`.
        backend: as in `decode`.

    Returns:
        (ceil(n * to_rate / from_rate),) float32.
    """
    for rate in (from_rate, to_rate):
        if rate < 1:
            raise ConfigError(f"a rate of {rate} Hz is not valid")
    x = _as_samples(x)
    if from_rate == to_rate or not len(x):
        return x.copy()
    if not _uses_core(backend):
        return resample_numpy(x, from_rate, to_rate, method)
    return np.asarray(_run(_resampler(from_rate, to_rate, method), (x, from_rate)).values)


def fbank(x: Array, rate: int, num_mel_bins: int = 80, *, backend: Backend = "auto", **settings: Any) -> Array:
    """Kaldi's log filter-bank energies, equal to `torchaudio.compliance.kaldi.fbank` without dither.

    Args:
        x: (n,) float32 samples.
        rate: in Hz.
        num_mel_bins: bands.
        backend: as in `decode`.
        settings: of `Fbank`.

    Returns:
        (frames, num_mel_bins) float32; inputs shorter than a frame are zero-padded to one.
    """
    return _features(Fbank(num_mel_bins, **settings), x, rate, backend)


def mfcc(x: Array, rate: int, num_ceps: int = 13, *, backend: Backend = "auto", **settings: Any) -> Array:
    """Kaldi's cepstral coefficients, equal to `torchaudio.compliance.kaldi.mfcc` without dither and energy.

    Args:
        x: (n,) float32 samples.
        rate: in Hz.
        num_ceps: coefficients.
        backend: as in `decode`.
        settings: of `Mfcc`.

    Returns:
        (frames, num_ceps) float32.
    """
    return _features(Mfcc(num_ceps, **settings), x, rate, backend)


def log_mel(x: Array, rate: int, n_mels: int = 128, *, backend: Backend = "auto", **settings: Any) -> Array:
    """A log-mel spectrogram, equal to the logarithm of `torchaudio.transforms.MelSpectrogram`, frames first.

    Args:
        x: (n,) float32 samples.
        rate: in Hz.
        n_mels: bands.
        backend: as in `decode`.
        settings: of `LogMel`.

    Returns:
        (frames, n_mels) float32.
    """
    return _features(LogMel(n_mels=n_mels, **settings), x, rate, backend)


def _features(features: Features, x: Array, rate: int, backend: Backend) -> Array:
    x = _as_samples(x)
    if not _uses_core(backend):
        return plan_of(features, rate)(x)
    return np.asarray(_run(_engine(features, rate), (x, rate)).values)


def _run(engine: Any, recording: Any, start: float = 0.0, duration: float | None = None) -> Answer:
    return Answer(*engine.run([recording], np.array([[start, 0.0, duration or 0.0]]), None, 1)[0])


def _uses_core(backend: Backend) -> bool:
    return Pipeline(features=None, backend=backend).native


@lru_cache(maxsize=32)
def _engine(features: Features | None, rate: int) -> Any:
    return native_engine(None if features is None else plan_of(features, rate), rate, 0.0)


@lru_cache(maxsize=64)
def _resampler(from_rate: int, to_rate: int, method: Method) -> Any:
    kernel(from_rate, to_rate, method)  # raises for impossible rates
    engine = native_engine(None, to_rate, 0.0)
    add_table(engine, from_rate, to_rate, method)
    return engine


def _as_samples(x: Array) -> Array:
    array = np.ascontiguousarray(x, dtype=np.float32)
    if array.ndim != 1:
        raise DataError(f"samples have the shape {array.shape}, not (n,); mix the channels first")
    return array
