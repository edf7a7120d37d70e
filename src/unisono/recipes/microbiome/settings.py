"""The settings of the microbiome recipe: the groups `task`, `model` and `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


PairMetric = Literal["unweighted_unifrac", "weighted_unifrac", "weighted_normalized_unifrac", "bray_curtis", "jaccard"]
Metric = PairMetric | Literal["faith_pd"]
Keep = Literal["abundance", "first", "random"]
Reason = Literal["empty", "shallow", "no_metadata", "no_group", "no_target", "no_distances", "not_in_tree", "not_dna"]

MISSING = (
    "", "na", "n/a", "nan", "null", "not applicable", "not available", "not collected", "not provided", "missing",
    "restricted access", "unspecified",
)  # fmt: skip


class Samples(Data):
    """Settings of all tables of samples."""

    target: str | None = Field(None, description="column of the metadata to predict; null: none")
    target_kind: Literal["auto", "regression", "classification"] = Field(
        "auto", description="auto: regression where all values of the column are numbers"
    )
    classes: list[str] | None = Field(
        None, description="classification: the classes in this order; null: those of the column, sorted"
    )
    group: str | None = Field(
        None,
        description="column of the metadata, e.g. of the subject: samples that share its value are held out together; "
        "null: every sample for itself",
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.2, description="fraction of the groups kept for evaluation"
    )
    fold: NonNegativeInt = Field(0, description="which of the 1 / held_out parts of the groups is held out")
    held_out_groups: list[str] | None = Field(None, description="names of the held-out groups, instead of a fraction")
    rarefy: PositiveInt | None = Field(
        None, description="reads drawn of each sample, anew in each epoch; null: all of them"
    )
    max_taxa: PositiveInt | None = Field(1024, description="taxa of a sample at most; null: all of them")
    keep: Keep = Field(
        "abundance", description="which taxa of a sample with more than max_taxa; first: in the table's order"
    )
    metric: Metric = Field(
        "unweighted_unifrac", description="distance between samples, or diversity of each one, to predict"
    )
    distances_of: Literal["whole", "rarefied"] = Field(
        "whole",
        description="whole: of all reads; rarefied: of `rarefy` reads of each sample, drawn once, where depths differ "
        "much",
    )
    leave_out: list[Reason] = Field(
        [],
        description="skip these samples and taxa instead of raising an error: samples that are empty, shallow (fewer "
        "reads than rarefy), with no_metadata, no_group, no_target, no_distances; taxa not_in_tree, not_dna",
    )
    missing: list[str] = Field(list(MISSING), description="values of the metadata that mean missing, in any case")
    cache: Path | None = Field(None, description="for computed distances; null: $UNISONO_CACHE or ~/.cache/unisono")

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Any:
        if self.held_out_groups is not None and self.group is None:
            raise ValueError("data.held_out_groups needs the column that it refers to: set data.group, too")
        if self.held_out_groups is not None and self.fold:
            raise ValueError(
                "data.fold has no effect with data.held_out_groups: set fold to 0, or held_out_groups to null"
            )
        if self.distances_of == "rarefied" and self.rarefy is None:
            raise ValueError("data.distances_of=rarefied needs data.rarefy: how many reads of each sample are drawn")
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise ValueError("data.classes names a class twice")
        return self


class Study(Samples):
    """A table of a study, with what is known of its samples and taxa."""

    kind: Literal["study"]
    table: Path = Field(description="reads per taxon and sample: BIOM, HDF5 or JSON")
    metadata: Path | None = Field(None, description="of the samples: a table of tab-separated values, or .csv")
    id_column: str | None = Field(None, description="column of the metadata with the samples' ids; null: the first")
    white_space: Literal["stop", "strip"] = Field(
        "stop", description="around names of columns and values of the metadata; strip: it is taken away"
    )
    tree: Path | None = Field(None, description="of the taxa, Newick with branch lengths; for UniFrac and Faith's PD")
    distances: Path | None = Field(
        None, description="ready distances of `metric`, not computed: .npy, .npz, .h5, .tsv, .qza"
    )
    distances_key: str | None = Field(
        None, description="array of a .npz or .h5; null: the one that is called like the metric, or the only one"
    )
    taxonomy: Path | None = Field(
        None, description="tab-separated: taxon, lineage; null: that of the table, where it has one"
    )
    fasta: Path | None = Field(None, description="sequences of the taxa; null: their ids are their sequences")


class Simulated(Samples):
    """The example that needs no download: made-up communities, whose subjects belong to two kinds."""

    kind: Literal["simulated"]
    subjects: Annotated[int, Field(ge=4)] = Field(24, description="hosts, half of each kind")
    visits: PositiveInt = Field(4, description="samples of each subject")
    taxa: Annotated[int, Field(ge=8)] = Field(96, description="in the tree that their sequences evolve along")
    bases: Annotated[int, Field(ge=16)] = Field(60, description="of each sequence")
    reads: Annotated[int, Field(ge=100)] = Field(2000, description="of a sample, about; they differ by a factor of 2")


MicrobiomeData = Annotated[Study | Simulated, Field(discriminator="kind")]


class ModelSettings(Settings):
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
    def _agrees_with_itself(self) -> ModelSettings:
        if self.features % self.heads:
            raise ValueError(f"model.features={self.features} is not divisible by model.heads={self.heads}")
        if not self.kernel % 2:
            raise ValueError(f"model.kernel={self.kernel} is even, but must be odd; use {self.kernel + 1}")
        if self.freeze and self.from_run is None:
            raise ValueError(
                "model.freeze=true would freeze random weights; set model.from_run to the run that trained them"
            )
        return self

    @property
    def body(self) -> dict[str, object]:
        """The settings that two models must share for one to take over the other's encoder."""
        own = {"chunk", "recompute", "from_run", "freeze", "dropout"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in own}


