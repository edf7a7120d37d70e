"""The words of `unisono data scan` and `unisono data audio-cache`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from unisono.config.schema import Positive, Settings


class Scan(Settings):
    """Of `unisono data scan`."""

    out: Path = Field(Path("bad_recordings.jsonl"), description="file to write the rows to that cannot be decoded")
    audio: str | None = Field(None, description="column of the recordings; null: audio, file or a similar name")
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="recordings to decode at a time; auto: the number of cores"
    )


class AudioCache(Settings):
    """Of `unisono data audio-cache`."""

    out: Path = Field(description="folder for the cache")
    audio: str | None = Field(None, description="column of the recordings; null: audio, file or a similar name")
    leave_out: Path | None = Field(None, description="file written by `unisono data scan`; its rows are left out")
    kind: Literal["features", "samples"] = Field("features", description="cache Kaldi filter banks or the samples")
    windows: Literal["first", "centre", "all"] = Field(
        "first", description="which window of each recording; all: every window, one row each"
    )
    rate: PositiveInt = Field(32_000, description="sample rate in Hz to resample to")
    duration: Positive = Field(5.0, description="length of a window in seconds")
    num_mel_bins: PositiveInt = Field(128, description="number of mel bands")
    window_type: Literal["povey", "hanning", "hamming", "blackman", "rectangular"] = Field(
        "hanning", description="window function of a frame"
    )
    frames: PositiveInt | None = Field(None, description="number of frames to pad rows to; null: those of the duration")
    mean: float = Field(0.0, description="mean to subtract from the features")
    std: Positive = Field(1.0, description="standard deviation to divide them by")
    method: Literal["sinc_hann", "kaiser_fast", "kaiser_best"] = Field("sinc_hann", description="resampling method")
    dtype: Literal["float32", "float16"] = Field("float32", description="dtype of the cache")
    on_error: Literal["stop", "mask"] = Field(
        "stop", description="what to do with a recording that cannot be used; mask: leave it out"
    )
    workers: PositiveInt | Literal["auto"] = Field("auto", description="number of threads; auto: the number of cores")
