"""The settings of data that every recipe has: the group `data`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from unisono.config.schema import NonNegative, Positive, Settings
from unisono.runtime.errors import nearest


class WeightChange(Settings):
    """Other weights of a mixture from some step on."""

    step: PositiveInt = Field(description="number of updates after which the weights change")
    weights: dict[str, NonNegative] = Field(description="weight of each source")


class Mixture(Settings):
    """How much of each source a run sees."""

    weights: dict[str, NonNegative] = Field(description="weight of each source; 0: never read")
    by: Literal["samples", "tokens"] = Field("samples", description="unit that the weights divide")
    grouped: bool = Field(
        False,
        description="whether every global batch has the same rows of each source side by side, so that a row keeps its "
        "source and a micro-batch holds rows of one; else sources alternate at random within blocks",
    )
    until: Literal["first", "all"] = Field(
        "all", description="an epoch ends when the first source is used up, or when all have been"
    )
    block: Annotated[int, Field(ge=1, le=100_000)] = Field(
        1000, description="number of positions within which every source has its exact share"
    )
    changes: list[WeightChange] = Field([], description="changes of the weights at later steps, in order")

    @model_validator(mode="after")
    def _check_weights(self) -> Mixture:
        where = [("weights", self.weights)] + [(f"changes.{n}.weights", c.weights) for n, c in enumerate(self.changes)]
        for key, weights in where:
            if not sum(weights.values()) > 0:
                raise ValueError(f"data.mixture.{key} sum to {sum(weights.values()):g}; at least one must be positive")
            for name in weights.keys() - self.weights.keys():
                raise ValueError(f"data.mixture.{key}: '{name}' is not in weights, {nearest(name, self.weights)}")
            for name in self.weights.keys() - weights.keys():
                raise ValueError(f"data.mixture.{key} has no weight for '{name}'; give it one (0 to leave it out)")
        if self.grouped and (self.changes or self.by == "tokens"):
            refused = "changes" if self.changes else "by=tokens"
            raise ValueError(
                f"data.mixture.{refused}: with grouped=true each source has the same rows of every global batch; leave "
                "out one of the two"
            )
        for before, after in pairwise(change.step for change in self.changes):
            if before >= after:
                raise ValueError(f"data.mixture.changes: step {after} comes after step {before}; put them in order")
        return self


class Packing(Settings):
    """Several samples in one row."""

    length: PositiveInt | None = Field(
        None, description="capacity of a row in units, e.g. tokens; null: as the task says"
    )
    method: Literal["online", "offline", "concatenate"] = Field(
        "online",
        description="online: best fit over open_bins, in the samples' order; offline: best fit, the longest first; "
        "concatenate: one after the other, cut where a row is full",
    )
    open_bins: PositiveInt = Field(64, description="online: number of rows being filled at a time")
    chunk: PositiveInt = Field(8192, description="number of samples to pack together; rows never span chunks")
    cut: Literal["long", "never"] = Field(
        "long", description="long: split samples longer than a row; never: raise an error for them"
    )


class Data(Settings):
    """What every recipe's `data` group has."""

    workers: PositiveInt | Literal["auto"] = Field(
        "auto",
        description="workers per process that prepare micro-batches; auto: 1, or as many as the measured cost needs "
        "and the cores allow",
    )
    worker_kind: Literal["threads", "processes", "auto"] = Field(
        "threads", description="processes are faster where Python code takes the time; auto: measured before the start"
    )
    prefetch: PositiveInt | None = Field(
        None, description="micro-batches prepared ahead, per process; null: two for each worker, and at least 4"
    )
    prefetch_mb: Positive = Field(512.0, description="maximum MB prepared ahead, per process")
    storage: Literal["auto", "local", "remote"] = Field(
        "auto",
        description="remote: reading waits for a network, so there are more workers; auto: remote for URLs. A mounted "
        "network file system counts as local unless set",
    )
    on_error: Literal["stop", "mask"] = Field(
        "stop",
        description="when a sample cannot be built: stop the run, or mask it (its place stays empty, counts nothing, "
        "and is reported)",
    )
    shuffle: Literal["full", "blocks", "none"] = Field(
        "full", description="full: one permutation of all rows; blocks: for sources that are read block by block"
    )
    window: PositiveInt = Field(8, description="shuffle=blocks: blocks whose rows are shuffled among each other")
    lanes: PositiveInt | None = Field(
        None,
        description="parts of the order that are read independently of each other, with blocks and packing; world "
        "sizes that divide them share one order; null: the largest divisor of train.global_batch up to 64, and up to "
        "the blocks there are",
    )
    group_by_length: PositiveInt | Literal["balanced"] | None = Field(
        None,
        description="rows of similar length that stand together in a global batch, at best as many as in a "
        "micro-batch: less padding, the same rows; balanced: micro-batches have as many rows as make all equally "
        "large, and layout.micro_batch on average; null: rows stand in the order",
    )
    mixture: Mixture | None = Field(None, description="how to mix several sources; null: in proportion to their sizes")
    packing: Packing | None = Field(None, description="how to pack samples into rows; null: one sample per row")

    @field_validator("workers", mode="before")
    @classmethod
    def _read_null(cls, workers: object) -> object:
        """Runs recorded before `auto` was the default say null."""
        return "auto" if workers is None else workers

    @model_validator(mode="after")
    def _check_lanes(self) -> Data:
        if self.window != type(self).model_fields["window"].default and self.shuffle != "blocks":
            raise ValueError(
                f"data.window={self.window} is for rows that are read block by block, but data.shuffle={self.shuffle}; "
                "set data.shuffle=blocks, or leave it out"
            )
        if self.lanes is not None and self.shuffle != "blocks" and self.packing is None:
            raise ValueError(
                f"data.lanes={self.lanes} is for rows that are read block by block, or packed; set data.shuffle=blocks "
                "or data.packing, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Data:
        if self.group_by_length is not None and self.packing is not None:
            raise ValueError("data.group_by_length has no effect on packed rows, which are all full; leave one out")
        if self.group_by_length is not None and self.shuffle == "blocks":
            raise ValueError(
                "data.group_by_length would move rows out of the lane that reads their block; set data.shuffle=full, "
                "or leave it out"
            )
        return self
