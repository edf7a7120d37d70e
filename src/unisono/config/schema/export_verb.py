"""The words of `unisono export` and `unisono import`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from unisono.config.schema.base import Positive, Settings


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
