"""The words of `unisono data`, `export`, `import` and `find-lr` that are not settings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from unisono.config.schema import Positive, Settings


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


class Export(Settings):
    """Of `unisono export`."""

    to: Literal["hf", "safetensors", "onnx"] = Field(
        "hf",
        description="hf: what transformers loads, or PEFT for adapters; safetensors: the arrays under their names; "
        "onnx: the model as a graph, compared with torch on real rows",
    )
    step: NonNegativeInt | None = Field(None, description="step of the checkpoint to export; null: the newest")
    out: Path | None = Field(None, description="folder to create; null: RUN/exports/step-…-hf")
    shard_mb: Positive = Field(5000.0, description="maximum MB per file, unless a single tensor is larger")
    processes: PositiveInt | Literal["auto"] = Field(
        "auto", description="how many write at a time, each its own files; auto: one per core and file at most"
    )
    ema: bool = Field(False, description="export the moving average of the weights (ema.decay)")
    dtype: Literal["kept", "fp64", "fp32", "bf16", "fp16"] = Field(
        "kept", description="dtype of floating-point tensors; kept: as in the run"
    )
    merge: bool = Field(False, description="merge adapters into the weights, instead of exporting adapters alone")

    @model_validator(mode="after")
    def _check_onnx(self) -> Export:
        """An ONNX model is one file in fp32, written by this process, and its adapters are merged."""
        fixed = {"dtype": ("kept", "fp32")}
        for name in ("shard_mb", "processes", "merge", "dtype"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if self.to == "onnx" and value not in fixed.get(name, (default,)):
                raise ValueError(
                    f"{name}={str(value).lower()} has no effect on to=onnx, which writes one model in fp32 with its "
                    "adapters merged; leave it out"
                )
        return self


class Import(Settings):
    """Of `unisono import`."""

    out: Path = Field(description="NAME.safetensors for one file, else a folder to create")
    key: str | None = Field(
        None,
        description="where in a .pt file, or a folder of torch.distributed.checkpoint, weights are, e.g. state_dict, "
        "or a/b for a in b",
    )
    like: Path | None = Field(
        None,
        description="folder of a transformers model that the weights are for: names of torchtitan are translated, all "
        "names and shapes checked, and its settings and tokenizer copied",
    )
    moments: Path | None = Field(
        None,
        description="NAME.safetensors for the moments of Adam in a folder of torch.distributed.checkpoint, with which "
        "optim.moments=NAME.safetensors begins a run",
    )
    shard_mb: Positive = Field(5000.0, description="MB per file of a folder")

    @model_validator(mode="after")
    def _check_moments(self) -> Import:
        if self.moments is not None and self.moments.suffix != ".safetensors":
            raise ValueError(f"moments={self.moments} is one file; give NAME.safetensors")
        if self.moments is not None and self.moments == self.out:
            raise ValueError(f"moments={self.moments} is also out=; give them files of their own")
        return self


class FindLr(Settings):
    """Of `unisono find-lr`."""

    min_lr: Positive = Field(1e-7, description="rate of the first step")
    max_lr: Positive = Field(10.0, description="rate of the last step, unless the loss diverges before")
    steps: Annotated[int, Field(ge=20)] = Field(200, description="updates, each on a batch of its own")

    @model_validator(mode="after")
    def _check_range(self) -> FindLr:
        if self.min_lr >= self.max_lr:
            raise ValueError(f"min_lr={self.min_lr:g} has to be smaller than max_lr={self.max_lr:g}")
        return self
