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
