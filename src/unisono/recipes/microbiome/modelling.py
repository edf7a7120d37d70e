"""The settings of the microbiome model and of what it learns: the groups `model` and `task`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from unisono.config.schema.base import NonNegative, Positive, Settings

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


class Model(Settings):
    """From nucleotides to one vector per sample."""

    features: PositiveInt = Field(128, description="of every vector: a nucleotide's, a taxon's, a sample's")
    heads: PositiveInt = Field(4, description="of attention; they share out the features")
    encoder: Literal["transformer", "convolution", "taxon"] = Field(
        "transformer",
        description="what makes a vector of a taxon: of its DNA, or, for tables without DNA, a learnt one of its own",
    )
    sequence_layers: PositiveInt = Field(4, description="of the encoder of sequences")
    taxon_layers: PositiveInt = Field(4, description="over the taxa of a sample, whose counts they do not see")
    sample_layers: PositiveInt = Field(4, description="over the taxa of a sample and their counts")
    kernel: PositiveInt = Field(5, description="encoder=convolution: nucleotides that a kernel sees; an odd number")
    positions: Literal["none", "learned"] = Field(
        "none", description="of a taxon in its sample, whose taxa are in the order of the data; none: a sample is a set"
    )
    counts: Literal["none", "add", "concat", "film"] = Field(
        "add", description="how log(1 + count) joins the vector of a taxon"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="on the residual branches; with task.weights.distance it moves distances, so 0 is best there"
    )
    chunk: PositiveInt = Field(256, description="sequences that are encoded at the same time")
    recompute: bool = Field(
        True, description="chunks are computed again in the backward pass, so that memory does not grow with sequences"
    )
    from_run: Path | None = Field(None, description="run whose encoder is taken over; null: random weights")
    freeze: bool = Field(False, description="train only the heads; with from_run")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Model:
        if self.features % self.heads:
            raise ValueError(f"model.features={self.features} cannot be shared out among model.heads={self.heads}")
        if not self.kernel % 2:
            raise ValueError(f"model.kernel={self.kernel} is even, so it has no middle; use {self.kernel + 1}")
        if self.freeze and self.from_run is None:
            raise ValueError("model.freeze=true would keep random weights; name the run they come from, model.from_run")
        return self

    @property
    def body(self) -> dict[str, object]:
        """What two models must share for one to take over the encoder of the other."""
        own = {"chunk", "recompute", "from_run", "freeze", "dropout"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in own}


class Weights(Settings):
    """How much each loss counts; one of weight 0 is not computed, nor what only it needs."""

    nucleotides: NonNegative = Field(0.0, description="cross-entropy of masked nucleotides")
    counts: NonNegative = Field(0.0, description="squared error of a taxon's count over the largest of its sample")
    distance: NonNegative = Field(0.0, description="squared error of the distances of all pairs of samples")
    faith_pd: NonNegative = Field(0.0, description="squared error of Faith's phylogenetic diversity, standardised")
    target: NonNegative = Field(0.0, description="of the column data.target")

    @model_validator(mode="after")
    def _something(self) -> Weights:
        if not any(self.model_dump().values()):
            raise ValueError(
                f"task.weights are all 0, so nothing is learnt; set one of {list(type(self).model_fields)}"
            )
        return self


class Masking(Settings):
    """Which nucleotides are hidden, to be told from the others."""

    share: Share = Field(0.15, description="of a sequence's nucleotides")
    kind: Literal["random", "spans"] = Field("random", description="single nucleotides, or 3 to 5 beside each other")
    sequences: PositiveInt | None = Field(32, description="of a sample, drawn anew each time; null: all of them")


class Target(Settings):
    """How the target head learns: cross-entropy of classes, or, of numbers, what is chosen here."""

    loss: Literal["mse", "mae", "huber", "quantile"] = Field("mse", description="of a regression")
    huber: Positive = Field(1.0, description="loss=huber: error from which on it grows linearly, after the transform")
    quantiles: list[Share] = Field(
        [0.1, 0.5, 0.9], description="loss=quantile: which are predicted; the middle one is the prediction"
    )
    transform: Literal["none", "minmax", "zscore", "log"] = Field(
        "zscore",
        description="of a regression's targets, fitted on the training samples; log: of 1 + target, then zscore",
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Target:
        if self.quantiles != sorted(set(self.quantiles)) or not self.quantiles:
            raise ValueError(f"task.target.quantiles={self.quantiles} have to be different ones, the lowest first")
        return self


class MicrobiomeConfig(Settings):
    """What is learnt."""

    weights: Weights = Field(Weights(distance=1.0), description="of the losses")
    masking: Masking = Field(Masking(), description="for the loss of nucleotides")
    target: Target = Field(Target(), description="for the loss of the target")