class LossWeights(Settings):
    """Weights of the losses; a loss of weight 0 is not computed, nor anything that only it needs."""

    nucleotides: NonNegativeFloat = Field(0.0, description="cross-entropy of masked nucleotides")
    counts: NonNegativeFloat = Field(0.0, description="squared error of a taxon's count over the largest of its sample")
    distance: NonNegativeFloat = Field(0.0, description="squared error of the distances of all pairs of samples")
    faith_pd: NonNegativeFloat = Field(0.0, description="squared error of Faith's phylogenetic diversity, standardised")
    target: NonNegativeFloat = Field(0.0, description="of the column data.target")

    @model_validator(mode="after")
    def _something(self) -> LossWeights:
        if not any(self.model_dump().values()):
            raise ValueError(
                f"task.weights are all 0, so nothing would be learnt; set one of {', '.join(type(self).model_fields)}"
            )
        return self


class Masking(Settings):
    """Which nucleotides are masked, to be predicted from the others."""

    share: Share = Field(0.15, description="of a sequence's nucleotides")
    kind: Literal["random", "spans"] = Field("random", description="single nucleotides, or 3 to 5 beside each other")
    sequences: PositiveInt | None = Field(32, description="of a sample, drawn anew each time; null: all of them")


class TargetSettings(Settings):
    """Loss of the target head: cross-entropy for classes; for numbers, as chosen here."""

    loss: Literal["mse", "mae", "huber", "quantile"] = Field("mse", description="of a regression")
    huber: PositiveFloat = Field(
        1.0, description="loss=huber: error from which on it grows linearly, after the transform"
    )
    quantiles: list[Share] = Field(
        [0.1, 0.5, 0.9], description="loss=quantile: which are predicted; the middle one is the prediction"
    )
    transform: Literal["none", "minmax", "zscore", "log"] = Field(
        "zscore",
        description="of a regression's targets, fitted on the training samples; log: of 1 + target, then zscore",
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TargetSettings:
        if self.quantiles != sorted(set(self.quantiles)) or not self.quantiles:
            raise ValueError(f"task.target.quantiles={self.quantiles} must be distinct and ascending")
        return self


class MicrobiomeConfig(Settings):
    """What is learnt."""

    weights: LossWeights = Field(LossWeights(distance=1.0), description="of the losses")
    masking: Masking = Field(Masking(), description="for the loss of nucleotides")
    target: TargetSettings = Field(TargetSettings(), description="for the loss of the target")
