"""The samples of a run: their counts, what is known of them, which are held out, and how far they are from each other.

Everything is aligned to one list of samples and one of taxa, those that are left once what cannot be used is left out.
What does not fit is told in one error, with counts and examples, before anything expensive begins.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import ConfigError, DataError
from unisono.recipes.microbiome import metadata as metadata_
from unisono.recipes.microbiome import nucleotides, splits
from unisono.recipes.microbiome import table as tables
from unisono.recipes.microbiome.metadata import Metadata, Target
from unisono.recipes.microbiome.settings import Metric, Samples, Simulated, Study
from unisono.recipes.microbiome.table import Table
from unisono.recipes.microbiome.told import how_many

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
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
        raise NotImplementedError
    return Library.of(config)


@dataclass(frozen=True)
class Library:
    """Samples, aligned to each other.

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

    @classmethod
    def of(cls, config: Study) -> Library:
        """Read what the settings name, and have it fit."""
        table = tables.read(config.table)
        known = _metadata(config)
        table, left_out = _usable(config, table, known)
        columns = {} if known is None else known.aligned(table.samples)
        target = None
        if config.target is not None:
            target = metadata_.target_of(
                config.target, columns[config.target], table.samples, config.target_kind, config.classes
            )
        groups = list(table.samples) if config.group is None else columns[config.group]
        sequences = table.taxa if all(map(nucleotides.is_dna, table.taxa)) else None
        return cls(
            config,
            table.samples,
            table.taxa,
            table.counts,
            sequences,
            columns,
            table.taxonomy,
            target,
            groups,
            left_out,
        )

    def training(self) -> Rows:
        """The samples to train on."""
        return Rows(self, np.flatnonzero(~self._held_out))

    def held_out(self) -> Rows:
        """The samples kept apart; it can be empty."""
        return Rows(self, np.flatnonzero(self._held_out))

    def distances(self, metric: Metric | None = None) -> NDArray[np.float64]:
        """Between all pairs of samples, (samples, samples) float64, symmetric, with a diagonal of 0."""
        raise NotImplementedError

    def faith_pd(self) -> NDArray[np.float64]:
        """Faith's phylogenetic diversity of each sample, (samples,) float64."""
        raise NotImplementedError

    def dna(self) -> list[str]:
        """The sequences, where they are needed.

        Raises:
            DataError: where they are not known of all taxa.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Refuse a tree or distances that do not fit, before anything is computed with them."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Sizes, as JSON."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        """What the samples and their targets are, in hex."""
        table = Table(self.samples, self.taxa, self.counts).digest
        target = None if self.target is None else [self.target.kind, self.target.classes, self.target.values.tolist()]
        return hashlib.sha256(json.dumps([table, target]).encode()).hexdigest()[:32]

    @cached_property
    def _held_out(self) -> NDArray[np.bool_]:
        config = self.config
        return splits.held_out(self.groups, config.held_out, config.fold, config.held_out_groups, config.group)


class Rows:
    """Some samples of a library as rows.

    Args:
        library: all of them.
        numbers: which, in order.
    """

    def __init__(self, library: Library, numbers: Numbers) -> None:
        self._counts, self.numbers = library.counts, numbers
        self._names = library.samples
        self._target = None if library.target is None else library.target.values
        self._of = library.fingerprint

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> Sample:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        number = int(self.numbers[row])
        first, last = self._counts.indptr[number : number + 2]
        taxa = self._counts.indices[first:last].astype(np.int64)
        target = None if self._target is None else self._target[number].item()
        return Sample(number, self._names[number], taxa, self._counts.data[first:last], target)

    @cached_property
    def fingerprint(self) -> str:
        """What the rows are, in hex."""
        return hashlib.sha256(json.dumps([self._of, self.numbers.tolist()]).encode()).hexdigest()[:32]


def _metadata(config: Study) -> Metadata | None:
    if config.metadata is None:
        for key in ("target", "group"):
            if getattr(config, key) is not None:
                raise ConfigError(f"data.{key}={getattr(config, key)} is a column of the metadata: set data.metadata")
        return None
    used = [name for name in (config.target, config.group) if name is not None]
    strip = config.white_space == "strip"
    found = metadata_.read(config.metadata, "data.metadata", config.id_column, strip, used)
    for key in ("target", "group"):
        if getattr(config, key) is not None:
            found.column(getattr(config, key), f"data.{key}")
    return found


def _usable(config: Study, table: Table, known: Metadata | None) -> tuple[Table, dict[str, list[str]]]:
    """The table without what is left out, and what that is, by reason; an error with all that should not be."""
    kept = np.ones(len(table.samples), dtype=bool)
    left_out: dict[str, list[str]] = {}
    faults: list[str] = []

    def leave_out(reason: str, bad: NDArray[np.bool_], told: str) -> None:
        nonlocal kept
        bad = bad & kept
        if not bad.any():
            return
        names = [table.samples[number] for number in np.flatnonzero(bad)]
        if reason in config.leave_out:
            left_out[reason] = names
        else:
            faults.append(f"{how_many(names, len(table.samples), 'samples')} {told} ({reason})")
        kept = kept & ~bad  # told once, for the first reason

    depths = table.depths
    leave_out("empty", depths == 0, "have no reads")
    if config.rarefy is not None:
        leave_out("shallow", depths < config.rarefy, f"have fewer reads than data.rarefy={config.rarefy}")
    if known is not None:
        row = {name: number for number, name in enumerate(known.ids)}
        absent = np.array([name not in row for name in table.samples], dtype=bool)
        if absent.all():
            raise DataError(
                f"none of the {len(table.samples)} samples of {config.table} is in {known.path}: there they are called "
                f"{how_many(known.ids, len(known.ids), 'ids')}, here {how_many(table.samples, len(table.samples), 'ids')}"
                "; choose their column by data.id_column"
            )
        leave_out("no_metadata", absent, f"are not in {known.path}")
        for reason, column in (("no_group", config.group), ("no_target", config.target)):
            if column is not None:
                none = metadata_.missing(known.columns[column], config.missing)
                bad = np.array([name in row and none[row[name]] for name in table.samples], dtype=bool)
                leave_out(reason, bad, f"have no value of {column}")
    if faults:
        raise DataError(
            f"{config.table}: {'; '.join(faults)}. Mend the files, or leave them out by data.leave_out=[…] with the "
            "reasons in brackets"
        )
    if not kept.any():
        raise DataError(f"{config.table}: data.leave_out leaves no sample of {len(table.samples)}")
    return table.of(np.flatnonzero(kept), np.arange(len(table.taxa))), left_out
