"""Resampling with a windowed sinc, whose taps are computed once for each pair of rates.

For each output of one period, a kernel contains the nonzero taps and their position. It is stateless: clips do not
affect each other, the first output is aligned with the first input (no delay), and the tail is kept.

The kernel's formula is that of `torchaudio.functional.resample` (after J. O. Smith, "Digital Audio Resampling Home
Page"), computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unisono_audio.shared import ConfigError, DataError, nearest

Method = Literal["sinc_hann", "kaiser_fast", "kaiser_best"]
Samples = NDArray[np.float32]
_MOST_TAPS = 1 << 22  # limit of a kernel's size in floats
_PHASES = 128  # minimum number of outputs per matrix product
_BLOCK = 32  # outputs computed from the same range of inputs


@dataclass(frozen=True)
class _Filter:
    """Width in zero crossings, cutoff as a fraction of the lower Nyquist frequency, and Kaiser's beta (0 for Hann)."""

    width: int
    rolloff: float
    beta: float = 0.0


METHODS: dict[str, _Filter] = {
    "sinc_hann": _Filter(6, 0.99),  # torchaudio's default
    "kaiser_fast": _Filter(16, 0.85, 8.555504641634386),
    "kaiser_best": _Filter(64, 0.9475937167399596, 14.769656459379492),
}


@dataclass(frozen=True, eq=False)
class Kernel:
    """The taps of one period of a resampler.

    Attributes:
        source: input samples of a period.
        target: outputs of a period.
        left: number of samples before the period that the first output uses.
        first: (target,) int32, where the taps of each output begin, counted from `left` before the period.
        taps: (target, n) float32.
    """

    source: int
    target: int
    left: int
    first: NDArray[np.int32]
    taps: NDArray[np.float32]

    def length(self, samples: int) -> int:
        """Number of outputs for a number of samples: all that begin before the input ends."""
        return -(-samples * self.target // self.source)


@lru_cache(maxsize=64)
def kernel(from_rate: int, to_rate: int, method: Method = "sinc_hann") -> Kernel:
    """The kernel between two rates in Hz, computed once.

    Raises:
        ConfigError: for an unknown method.
        DataError: if the ratio of the rates needs a kernel of more than 16 MiB.
    """
    if method not in METHODS:
        raise ConfigError(f"resample method '{method}' does not exist, {nearest(method, METHODS)}")
    common = gcd(from_rate, to_rate)
    source, target = from_rate // common, to_rate // common
    filter = METHODS[method]
    base = min(source, target) * filter.rolloff
    reach = filter.width * source / base  # input samples on each side
    n = int(2 * reach) + 2
    if n * target > _MOST_TAPS:
        raise DataError(
            f"a recording of {from_rate} Hz cannot be resampled to {to_rate} Hz: the ratio {source}:{target} needs a "
            f"kernel of {n * target / 2**18:.0f} MiB; convert the recording, or choose a rate that divides better"
        )
    at = np.arange(target)[:, None] * source / target  # of each output, in input samples
    first = np.floor(at[:, 0] - reach).astype(np.int64)
    t = (first[:, None] + np.arange(n)[None, :] - at) / source * base  # in zero crossings
    inside = np.abs(t) < filter.width
    if filter.beta:
        window = np.i0(filter.beta * np.sqrt(np.clip(1 - (t / filter.width) ** 2, 0, None))) / np.i0(filter.beta)
    else:
        window = np.cos(t * np.pi / filter.width / 2) ** 2
    taps = np.where(inside, np.sinc(t) * window * (base / source), 0.0).astype(np.float32)
    left = int(-first.min())
    return Kernel(source, target, left, (first + left).astype(np.int32), taps)


def resample_numpy(x: Samples, from_rate: int, to_rate: int, method: Method = "sinc_hann") -> Samples:
    """Resample with matrix products, computing outputs in blocks that use the same range of inputs.

    Args:
        x: (n,) float32 samples at `from_rate`.
        from_rate: in Hz.
        to_rate: in Hz.
        method: which filter.

    Returns:
        (ceil(n * to_rate / from_rate),) float32.
    """
    if from_rate == to_rate:
        return x
    table = kernel(from_rate, to_rate, method)
    times = ceil(_PHASES / table.target)
    source, target = table.source * times, table.target * times
    length = table.length(len(x))
    periods = -(-length // target)
    n = table.taps.shape[1]
    padded = np.zeros(table.left + periods * source + int(table.first[-1]) + n + source, dtype=np.float32)
    padded[table.left : table.left + len(x)] = x
    out = np.empty((periods, target), dtype=np.float32)
    for begin, first, block in _blocks(from_rate, to_rate, method):
        rows = np.lib.stride_tricks.as_strided(
            padded[first:], (periods, block.shape[0]), (source * padded.itemsize, padded.itemsize), writeable=False
        )
        out[:, begin : begin + block.shape[1]] = rows @ block
    return out.reshape(-1)[:length]


@lru_cache(maxsize=64)
def _blocks(from_rate: int, to_rate: int, method: Method) -> list[tuple[int, int, Samples]]:
    """For each block of outputs: the first one, the first input, and the taps (inputs, outputs)."""
    table = kernel(from_rate, to_rate, method)
    times = ceil(_PHASES / table.target)
    first = (np.arange(times)[:, None] * table.source + table.first[None, :]).reshape(-1).astype(np.int64)
    taps = np.tile(table.taps, (times, 1))
    n = taps.shape[1]
    blocks = []
    for begin in range(0, len(first), _BLOCK):
        own = first[begin : begin + _BLOCK]
        matrix = np.zeros((int(own.max() - own.min()) + n, len(own)), dtype=np.float32)
        for column, start in enumerate(own - own.min()):
            matrix[start : start + n, column] = taps[begin + column]
        blocks.append((begin, int(own.min()), matrix))
    return blocks
