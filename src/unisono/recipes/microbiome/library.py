"""The samples of a run: their counts, what is known of them, which are held out, and how far they are from each other.

Everything is aligned to one list of samples and one of taxa, those that are left once what cannot be used is left out.
What does not fit is told in one error, with counts and examples, before anything expensive begins.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.microbiome import diversity, matrices, nucleotides, splits
from unisono.recipes.microbiome import sequences as sequences_
from unisono.recipes.microbiome.matrices import Matrix
from unisono.recipes.microbiome.metadata import Target, target_of
from unisono.recipes.microbiome.settings import Metric, Simulated, Study
from unisono.recipes.microbiome.table import Table
from unisono.recipes.microbiome.told import how_many
from unisono.recipes.microbiome.tree import Tree, missing_told
from unisono.recipes.microbiome.usable import matrix_of, usable
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.files import cache_dir

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
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
    """The samples that the settings name.

    Raises:
        ConfigError: for settings that do not fit each other or the files.
        DataError: for files that cannot be read or do not fit each other.
    """
    if isinstance(config, Simulated):
        from unisono.recipes.microbiome.simulate import simulated

        config = simulated(config)
    return Library.of(config)


@dataclass(frozen=True, eq=False)
class Library:
    """Samples, aligned to each other. It pickles without the distances, which any process finds in the cache.

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
    """

    config: Study
    samples: list[str]
    taxa: list[str]
    counts: csr_array
    sequences: list[str] | None
    metadata: dict[str, list[str]]
    taxonomy: list[str] | None
    target: Target | None
    groups: list[str]
    left_out: dict[str, list[str]]
    rows: Numbers

    @classmethod
    def of(cls, config: Study) -> Library:
        """Read what the settings name, and have it fit."""
        used = usable(config)
        table, columns = used.table, used.columns
        target = None
        if config.target is not None:
            kind, classes = config.target_kind, config.classes
            target = target_of(config.target, columns[config.target], table.samples, kind, classes)
        taxonomy = table.taxonomy if config.taxonomy is None else sequences_.lineages(config.taxonomy, table.taxa)
        groups = list(table.samples) if config.group is None else columns[config.group]
        made = cls(
            config, table.samples, table.taxa, table.counts, used.sequences, columns, taxonomy, target, groups,
            used.left_out, used.rows,
        )  # fmt: skip
        made._refuse_split()
        return made

    # samples ----------------------------------------------------------------------------------------------------

    def training(self) -> Rows:
        """The samples to train on."""
        return Rows(self, np.flatnonzero(~self._held_out))

    def held_out(self) -> Rows:
        """The samples kept apart; there can be none."""
        return Rows(self, np.flatnonzero(self._held_out))

    def dna(self) -> list[str]:
        """The sequences, where they are needed, (taxa,).

        Raises:
            DataError: where they are not known of all taxa.
        """
        if self.sequences is not None:
            return self.sequences
        wrong = [name for name in self.taxa if not nucleotides.is_dna(name)]
        raise DataError(
            f"{self.config.table}: the ids of {how_many(wrong, len(self.taxa), 'taxa')} are not their sequences, which "
            "this model reads: give them by data.fasta (`qiime tools export` of the representative sequences)"
            + ("" if len(wrong) == len(self.taxa) else ", or leave these taxa out by data.leave_out=[not_dna]")
        )

    # distances --------------------------------------------------------------------------------------------------

    def distances(self, metric: Metric | None = None) -> NDArray[np.float64]:
        """Between all pairs of samples, (samples, samples) float64, symmetric, with a diagonal of 0.

        Those of `data.metric` are read where `data.distances` has them; all others are computed, once.

        Args:
            metric: of them; None for `data.metric`.

        Raises:
            ConfigError: where `faith_pd` is asked for, which is no distance, or UniFrac without a tree.
            DataError: for a tree or a matrix that does not fit.
        """
        metric = metric or self.config.metric
        if metric == "faith_pd":
            raise ConfigError(
                "data.metric=faith_pd is of one sample, not of two; choose a distance, e.g. unweighted_unifrac"
            )
        if metric not in self._distances:
            if self._matrix is not None and metric == self.config.metric:
                self._distances[metric] = matrices.aligned(self._matrix, self.samples, self.rows)
            else:
                self._distances[metric] = diversity.pairwise(metric, self._measured, self.tree, self._cache)
        return self._distances[metric]

    def faith_pd(self) -> NDArray[np.float64]:
        """Faith's phylogenetic diversity of each sample, (samples,) float64; errors as of `distances`."""
        return diversity.faith_pd(self._measured, self.tree, self._cache)

    @cached_property
    def tree(self) -> Tree | None:
        """The tree of the taxa, where there is one."""
        return None if self.config.tree is None else Tree(self.config.tree)

    @cached_property
    def _matrix(self) -> Matrix | None:
        return matrix_of(self.config)

    @cached_property
    def _table(self) -> Table:
        return Table(self.samples, self.taxa, self.counts)

    @cached_property
    def rarefied(self) -> Table:
        """`data.rarefy` reads of each sample, always the same ones; all of them where it is null."""
        depth = self.config.rarefy
        return self._table if depth is None else diversity.rarefied_once(self._table, depth)

    @property
    def _measured(self) -> Table:
        """The table that distances are computed of."""
        return self.rarefied if self.config.distances_of == "rarefied" else self._table

    @cached_property
    def _distances(self) -> dict[str, NDArray[np.float64]]:
        return {}

    @property
    def _cache(self) -> Path:
        return self.config.cache or cache_dir()

    # around the run ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a tree or ready distances that do not fit, before anything is computed with them."""
        if self.tree is not None and (absent := self.tree.missing(self.taxa)):
            raise DataError(missing_told(self.tree.path, absent, len(self.taxa)))
        if self._matrix is not None:
            self.distances()

    def facts(self) -> dict[str, Any]:
        """Sizes, depths, what is held out and what is left out, as JSON."""
        depths, taxa = np.asarray(self.counts.sum(axis=1)), np.diff(self.counts.indptr)
        limit = self.config.max_taxa
        told: dict[str, Any] = {
            "samples": len(self.samples),
            "taxa": len(self.taxa),
            "reads_per_sample": _spread(depths),
            "taxa_per_sample": _spread(taxa),
        }
        if unseen := len(self.taxa) - len(np.unique(self.counts.indices)):
            told["taxa_without_reads"] = unseen
        if limit is not None and (cut := int((taxa > limit).sum())):
            told["samples_with_more_than_max_taxa"] = cut
        if self.config.group is not None:
            told["groups"] = len(set(self.groups))
            told["held_out_groups"] = sorted({self.groups[number] for number in np.flatnonzero(self._held_out)})
        if self.target is not None:
            told["target"] = {
                "column": self.target.name,
                "kind": self.target.kind,
                "training": self._told(self.target, ~self._held_out),
                "held_out": self._told(self.target, self._held_out),
            }
        if self.taxonomy is not None and (unknown := self.taxonomy.count(sequences_.UNASSIGNED)):
            told["taxa_without_lineage"] = unknown
        if self.left_out:
            told["left_out"] = {reason: len(names) for reason, names in self.left_out.items()}
        return told

    @cached_property
    def fingerprint(self) -> str:
        """What the samples are and what is learnt of them, in hex."""
        config, table = self.config, self._table.digest
        target = None if self.target is None else [self.target.kind, self.target.classes, self.target.values.tolist()]
        sources = [None if found is None else found.digest for found in (self.tree, self._matrix)]
        depth = config.rarefy if config.distances_of == "rarefied" else None
        told = [table, self.sequences, target, sources, config.metric, depth]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The files, so that one that has changed can be named; see `unisono.data.sources`."""
        paths = [getattr(self.config, key) for key in ("table", "metadata", "tree", "distances", "taxonomy", "fasta")]
        files = [{"name": path.name, "digest": _digest(path)} for path in paths if path is not None]
        return {"fingerprint": self.fingerprint, "files": files}

    @cached_property
    def _held_out(self) -> NDArray[np.bool_]:
        config = self.config
        return splits.held_out(self.groups, config.held_out, config.fold, config.held_out_groups, config.group)

    def _refuse_split(self) -> None:
        """Refuse groups that cannot be split, and training samples that lack a class or have only one target."""
        held_out = self._held_out
        if self.target is None:
            return
        values = self.target.values
        trained, held = np.unique(values[~held_out]), np.unique(values[held_out])
        remedy = "choose others by data.fold, data.held_out or data.held_out_groups"
        if self.target.classes is not None and len(lacking := np.setdiff1d(held, trained)):
            named = how_many([self.target.classes[n] for n in lacking], len(self.target.classes), "classes")
            raise DataError(
                f"data.target={self.target.name}: {named} are held out with all their groups, so none is left to train "
                f"on; {remedy}"
            )
        if len(trained) < 2 and held_out.any():
            raise DataError(f"data.target={self.target.name} is the same in all samples to train on; {remedy}")

    @staticmethod
    def _told(target: Target, chosen: NDArray[np.bool_]) -> dict[str, Any]:
        values = target.values[chosen]
        if target.classes is not None:
            counts = np.bincount(values.astype(np.int64), minlength=len(target.classes))
            return dict(zip(target.classes, counts.tolist(), strict=True))
        return {"mean": round(float(values.mean()), 4), "std": round(float(values.std()), 4)} if len(values) else {}

    def __getstate__(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}


class Rows:
    """Some samples of a library as rows.

    Args:
        library: all of them.
        numbers: which, in order.
    """

    def __init__(self, library: Library, numbers: Numbers) -> None:
        self.library, self.numbers = library, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> Sample:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number, counts, target = int(self.numbers[row]), self.library.counts, self.library.target
        part = slice(*counts.indptr[number : number + 2])
        value = None if target is None else target.values[number].item()
        taxa, reads = counts.indices[part].astype(np.int64), counts.data[part].copy()  # a record is nobody else's
        return Sample(number, self.library.samples[number], taxa, reads, value)

    @property
    def manifest(self) -> dict[str, Any]:
        """The files that the samples come from; see `unisono.data.sources`."""
        return self.library.manifest

    @cached_property
    def fingerprint(self) -> str:
        """What the rows are, in hex."""
        told = [self.library.fingerprint, self.numbers.tolist()]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]


def _spread(values: NDArray[Any]) -> dict[str, float]:
    return {"min": int(values.min()), "median": float(np.median(values)), "max": int(values.max())}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
