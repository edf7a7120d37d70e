"""Audio features: Kaldi's fbank and MFCC, and the log-mel spectrograms of librosa, torchaudio and Whisper.

A description (`Fbank`, `Mfcc`, `LogMel`) and a sample rate give a `Plan` of plain arrays, from which both the native
core and the NumPy path compute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import ceil, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono_audio.shared import ConfigError

Array = NDArray[np.float32]
_EPSILON = 1.1920928955078125e-07  # of float32: Kaldi's minimum energy
_CHUNK = 128  # frames computed at a time, so that they stay in the cache


@dataclass(frozen=True, eq=False)
class Plan:
    """Frames -> window -> FFT -> filter bank -> logarithm (-> cosine transform), as arrays.

    Attributes:
        window: samples of a frame.
        hop: samples from frame to frame.
        size: of the FFT.
        shape: (window,) window function.
        banks: (size // 2 + 1, bands) weights of the filter bank.
        remove_mean: subtract each frame's mean first.
        emphasis: pre-emphasis coefficient.
        power: use energies rather than magnitudes.
        floor: lower bound of energies before the logarithm.
        scale: factor of the natural logarithm; 0 for no logarithm.
        cosines: (outputs, bands) matrix applied to the bands; empty for none.
        centred: frame i is centred on sample `i * hop` of the signal, mirrored at its ends; otherwise frames lie within
            the signal.
        drop_last: drop the last frame of a centred signal.
        dynamic_range: values are raised to at least the recording's maximum minus this; 0 for no limit.
    """

    window: int
    hop: int
    size: int
    shape: Array
    banks: Array
    remove_mean: bool = False
    emphasis: float = 0.0
    power: bool = True
    floor: float = _EPSILON
    scale: float = 1.0
    cosines: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.float32))
    centred: bool = False
    drop_last: bool = False
    dynamic_range: float = 0.0

    @property
    def width(self) -> int:
        """Number of features per frame."""
        return int(self.cosines.shape[0] or self.banks.shape[1])

    def frames(self, samples: int) -> int:
        """Number of frames for a number of samples; inputs shorter than a window are zero-padded to one."""
        if self.centred:
            return max(1, max(samples, self.size // 2 + 1) // self.hop + (not self.drop_last))
        return 1 + (max(samples, self.window) - self.window) // self.hop

    @cached_property
    def bands(self) -> tuple[NDArray[np.int32], NDArray[np.int32], Array]:
        """Each band's first bin and number of bins, (bands,) each, and the concatenated weights."""
        first, count, values = [], [], []
        for column in self.banks.T:
            there = np.flatnonzero(column)
            begin, end = (int(there[0]), int(there[-1]) + 1) if len(there) else (0, 0)
            first.append(begin)
            count.append(end - begin)
            values.append(column[begin:end])
        return np.array(first, np.int32), np.array(count, np.int32), np.concatenate(values).astype(np.float32)

    @cached_property
    def groups(self) -> list[tuple[slice, slice, Array]]:
        """Bands in groups, each with the bins that it needs: bins, bands, weights (bins, bands)."""
        first, count, _ = self.bands
        found = []
        for begin in range(0, self.banks.shape[1], 32):
            own = slice(begin, min(begin + 32, self.banks.shape[1]))
            bins = slice(int(first[own].min()), int((first[own] + count[own]).max()))
            found.append((bins, own, np.ascontiguousarray(self.banks[bins, own])))
        return found

    def __call__(self, x: Array) -> Array:
        """Compute features with NumPy.

        Args:
            x: (n,) float32.

        Returns:
            (frames, width) float32.
        """
        from scipy.fft import rfft  # unlike numpy's, computes in float32

        count = self.frames(len(x))
        if self.centred:
            inner = np.pad(x, (0, max(0, self.size // 2 + 1 - len(x))))
            lead = (self.size - self.window) // 2
            x = np.pad(inner, self.size // 2, mode="reflect")[lead:]
        elif len(x) < self.window:
            x = np.pad(x, (0, self.window - len(x)))
        x = np.ascontiguousarray(x, dtype=np.float32)
        frames = np.lib.stride_tricks.as_strided(
            x, (count, self.window), (self.hop * x.itemsize, x.itemsize), writeable=False
        )
        out = np.empty((count, self.width), dtype=np.float32)
        bands = np.empty((min(count, _CHUNK), self.banks.shape[1]), dtype=np.float32)
        buffer = np.zeros((min(count, _CHUNK), self.size), dtype=np.float32)
        shape, emphasis = self.shape, np.float32(self.emphasis)
        for begin in range(0, count, _CHUNK):
            part = frames[begin : begin + _CHUNK]
            n = len(part)
            if self.remove_mean:
                part = part - part.mean(axis=1, keepdims=True, dtype=np.float32)
            target = buffer[:n, : self.window]
            if self.emphasis:
                np.multiply(part[:, :-1], -emphasis, out=target[:, 1:])
                target[:, 1:] += part[:, 1:]
                np.multiply(part[:, 0], 1 - emphasis, out=target[:, 0])
                target *= shape
            else:
                np.multiply(part, shape, out=target)
            spectrum = rfft(buffer[:n], axis=1)
            pairs = spectrum.view(np.float32)
            np.multiply(pairs, pairs, out=pairs)
            energy = pairs[:, ::2] + pairs[:, 1::2]
            if not self.power:
                np.sqrt(energy, out=energy)
            for bins, own, weights in self.groups:
                bands[:n, own] = energy[:, bins] @ weights
            made = bands[:n]
            if self.scale:
                np.maximum(made, np.float32(self.floor), out=made)
                np.log(made, out=made)
                if self.scale != 1:
                    made *= np.float32(self.scale)
            out[begin : begin + n] = made @ self.cosines.T if len(self.cosines) else made
        if self.dynamic_range:
            np.maximum(out, out.max() - np.float32(self.dynamic_range), out=out)
        return out


@dataclass(frozen=True)
class Fbank:
    """Kaldi's log filter-bank energies; names and defaults are those of `torchaudio.compliance.kaldi.fbank`.

    Samples are not rescaled. Kaldi itself reads 16-bit integers, so multiply by 32768 to get its values.

    Attributes:
        num_mel_bins: bands.
        frame_length: in ms.
        frame_shift: in ms.
        low_freq: lower edge of the lowest band in Hz.
        high_freq: upper edge of the highest one; from 0 downwards, counted from the Nyquist frequency.
        window_type: `povey`, `hanning`, `hamming`, `blackman` or `rectangular`.
        preemphasis_coefficient: fraction of the previous sample to subtract.
        remove_dc_offset: subtract each frame's mean.
        use_power: use energies rather than magnitudes.
        use_log_fbank: take the logarithm.
    """

    num_mel_bins: int = 80
    frame_length: float = 25.0
    frame_shift: float = 10.0
    low_freq: float = 20.0
    high_freq: float = 0.0
    window_type: Literal["povey", "hanning", "hamming", "blackman", "rectangular"] = "povey"
    preemphasis_coefficient: float = 0.97
    remove_dc_offset: bool = True
    use_power: bool = True
    use_log_fbank: bool = True

    def plan(self, rate: int) -> Plan:
        """The plan for a sample rate in Hz.

        Raises:
            ConfigError: for settings that do not fit the rate.
        """
        return _kaldi(self, rate, np.zeros((0, 0), dtype=np.float32))


@dataclass(frozen=True)
class Mfcc:
    """Kaldi's cepstral coefficients (without energy), as `torchaudio.compliance.kaldi.mfcc`.

    Attributes:
        num_ceps: coefficients.
        cepstral_lifter: 0 for none.
        fbank: the underlying filter bank.
    """

    num_ceps: int = 13
    cepstral_lifter: float = 22.0
    fbank: Fbank = Fbank(num_mel_bins=23)

    def plan(self, rate: int) -> Plan:
        """The plan for a sample rate in Hz."""
        bands = self.fbank.num_mel_bins
        if self.num_ceps > bands:
            raise ConfigError(f"num_ceps={self.num_ceps} is more than num_mel_bins={bands}")
        place = np.arange(self.num_ceps)[:, None]
        cosines = np.cos(np.pi / bands * (np.arange(bands)[None, :] + 0.5) * place) * np.sqrt(2.0 / bands)
        cosines[0] = np.sqrt(1.0 / bands)
        if self.cepstral_lifter:
            cosines *= 1 + 0.5 * self.cepstral_lifter * np.sin(np.pi * place / self.cepstral_lifter)
        return _kaldi(self.fbank, rate, cosines.astype(np.float32))


@dataclass(frozen=True)
class LogMel:
    """A log-mel spectrogram; names and defaults are those of `torchaudio.transforms.MelSpectrogram`.

    Attributes:
        n_fft: size of the FFT, even, with no prime factor above 5.
        win_length: samples of the (periodic Hann) window; None for `n_fft`.
        hop_length: samples from frame to frame; None for half a window.
        n_mels: bands.
        f_min: lower edge of the lowest band in Hz.
        f_max: upper edge of the highest one; None for the Nyquist frequency.
        mel_scale: `htk` or `slaney` (librosa's default).
        norm: `slaney` gives all bands the same area (librosa's default).
        power: 2 for energies, 1 for magnitudes.
        center: centre frame i on sample `i * hop_length` of the signal, mirrored at its ends.
        log: `ln`, `log10`, `db` (10 log10), or None.
        floor: lower bound of energies before the logarithm.
        dynamic_range: raise values to at least the recording's maximum minus this (in units of `log`); 0 for no limit.
        drop_last: drop the last frame of a centred signal.
    """

    n_fft: int = 400
    win_length: int | None = None
    hop_length: int | None = None
    n_mels: int = 128
    f_min: float = 0.0
    f_max: float | None = None
    mel_scale: Literal["htk", "slaney"] = "htk"
    norm: Literal["slaney"] | None = None
    power: Literal[1, 2] = 2
    center: bool = True
    log: Literal["ln", "log10", "db"] | None = "ln"
    floor: float = 1e-10
    dynamic_range: float = 0.0
    drop_last: bool = False

    @classmethod
    def whisper(cls, n_mels: int = 80) -> LogMel:
        """Whisper's features at 16 kHz, except for its final scaling, which is a pipeline's `mean=-4, std=4`."""
        return cls(
            400, hop_length=160, n_mels=n_mels, mel_scale="slaney", norm="slaney", log="log10", dynamic_range=8.0,
            drop_last=True,
        )  # fmt: skip

    def plan(self, rate: int) -> Plan:
        """The plan for a sample rate in Hz."""
        window = self.win_length or self.n_fft
        hop = self.hop_length or window // 2
        if window > self.n_fft or window < 1 or hop < 1:
            raise ConfigError(f"win_length={window} and hop_length={hop} do not fit n_fft={self.n_fft}")
        _check_fft_size(self.n_fft)
        high = rate / 2 if self.f_max is None else self.f_max
        shape = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
        to_mel, to_hz = _SCALES[self.mel_scale]
        edges = to_hz(np.linspace(to_mel(np.array(self.f_min)), to_mel(np.array(high)), self.n_mels + 2))
        bins = np.linspace(0, rate / 2, self.n_fft // 2 + 1)[:, None]
        banks = _triangles(bins, edges)
        if self.norm == "slaney":
            banks *= 2.0 / (edges[2:] - edges[:-2])
        scale = {"ln": 1.0, "log10": 1 / log(10), "db": 10 / log(10), None: 0.0}[self.log]
        return Plan(
            window, hop, self.n_fft, shape.astype(np.float32), banks.astype(np.float32), power=self.power == 2,
            floor=self.floor, scale=scale, centred=self.center, drop_last=self.drop_last and self.center,
            dynamic_range=self.dynamic_range,
        )  # fmt: skip


Features = Fbank | Mfcc | LogMel


@lru_cache(maxsize=32)
def plan_of(features: Features, rate: int) -> Plan:
    """The plan for a description and a rate, cached."""
    return features.plan(rate)


def _kaldi(spec: Fbank, rate: int, cosines: Array) -> Plan:
    """A plan with Kaldi's frames and bands: `feature-window.cc` and `mel-computations.cc`."""
    window, hop = int(rate * spec.frame_length * 0.001), int(rate * spec.frame_shift * 0.001)
    if window < 2 or hop < 1:
        raise ConfigError(f"frames of {spec.frame_length} ms every {spec.frame_shift} ms are empty at {rate} Hz")
    size = 1 << max(2, ceil(np.log2(window)))
    nyquist = rate / 2
    high = spec.high_freq + nyquist if spec.high_freq <= 0 else spec.high_freq
    if not 0 <= spec.low_freq < high <= nyquist:
        raise ConfigError(f"bands from {spec.low_freq:g} to {high:g} Hz do not fit a rate of {rate} Hz")
    edges = np.linspace(_kaldi_mel(np.array(spec.low_freq)), _kaldi_mel(np.array(high)), spec.num_mel_bins + 2)
    bins = _kaldi_mel(np.arange(size // 2) * rate / size)[:, None]
    banks = np.zeros((size // 2 + 1, spec.num_mel_bins))  # the Nyquist frequency is in no band
    banks[:-1] = _triangles(bins, edges)
    turn = 2 * np.pi * np.arange(window) / (window - 1)
    hann = 0.5 - 0.5 * np.cos(turn)
    shapes = {
        "povey": hann**0.85,
        "hanning": hann,
        "hamming": 0.54 - 0.46 * np.cos(turn),
        "blackman": 0.42 - 0.5 * np.cos(turn) + 0.08 * np.cos(2 * turn),
        "rectangular": np.ones(window),
    }
    return Plan(
        window, hop, size, shapes[spec.window_type].astype(np.float32), banks.astype(np.float32),
        remove_mean=spec.remove_dc_offset, emphasis=spec.preemphasis_coefficient, power=spec.use_power,
        scale=1.0 if spec.use_log_fbank else 0.0, cosines=cosines,
    )  # fmt: skip


def _triangles(bins: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Triangular bands: the weights of frequencies (bins, 1) between edges (bands + 2,), (bins, bands)."""
    up = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return np.maximum(0.0, np.minimum(up, down))


def _check_fft_size(size: int) -> None:
    rest = size // 2
    for prime in (2, 3, 5):
        while rest > 1 and rest % prime == 0:
            rest //= prime
    if size < 4 or size % 4 or rest != 1:
        raise ConfigError(f"n_fft={size}: choose a multiple of 4 without a prime factor above 5, e.g. 400, 512 or 1024")


def _kaldi_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1127.0 * np.log(1.0 + hz / 700.0)


def _slaney_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear below 1 kHz, logarithmic above (M. Slaney, Auditory Toolbox, 1998)."""
    return np.where(hz < 1000, hz * 3 / 200, 15 + np.log(np.maximum(hz, 1e-9) / 1000) * 27 / log(6.4))


def _slaney_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * log(6.4) / 27))


def _htk_mel(hz: NDArray[np.float64]) -> NDArray[np.float64]:
    return 2595.0 * np.log10(1.0 + hz / 700.0)


def _htk_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)


_SCALES = {"htk": (_htk_mel, _htk_hz), "slaney": (_slaney_mel, _slaney_hz)}
