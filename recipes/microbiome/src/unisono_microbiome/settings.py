"""The settings of the microbiome recipe: the groups `task`, `model` and `data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from unisono import Data, Settings

Share = Annotated[float, Field(gt=0.0, lt=1.0)]


PairMetric = Literal[
    "unweighted_unifrac", "weighted_unifrac", "weighted_normalized_unifrac", "bray_curtis", "jaccard", "aitchison"
]  # fmt: skip
Metric = Literal[PairMetric, "faith_pd"]
DIVERSITIES = ("faith_pd", "shannon")
"""Losses of numbers that follow from a sample's reads alone."""
Keep = Literal["abundance", "first", "random"]
Reason = Literal[
    "empty", "shallow", "no_metadata", "no_group", "no_target", "no_covariate", "no_distances", "not_in_tree", "not_dna"
]  # fmt: skip

MISSING = (
    "", "na", "n/a", "nan", "null", "not applicable", "not available", "not collected", "not provided", "missing",
    "restricted access", "unspecified",
)  # fmt: skip


class Samples(Data):
    """Settings of all tables of samples."""

    target: str | None = Field(None, description="metadata column to predict; null: none")
    target_kind: Literal["auto", "regression", "classification"] = Field(
        "auto", description="auto: regression if all values of the column are numbers"
    )
    classes: list[str] | None = Field(
        None, description="classification: classes in this order; null: the sorted values of the column"
    )
    target_by: str | None = Field(
        None,
        description="column of the metadata, e.g. of body sites: in a regression, each of its categories has a "
        "transform (task.target.transform) of its own; null: one transform",
    )
    covariates: list[str] = Field(
        [],
        description="columns of the metadata, numbers or categories, that the target's head and the forests are given",
    )
    group: str | None = Field(
        None,
        description="column of the metadata, e.g. of the subject: samples that share its value are held out together; "
        "null: every sample for itself",
    )
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.2, description="fraction of the groups to hold out")
    fold: NonNegativeInt = Field(0, description="which of the 1 / held_out folds to hold out")
    held_out_groups: list[str] | None = Field(None, description="names of the held-out groups, instead of a fraction")
    rarefy: PositiveInt | None = Field(
        None, description="reads to draw from each sample, anew in each epoch; null: all"
    )
    max_taxa: PositiveInt | None = Field(1024, description="maximum number of taxa per sample; null: all")
    keep: Keep = Field(
        "abundance", description="which taxa to keep of a sample with more than max_taxa; first: the first in the table"
    )
    metric: Metric = Field(
        "unweighted_unifrac", description="distance between samples, or diversity of a sample, to predict"
    )
    distances_of: Literal["whole", "rarefied"] = Field(
        "whole",
        description="whole: of all reads; rarefied: of `rarefy` reads of each sample, drawn once, where depths differ "
        "much",
    )
    leave_out: list[Reason] = Field(
        [],
        description="skip these samples and taxa instead of raising an error: samples that are empty, shallow (fewer "
        "reads than rarefy), with no_metadata, no_group, no_target, no_covariate, no_distances; taxa not_in_tree, "
        "not_dna",
    )
    missing: list[str] = Field(list(MISSING), description="metadata values that mean missing, in upper or lower case")
    in_memory: bool | Literal["auto"] = Field(
        "auto",
        description="where the entries of the table are kept: true: in memory; false: in a file of the cache, which "
        "all processes map; auto: in memory unless they need more than half of what is available",
    )
    cache: Path | None = Field(
        None,
        description="cache for computed distances, and for tables that do not fit into memory; null: $UNISONO_CACHE or "
        "~/.cache/unisono",
    )

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
        if self.target in self.covariates or len(set(self.covariates)) != len(self.covariates):
            raise ValueError("data.covariates names the target, or a column twice")
        if self.classes is not None and len(set(self.classes)) != len(self.classes):
            raise ValueError("data.classes names a class twice")
        return self


class Study(Samples):
    """A table of a study, with what is known of its samples and taxa."""

    kind: Literal["study"]
    table: Path = Field(description="reads per taxon and sample: BIOM, HDF5 or JSON")
    metadata: Path | Annotated[list[Path], Field(min_length=1)] | None = Field(
        None, description="metadata of the samples, tab-separated or .csv; several files are joined by the samples' ids"
    )
    id_column: str | None = Field(None, description="metadata column with the sample ids; null: the first")
    white_space: Literal["stop", "strip"] = Field(
        "stop", description="white space around column names and values of the metadata; strip: remove it"
    )
    tree: Path | None = Field(
        None, description="phylogenetic tree of the taxa, Newick with branch lengths; for UniFrac and Faith's PD"
    )
    distances: Path | None = Field(None, description="precomputed distances of `metric`: .npy, .npz, .h5, .tsv, .qza")
    distances_key: str | None = Field(
        None, description="array in a .npz or .h5; null: the one named after the metric, or the only one"
    )
    taxonomy: Path | None = Field(
        None, description="tab-separated: taxon, lineage; null: that of the table, if it has one"
    )
    fasta: Path | None = Field(None, description="sequences of the taxa; null: their ids are their sequences")

    @property
    def metadata_files(self) -> list[Path]:
        """The files of `metadata`: none, one, or several."""
        given = self.metadata
        return [] if given is None else given if isinstance(given, list) else [given]


