"""The words of `unisono data`, `unisono export` and `unisono import` that are not settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from unisono.config.schema.base import Positive, Settings


class Prepare(Settings):
    """Of `unisono data prepare`."""

    out: Path | None = Field(None, description="folder for the shards; null: the recipe's cache")
    shard: str = Field("1/1", description="make only part i of n of the shards, as i/n")
    workers: PositiveInt | Literal["auto"] = Field(
        "auto", description="shards to make at a time; auto: the number of cores"
    )
    worker_kind: Literal["threads", "processes"] = Field(
        "threads", description="processes are faster where Python code takes the time"
    )
    shard_mb: Positive | None = Field(None, description="MB of the source per shard; null: 64")


class Reshard(Settings):
    """Of `unisono data reshard`."""

    shards: PositiveInt = Field(description="number of new shards")
    out: Path = Field(description="folder for the new shards")


class Preview(Settings):
    """Of `unisono data preview`."""

    position: NonNegativeInt = Field(
        0, description="position of the first row to show, counted from the start of the run"
    )
    count: PositiveInt = Field(8, description="number of rows to show")
    world_size: PositiveInt | None = Field(None, description="number of processes; null: layout.world_size")


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


class Export(Settings):
    """Of `unisono export`."""

    to: Literal["hf", "safetensors"] = Field(
        "hf", description="hf: what transformers loads, or PEFT for adapters; safetensors: the arrays under their names"
    )
    step: NonNegativeInt | None = Field(None, description="step of the checkpoint to export; null: the newest")
    out: Path | None = Field(None, description="folder to create; null: RUN/exports/step-…-hf")
    shard_mb: Positive = Field(5000.0, description="maximum MB per file, unless a single tensor is larger")
    processes: PositiveInt | Literal["auto"] = Field(
        "auto", description="processes that write, each its own files; auto: one per core, file and GiB at most"
    )
    ema: bool = Field(False, description="export the moving average of the weights (ema.decay)")
    dtype: Literal["kept", "fp64", "fp32", "bf16", "fp16"] = Field(
        "kept", description="dtype of floating-point tensors; kept: as in the run"
    )
    merge: bool = Field(False, description="merge adapters into the weights, instead of exporting adapters alone")


class Import(Settings):
    """Of `unisono import`."""

    out: Path = Field(description="NAME.safetensors for one file, else a folder to create")
    key: str | None = Field(None, description="where in a .pt file the weights are, e.g. state_dict, or a/b for a in b")
    shard_mb: Positive = Field(5000.0, description="MB per file of a folder")
