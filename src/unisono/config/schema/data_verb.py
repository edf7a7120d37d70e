"""The words of `unisono data` that are not the recipe's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from unisono.config.schema.base import Positive, Settings


class Prepare(Settings):
    """Of `unisono data prepare`."""

    out: Path | None = Field(None, description="folder for the shards; null: the recipe's cache")
    shard: str = Field("1/1", description="which share of the shards is made, i/n")
    workers: PositiveInt | Literal["auto"] = Field("auto", description="shards made at the same time; auto: the cores")
    worker_kind: Literal["threads", "processes"] = Field(
        "threads", description="processes where Python itself is what takes the time"
    )
    shard_mb: Positive | None = Field(None, description="MB of the source per shard; null: 64")


class Reshard(Settings):
    """Of `unisono data reshard`."""

    shards: PositiveInt = Field(description="how many there are to be")
    out: Path = Field(description="folder for them")


class Preview(Settings):
    """Of `unisono data preview`."""

    position: NonNegativeInt = Field(0, description="rows of the run before the first that is shown")
    count: PositiveInt = Field(8, description="rows that are shown")
    world_size: PositiveInt | None = Field(None, description="processes; null: layout.world_size")


class Scan(Settings):
    """Of `unisono data scan`."""

    out: Path = Field(Path("bad_recordings.jsonl"), description="file for the rows that cannot be decoded")
    audio: str | None = Field(None, description="column of the recordings; null: audio, or file and the like")
    workers: PositiveInt | Literal["auto"] = Field("auto", description="recordings decoded at a time; auto: the cores")


class AudioCache(Settings):
    """Of `unisono data audio-cache`."""

    out: Path = Field(description="folder for the cache")
    audio: str | None = Field(None, description="column of the recordings; null: audio, or file and the like")
    leave_out: Path | None = Field(None, description="file of `unisono data scan`, whose rows are left out")
    kind: Literal["features", "samples"] = Field(
        "features", description="Kaldi filter banks, or the samples themselves"
    )
    windows: Literal["first", "centre", "all"] = Field(
        "first", description="which part of each recording; all: a row each"
    )
    rate: PositiveInt = Field(32_000, description="Hz that everything is resampled to")
    duration: Positive = Field(5.0, description="seconds of a window")
    num_mel_bins: PositiveInt = Field(128, description="bands")
    window_type: Literal["povey", "hanning", "hamming", "blackman", "rectangular"] = Field(
        "hanning", description="of a frame"
    )
    frames: PositiveInt | None = Field(None, description="frames that rows are padded to; null: those of the duration")
    mean: float = Field(0.0, description="is taken off the features")
    std: Positive = Field(1.0, description="that they are divided by then")
    method: Literal["sinc_hann", "kaiser_fast", "kaiser_best"] = Field("sinc_hann", description="of resampling")
    dtype: Literal["float32", "float16"] = Field("float32", description="of what is kept")
    on_error: Literal["stop", "mask"] = Field(
        "stop", description="of a recording that cannot be used; mask: leave it out"
    )
    workers: PositiveInt | Literal["auto"] = Field("auto", description="threads; auto: the cores")