class Simulated(Samples):
    """The example that needs no download: made-up communities, whose subjects belong to two kinds."""

    kind: Literal["simulated"]
    subjects: Annotated[int, Field(ge=4)] = Field(24, description="number of subjects, half of each kind")
    visits: PositiveInt = Field(4, description="samples per subject")
    taxa: Annotated[int, Field(ge=8)] = Field(
        96, description="taxa, the leaves of the tree along which their sequences evolve"
    )
    bases: Annotated[int, Field(ge=16)] = Field(60, description="length of each sequence")
    reads: Annotated[int, Field(ge=100)] = Field(
        2000, description="approximate reads per sample; they vary by a factor of 2"
    )


MicrobiomeData = Annotated[Study | Simulated, Field(discriminator="kind")]


class ModelSettings(Settings):
    """From nucleotides to one vector per sample."""

    features: PositiveInt = Field(128, description="dimension of the vectors of nucleotides, taxa and samples")
    heads: PositiveInt = Field(4, description="attention heads; they divide the width")
    encoder: Literal["transformer", "convolution", "taxon"] = Field(
        "transformer",
        description="how a taxon becomes a vector: from its DNA, or a learned embedding for tables without DNA",
    )
    sequence_layers: PositiveInt = Field(4, description="layers of the sequence encoder")
    taxon_layers: PositiveInt = Field(4, description="layers over the taxa of a sample, without their counts")
    sample_layers: PositiveInt = Field(4, description="layers over the taxa of a sample and their counts")
    kernel: PositiveInt = Field(5, description="encoder=convolution: kernel size in nucleotides, odd")
    positions: Literal["none", "learned"] = Field(
        "none", description="position encoding of taxa, in the order of the data; none: a sample is a set"
    )
    counts: Literal["none", "add", "concat", "film"] = Field(
        "add", description="how log(1 + count) is combined with the vector of a taxon"
    )
    covariates: Literal["add", "concat", "gated"] = Field(
        "add",
        description="how data.covariates join the vector of a sample, for the target: added, both mapped to a vector, "
        "or added by as much as a gate of both lets through",
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="dropout on the residual branches; it biases distances, so use 0 with task.weights.distance"
    )
    chunk: PositiveInt = Field(256, description="number of sequences to encode at a time")
    recompute: bool = Field(
        True,
        description="recompute chunks in the backward pass, so that memory does not grow with the number of sequences",
    )
    from_run: Path | None = Field(None, description="run whose encoder weights to start from; null: random weights")
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
        own = {"chunk", "recompute", "from_run", "freeze", "dropout", "covariates"}
        return {name: getattr(self, name) for name in type(self).model_fields if name not in own}


class LossWeights(Settings):
    """Weights of the losses; a loss of weight 0 is not computed, nor anything that only it needs."""

    nucleotides: NonNegativeFloat = Field(0.0, description="weight of the cross-entropy of masked nucleotides")
    counts: NonNegativeFloat = Field(
        0.0, description="weight of the squared error of a taxon's count, relative to the largest in its sample"
    )
    distance: NonNegativeFloat = Field(
        0.0, description="weight of the squared error of the distances of all pairs of samples"
    )
    faith_pd: NonNegativeFloat = Field(
        0.0, description="weight of the squared error of Faith's phylogenetic diversity, standardised"
    )
    shannon: NonNegativeFloat = Field(
        0.0, description="weight of the squared error of the Shannon diversity (in bits), standardised"
    )
    target: NonNegativeFloat = Field(0.0, description="weight of the loss of the column data.target")

    @model_validator(mode="after")
    def _check_weights(self) -> LossWeights:
        if not any(self.model_dump().values()):
            raise ValueError(
                f"task.weights are all 0, so nothing would be learnt; set one of {', '.join(type(self).model_fields)}"
            )
        return self


class Masking(Settings):
    """Which nucleotides are masked, to be predicted from the others."""

    share: Share = Field(0.15, description="fraction of a sequence's nucleotides to mask")
    kind: Literal["random", "spans"] = Field("random", description="mask single nucleotides, or spans of 3 to 5")
    sequences: PositiveInt | None = Field(32, description="random taxa per sample to mask nucleotides of; null: all")


class TargetSettings(Settings):
    """Loss of the target head: cross-entropy for classes; for numbers, as chosen here."""

    loss: Literal["mse", "mae", "huber", "quantile", "asymmetric"] = Field(
        "mse", description="loss of a regression; asymmetric: squared error, weighted by its sign (an expectile)"
    )
    asymmetry: Share = Field(
        0.5, description="loss=asymmetric: weight of predictions that are too low; those too high weigh 1 - asymmetry"
    )
    huber: PositiveFloat = Field(
        1.0, description="loss=huber: error above which it grows linearly, after the transform"
    )
    quantiles: list[Share] = Field(
        [0.1, 0.5, 0.9], description="loss=quantile: the quantiles to predict; the middle one is the prediction"
    )
    transform: Literal["none", "minmax", "zscore", "log"] = Field(
        "zscore",
        description="transform of regression targets, fitted on training samples; log: log(1 + target), then zscore",
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> TargetSettings:
        if self.quantiles != sorted(set(self.quantiles)) or not self.quantiles:
            raise ValueError(f"task.target.quantiles={self.quantiles} must be distinct and ascending")
        return self


class MicrobiomeConfig(Settings):
    """What is learnt."""

    weights: LossWeights = Field(LossWeights(distance=1.0), description="weights of the losses")
    masking: Masking = Field(Masking(), description="masking for the loss of nucleotides")
    target: TargetSettings = Field(TargetSettings(), description="settings of the target's loss")
