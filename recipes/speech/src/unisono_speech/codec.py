"""Between sound and codes: one interface, and the codec that needs no weights.

The small codec is residual k-means over log-mel frames: four frames of 10 ms make one of 40 ms, and each codebook says
what the ones before it left. Sound comes back by the filter bank's pseudo-inverse, and its phase by the method of
Griffin and Lim (1984). It is no match for a neural codec; it is there so that a run without downloads can be heard.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import unisono_audio as audio
from unisono import DataError, generator
from unisono.recipe_tools import safe_paths
from unisono_speech.settings import KMeans

VERSION = 1  # of the codes that recordings get
FRAMES = 25  # a second
_PARTS = 4  # log-mel frames in one of the codec's
_FLOOR = 1e-3  # least energy of a band, about 60 dB below a loud voice
_MOST = 16_000  # frames that a codebook is fitted on
_ROUNDS = 15  # of k-means

Codes = NDArray[np.int64]
Samples = NDArray[np.float32]


class Codec(Protocol):
    """Between sound and codes, both ways.

    Attributes:
        rate: of the sound, in Hz.
        codebooks: codes of a frame.
        codes: entries of a codebook.
    """

    rate: int
    codebooks: int
    codes: int

    @property
    def digest(self) -> str:
        """All that decides which codes a recording gets."""

    def encode(self, samples: Samples) -> Codes:
        """Sound (n,) in [-1, 1] to codes (frames, codebooks)."""

    def decode(self, codes: Codes) -> Samples:
        """Codes (frames, codebooks) to sound (n,)."""

    def save(self, folder: Path) -> None:
        """Leave what `load` of its kind needs among a run's assets."""


class KMeansCodec:
    """Residual k-means over log-mel frames; `books` are (codebooks, codes, 4 · mels) float32."""

    NAME = "codec.npy"

    def __init__(self, config: KMeans, books: NDArray[np.float32]) -> None:
        self.config, self.books = config, books
        self.rate: int = config.rate
        self.codebooks, self.codes = config.codebooks, config.codes
        self._plan: Any = _features(config).plan(config.rate)

    @cached_property
    def digest(self) -> str:
        """All that decides which codes a recording gets."""
        return hashlib.sha256(address(self.config).encode() + self.books.tobytes()).hexdigest()[:32]

    def encode(self, samples: Samples) -> Codes:
        """Sound (n,) to codes (frames, codebooks): in each stage the nearest entry to what is left."""
        left = frames(self.config, samples)
        made = np.empty((len(left), self.codebooks), dtype=np.int64)
        for stage, book in enumerate(self.books):
            made[:, stage] = _nearest(left, book)
            left = left - book[made[:, stage]]
        return made

    def decode(self, codes: Codes) -> Samples:
        """Codes (frames, codebooks) to sound (frames · rate / 25,)."""
        if not len(codes):
            return np.zeros(0, dtype=np.float32)
        bands = sum(book[codes[:, stage]] for stage, book in enumerate(self.books))
        energies = np.exp(np.asarray(bands).reshape(-1, self.config.mels)) - _FLOOR
        magnitudes = np.sqrt(np.maximum(energies @ self._inverse, 0.0)).T  # (bins, frames)
        return _with_phase(magnitudes, self._plan.size, self._plan.hop, self.config.phase_steps)

    def save(self, folder: Path) -> None:
        """Write the codebooks."""
        np.save(folder / self.NAME, self.books)

    @classmethod
    def load(cls, config: KMeans, folder: Path) -> KMeansCodec:
        """The codec that `save` left; codebooks of other settings, or none, are refused."""
        try:
            with safe_paths.open_inside(folder, cls.NAME) as file:
                books = np.load(file, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / cls.NAME} cannot be read: {error}") from error
        if books.shape != (config.codebooks, config.codes, _PARTS * config.mels) or books.dtype != np.float32:
            raise DataError(f"{folder / cls.NAME} holds codebooks of other settings than data.codec")
        return cls(config, books)

    @cached_property
    def _inverse(self) -> NDArray[np.float64]:
        """(mels, bins): the least-squares spectrum of band energies."""
        inverse: NDArray[np.float64] = np.linalg.pinv(self._plan.banks.astype(np.float64), rcond=0.05)
        return inverse


