"""The samples of a run: counts, metadata, held-out split, and distances.

Everything is aligned to one list of samples and one of taxa, after filtering.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, Subset, file_hash, hold_out
from unisono.recipe_tools import format_share
from unisono_microbiome import nucleotides
from unisono_microbiome.settings import Metric, Simulated, Study
from unisono_microbiome.study import diversity, matrices
from unisono_microbiome.study import sequences as sequences_
from unisono_microbiome.study.filtering import filter_study, load_matrix
from unisono_microbiome.study.matrices import Matrix
from unisono_microbiome.study.metadata import KINDS, TargetColumn, parse_target
from unisono_microbiome.study.sparse import split_rows
from unisono_microbiome.study.storage import Storage
from unisono_microbiome.study.table import CountTable
from unisono_microbiome.study.tree import Tree, format_missing

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRecord:
    """A record: a sample with all its reads.

    Attributes:
        number: its row in the library's `samples`, `counts` and `distances()`.
        name: its id.
        taxa: numbers of the taxa that it has, ascending, (taxa,) int64.
        counts: reads of each, (taxa,) int64.
        target: a number, or the number of a class; None where nothing is to be predicted.
    """

    number: int
    name: str
    taxa: Numbers
    counts: Numbers
    target: float | int | None


def open_library(config: Study | Simulated) -> Library:
    """The samples that the settings name."""
    if isinstance(config, Simulated):
        from unisono_microbiome.study.simulate import simulate_study

        config = simulate_study(config)
    kept = filter_study(config)
    table, columns = kept.table, kept.columns
    target = None
    if config.target is not None:
        values = columns[config.target]
        kind = config.target_kind
        if kind == "auto" and config.classes is None:
            kind = KINDS.get(kept.types.get(config.target, ""), kind)
        target = parse_target(config.target, values, table.samples, kind, config.classes)
    taxonomy = table.taxonomy if config.taxonomy is None else sequences_.read_lineages(config.taxonomy, table.taxa)
    groups = list(table.samples) if config.group is None else columns[config.group]
    library = Library(
        config, table.samples, table.taxa, table.counts, kept.sequences, columns, taxonomy, target, groups,
        kept.left_out, kept.rows, kept.types,
    )  # fmt: skip
    library.check_split()
    return library


@dataclass(frozen=True, eq=False)
class Library:
    """Aligned samples. It pickles without the distances, which any process finds in the cache.

    Attributes:
        config: what it was made of.
        samples: ids of the samples.
        taxa: ids of the taxa.
        counts: (samples, taxa) int64, zeros not stored.
        sequences: DNA per taxon; None where it is not known of all.
        metadata: values of each column, aligned to the samples; empty where there is none.
        taxonomy: lineage per taxon, or None.
        target: what is to be predicted, or None.
        groups: name of each sample's group.
        left_out: ids of what is left out, by reason.
        rows: of the samples in the file of the table, (samples,).
        types: numeric or categorical, of the columns of the metadata of which QIIME 2 says it.
    """

    config: Study
    samples: list[str]
    taxa: list[str]
    counts: csr_array
    sequences: list[str] | None
    metadata: dict[str, list[str]]
    taxonomy: list[str] | None
    target: TargetColumn | None
    groups: list[str]
    left_out: dict[str, list[str]]
    rows: Numbers
    types: dict[str, str] = field(default_factory=dict)

    # samples ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> SampleRecord:
        part = slice(*self.counts.indptr[number : number + 2])
        target = None if self.target is None else self.target.values[number].item()
        taxa, reads = self.counts.indices[part].astype(np.int64), self.counts.data[part].copy()  # the caller's own
        return SampleRecord(number, self.samples[number], taxa, reads, target)

    def training(self) -> Subset:
        """The samples to train on."""
        return Subset(self, np.flatnonzero(~self._held_out))

    def held_out(self) -> Subset:
        """The samples kept apart; there can be none."""
        return Subset(self, np.flatnonzero(self._held_out))

    @cached_property
    def lengths(self) -> Numbers:
        """About how many taxa a sample has when it is drawn, (samples,): what it costs (`data.group_by_length`)."""
        config, counts = self.config, self.counts
        taxa = np.diff(counts.indptr).astype(np.float64)
        if config.rarefy is not None:  # the chances that a taxon is drawn at least once
            depths = np.asarray(counts.sum(axis=1), dtype=np.float64).ravel()
            left_out = np.clip(1 - config.rarefy / depths, 0, 1)
            for first, last in split_rows(counts.indptr):
                rows = np.repeat(np.arange(last - first), np.diff(counts.indptr[first : last + 1]))
                part = slice(counts.indptr[first], counts.indptr[last])
                chances = 1 - left_out[first:last][rows] ** counts.data[part]
                taxa[first:last] = np.bincount(rows, chances, last - first)
        lengths: Numbers = np.rint(np.minimum(taxa, config.max_taxa or np.inf)).astype(np.int64)
        return lengths

    def dna(self) -> list[str]:
        """The sequences, where they are needed, (taxa,); refused where they are not known of all taxa."""
        if self.sequences is not None:
            return self.sequences
        wrong = [name for name in self.taxa if not nucleotides.is_dna(name)]
        raise DataError(
            f"{self.config.table}: the ids of {format_share(wrong, len(self.taxa), 'taxa')} are not sequences, which "
            "this model needs: set data.fasta to the representative sequences (FASTA or .qza), or model.encoder=taxon, "
            "which learns a vector per taxon without sequences"
            + ("" if len(wrong) == len(self.taxa) else ", or skip these taxa with data.leave_out=[not_dna]")
        )

    # distances --------------------------------------------------------------------------------------------------

    def distances(self, metric: Metric | None = None) -> NDArray[np.float64]:
        """Between all pairs of samples, (samples, samples) float64, symmetric, with a diagonal of 0.

        Those of `data.metric` are read where `data.distances` has them; all others are computed.

        Raises:
            ConfigError: where `faith_pd` is asked for, which is no distance, or UniFrac without a tree.
            DataError: for a tree or a matrix that does not fit.
        """
        metric = metric or self.config.metric
        if metric == "faith_pd":
            raise ConfigError(
                "data.metric=faith_pd is not a distance between samples; choose one, e.g. unweighted_unifrac"
            )
        if metric not in self._distances:
            if self._matrix is not None and metric == self.config.metric:
                self._distances[metric] = matrices.align_matrix(self._matrix, self.samples, self.rows)
            else:
                self._distances[metric] = diversity.pairwise_distances(
                    metric, self._distance_table, self.tree, self.config.cache
                )
        return self._distances[metric]

    def diversity(self, name: str) -> NDArray[np.float64]:
        """One of `settings.DIVERSITIES` of each sample, (samples,) float64; errors as of `distances`."""
        if name == "shannon":
            return diversity.shannon(self._distance_table)
        return diversity.faith_pd(self._distance_table, self.tree, self.config.cache)

    @property
    def categories(self) -> list[str] | None:
        """The category of each sample by which its target is transformed; None where all are alike."""
        return None if self.config.target_by is None else self.metadata[self.config.target_by]

    @cached_property
    def tree(self) -> Tree | None:
        """The tree of the taxa, where there is one."""
        return None if self.config.tree is None else Tree(self.config.tree)

    @cached_property
    def _matrix(self) -> Matrix | None:
        return load_matrix(self.config)

    @cached_property
    def _table(self) -> CountTable:
        return CountTable(
            self.samples, self.taxa, self.counts, storage=Storage(self.config.in_memory, self.config.cache)
        )

    @cached_property
    def rarefied_table(self) -> CountTable:
        """`data.rarefy` reads of each sample, always the same ones; all reads if it is null."""
        depth = self.config.rarefy
        return self._table if depth is None else diversity.rarefy_once(self._table, depth)

    @property
    def _distance_table(self) -> CountTable:
        return self.rarefied_table if self.config.distances_of == "rarefied" else self._table

    @cached_property
    def _distances(self) -> dict[str, NDArray[np.float64]]:
        return {}

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a tree or given distances that do not match, before anything is computed."""
        if self.tree is not None and (absent := self.tree.find_missing(self.taxa)):
            raise DataError(format_missing(self.tree.path, absent, len(self.taxa)))
        if self._matrix is not None:
            self.distances()

    def check_split(self) -> None:
        """Refuse groups that cannot be split, and training samples that lack a class or have only one target."""
        held_out = self._held_out
        if self.target is None:
            return
        values, classes = self.target.values, self.target.classes
        trained, held = np.unique(values[~held_out]), np.unique(values[held_out])
        remedy = "choose others with data.fold, data.held_out or data.held_out_groups"
        if classes is not None and len(lacking := np.setdiff1d(held, trained)):
            raise DataError(
                f"data.target={self.target.name}: "
                f"{format_share([classes[n] for n in lacking], len(classes), 'classes')} are held out with all their "
                f"groups, so none is left to train on; {remedy}"
            )
        if len(trained) < 2 and held_out.any():
            raise DataError(f"data.target={self.target.name} is the same in all training samples; {remedy}")

    def facts(self) -> dict[str, Any]:
        """Sizes, depths, what is held out and what is left out, as JSON."""
        taxa, limit, held_out = np.diff(self.counts.indptr), self.config.max_taxa, self._held_out
        facts: dict[str, Any] = {
            "samples": len(self),
            "taxa": len(self.taxa),
            "reads_per_sample": _min_median_max(np.asarray(self.counts.sum(axis=1))),
            "taxa_per_sample": _min_median_max(taxa),
        }
        seen = np.zeros(len(self.taxa), dtype=bool)
        for first, last in split_rows(self.counts.indptr):
            seen[self.counts.indices[self.counts.indptr[first] : self.counts.indptr[last]]] = True
        if unseen := int((~seen).sum()):
            facts["taxa_without_reads"] = unseen
        if limit is not None and (cut := int((taxa > limit).sum())):
            facts["samples_with_more_than_max_taxa"] = cut
        if self.config.group is not None:
            facts["groups"] = len(set(self.groups))
            facts["held_out_groups"] = sorted({self.groups[number] for number in np.flatnonzero(held_out)})
        if (target := self.target) is not None:
            parts = {"training": _summarise_target(target, ~held_out), "held_out": _summarise_target(target, held_out)}
            facts["target"] = {"column": target.name, "kind": target.kind, **parts}
        if self.taxonomy is not None and (unknown := self.taxonomy.count(sequences_.UNASSIGNED)):
            facts["taxa_without_lineage"] = unknown
        if self.left_out:
            facts["left_out"] = {reason: len(names) for reason, names in self.left_out.items()}
        return facts

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the samples and of what is learnt from them, in hex."""
        config, table = self.config, self._table.digest
        more = [self.config.target_by, *self.config.covariates]
        columns = [[name, self.metadata[name]] for name in more if name is not None]
        target = None if self.target is None else [self.target.kind, self.target.classes, self.target.values.tolist()]
        sources = [None if found is None else found.digest for found in (self.tree, self._matrix)]
        depth = config.rarefy if config.distances_of == "rarefied" else None
        decisive = [table, self.sequences, target, sources, config.metric, depth, *columns]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The files, so that one that has changed can be named; see `unisono.sources`."""
        config = self.config
        paths = [config.table, *config.metadata_files, config.tree, config.distances, config.taxonomy, config.fasta]
        files = [{"name": path.name, "digest": file_hash(path)} for path in paths if path is not None]
        return {"fingerprint": self.fingerprint, "files": files}

    @cached_property
    def _held_out(self) -> NDArray[np.bool_]:
        config = self.config
        named, column = config.held_out_groups, config.group
        return hold_out(self.groups, config.held_out, config.fold, named=named, column=column, what="sample")

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


def _summarise_target(target: TargetColumn, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """The values of a target in short: how many there are of each class, or mean and standard deviation."""
    values = target.values[chosen]
    if target.classes is not None:
        counts = np.bincount(values.astype(np.int64), minlength=len(target.classes))
        return dict(zip(target.classes, counts.tolist(), strict=True))
    return {"mean": round(float(values.mean()), 4), "std": round(float(values.std()), 4)} if len(values) else {}


def _min_median_max(values: NDArray[Any]) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}