def fit(config: KMeans, sounds: Iterable[Samples]) -> KMeansCodec:
    """Fit the codebooks to sounds at the codec's rate, one after the other, each on what the ones before it left.

    Raises:
        DataError: where there are fewer frames than entries of a codebook.
    """
    left = np.concatenate([frames(config, sound) for sound in sounds])
    if len(left) < config.codes:
        raise DataError(
            f"the training recordings have {len(left)} frames of 40 ms, fewer than data.codec.codes={config.codes}; "
            "lower it, or add recordings"
        )
    rng = generator("speech", "codec")
    if len(left) > _MOST:
        left = left[np.sort(rng.choice(len(left), _MOST, replace=False))]
    books = []
    for _ in range(config.codebooks):
        book = _centres(left, config.codes, rng)
        books.append(book)
        left = left - book[_nearest(left, book)]
    return KMeansCodec(config, np.stack(books))


def frames(config: KMeans, samples: Samples) -> NDArray[np.float32]:
    """Log-mel energies of 40 ms each, (frames, 4 · mels); the end is filled up with silence."""
    step = config.rate // FRAMES
    count = max(1, -(-len(samples) // step))
    filled = np.zeros(count * step, dtype=np.float32)
    filled[: len(samples)] = samples
    made = audio.log_mel(filled, config.rate, **asdict(_features(config)))
    return np.asarray(made, dtype=np.float32).reshape(count, _PARTS * config.mels)


def address(config: KMeans) -> str:
    """The settings that decide the codes, as JSON."""
    settings = {name: getattr(config, name) for name in ("rate", "mels", "codebooks", "codes")}
    return json.dumps([VERSION, settings])


def _features(config: KMeans) -> audio.LogMel:
    hop = config.rate // (FRAMES * _PARTS)
    return audio.LogMel(
        n_fft=config.rate * 4 // 125, hop_length=hop, n_mels=config.mels, mel_scale="slaney", floor=_FLOOR,
        drop_last=True,
    )  # fmt: skip


def _centres(points: NDArray[np.float32], count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """The entries of a codebook, (count, features): the points themselves where there are no more different ones."""
    from scipy.cluster.vq import kmeans2

    distinct = np.unique(points, axis=0)
    if len(distinct) <= count:
        return np.concatenate([distinct, np.zeros((count - len(distinct), points.shape[1]), dtype=np.float32)])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="One of the clusters is empty")  # its entry stays where it began
        book, _ = kmeans2(points.astype(np.float64), count, iter=_ROUNDS, minit="++", missing="warn", rng=rng)
    return np.asarray(book, dtype=np.float32)


def _nearest(points: NDArray[np.float32], book: NDArray[np.float32]) -> Codes:
    distances = (book.astype(np.float64) ** 2).sum(1) - 2 * points.astype(np.float64) @ book.astype(np.float64).T
    return np.asarray(distances.argmin(1), dtype=np.int64)


def _with_phase(magnitudes: NDArray[np.float64], size: int, hop: int, steps: int) -> Samples:
    """Sound whose spectrogram has these magnitudes (bins, frames), by Griffin and Lim's iteration."""
    from scipy.signal import ShortTimeFFT
    from scipy.signal.windows import hann

    transform = ShortTimeFFT(hann(size, sym=False), hop, fs=1)
    length = magnitudes.shape[1] * hop
    first = -transform.p_min  # the slice around sample 0, as in centred features
    wanted = np.zeros((magnitudes.shape[0], transform.p_num(length)))
    count = min(magnitudes.shape[1], wanted.shape[1] - first)
    wanted[:, first : first + count] = magnitudes[:, :count]
    phase = np.exp(2j * np.pi * generator("speech", "phase").random(wanted.shape))
    sound = transform.istft(wanted * phase, k1=length)
    for _ in range(steps):
        spectrum = transform.stft(sound)
        sound = transform.istft(wanted * np.exp(1j * np.angle(spectrum)), k1=length)
    return np.asarray(np.clip(sound, -1, 1), dtype=np.float32)
