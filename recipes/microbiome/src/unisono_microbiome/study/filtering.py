"""Filters a study: keeps samples with reads and all required values, and known taxa.

Everything else is reported in one error, each with the reason by which it can be skipped.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError
from unisono.recipe_tools import format_examples, format_share
from unisono_microbiome import nucleotides
from unisono_microbiome.settings import Reason, Study
from unisono_microbiome.study import metadata as metadata_
from unisono_microbiome.study import sequences as sequences_
from unisono_microbiome.study import table as tables
from unisono_microbiome.study.matrices import Matrix
from unisono_microbiome.study.metadata import Metadata
from unisono_microbiome.study.storage import Storage
from unisono_microbiome.study.table import CountTable
from unisono_microbiome.study.tree import Tree

KeptIndices = NDArray[np.bool_]


@dataclass(frozen=True)
class FilteredStudy:
    """The part of a study that is kept.

    Attributes:
        table: of it.
        rows: of its samples in the file, (samples,).
        columns: of the metadata, aligned to its samples.
        types: of columns, as QIIME 2 has them; empty where the metadata do not say.
        sequences: of its taxa, or None.
        left_out: ids of the rest, by reason.
    """

    table: CountTable
    rows: NDArray[np.int64]
    columns: dict[str, list[str]]
    types: dict[str, str]
    sequences: list[str] | None
    left_out: dict[str, list[str]]


def filter_study(config: Study) -> FilteredStudy:
    """Read a table and its accompanying files, and skip what the settings say; all that is wrong is one error."""
    table = tables.read_table(config.table, Storage(config.in_memory, config.cache))
    known = _read_metadata(config)
    filter_ = _StudyFilter(config)
    taxa, sequences = _keep_taxa(config, table, filter_)
    rows = np.flatnonzero(_keep_samples(config, table, taxa, known, filter_))
    if filter_.faults:
        raise DataError(
            f"{config.table}: {'; '.join(filter_.faults)}. Fix the files, or skip these by their reasons in brackets: "
            "data.leave_out=[…]"
        )
    table = table.select(rows, np.flatnonzero(taxa))
    columns, types = ({}, {}) if known is None else (known.align(table.samples), known.types)
    return FilteredStudy(table, rows, columns, types, sequences, filter_.left_out)


def load_matrix(config: Study) -> Matrix | None:
    """The ready distances, where the settings name some."""
    if config.distances is None:
        return None
    if config.metric == "faith_pd":
        raise ConfigError(
            "data.distances holds distances, but data.metric=faith_pd is not one; give its values per sample as a "
            "column of the metadata: data.target"
        )
    return Matrix(config.distances, config.metric, config.distances_key)


@dataclass
class _StudyFilter:
    """Skips what may be skipped, and collects faults."""

    config: Study
    left_out: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def keep(
        self, kept: KeptIndices, bad: Collection[bool], names: list[str], reason: Reason, what: str, why: str
    ) -> KeptIndices:
        """Remove bad entries from those kept so far; each is listed once, for its first reason."""
        wrong = np.array(bad, dtype=bool) & kept
        found = [names[number] for number in np.flatnonzero(wrong)]
        if found and reason in self.config.leave_out:
            self.left_out[reason] = found
            if not (kept & ~wrong).any():
                raise DataError(f"{self.config.table}: all {len(names)} {what} {why}, so none would be left")
        elif found:
            self.faults.append(f"{format_share(found, len(names), what)} {why} [{reason}]")
        return kept & ~wrong


def _keep_taxa(config: Study, table: CountTable, filter_: _StudyFilter) -> tuple[KeptIndices, list[str] | None]:
    """The taxa that are kept, and the sequences of those that are."""
    names, kept = table.taxa, np.ones(len(table.taxa), dtype=bool)
    if "not_in_tree" in config.leave_out and config.tree is not None:  # else it is read when it is needed
        absent = set(Tree(config.tree).find_missing(names))
        why = f"are not among the tips of {config.tree}"
        kept = filter_.keep(kept, [name in absent for name in names], names, "not_in_tree", "taxa", why)
    known = None if config.fasta is None else sequences_.read_fasta(config.fasta)
    if known is not None or "not_dna" in config.leave_out:
        lacking = [not nucleotides.is_dna(name) if known is None else name not in known for name in names]
        why = "have ids that are not sequences" if known is None else f"have no sequence in {config.fasta}"
        kept = filter_.keep(kept, lacking, names, "not_dna", "taxa", why)
    left = [names[number] for number in np.flatnonzero(kept)]
    if known is not None:
        return kept, [known.get(name, "") for name in left]
    return kept, left if all(map(nucleotides.is_dna, left)) else None


def _keep_samples(
    config: Study, table: CountTable, taxa: KeptIndices, known: Metadata | None, filter_: _StudyFilter
) -> KeptIndices:
    """The samples that are kept, given the taxa that are."""
    names, kept = table.samples, np.ones(len(table.samples), dtype=bool)

    def leave_out(reason: Reason, bad: Collection[bool], why: str) -> None:
        nonlocal kept
        kept = filter_.keep(kept, bad, names, reason, "samples", why)

    def leave_out_absent(reason: Reason, ids: list[str], where: str, remedy: str = "") -> None:
        there = set(ids)
        if there.isdisjoint(names):
            numbers = {metadata_.parse_number(name) for name in names} - {None}
            if not numbers.isdisjoint(map(metadata_.parse_number, ids)):
                remedy = "; a spreadsheet or pandas has read ids as numbers: write them as in the table, as text"
            raise DataError(
                f"none of the {len(names)} samples of {config.table} is in {where}: here they are called "
                f"{format_examples(names)}, there {format_examples(ids) or 'nothing'}{remedy}"
            )
        leave_out(reason, [name not in there for name in names], f"are not in {where}")

    depths = table.count_reads(taxa)
    leave_out("empty", depths == 0, "have no reads")
    if config.rarefy is not None:
        leave_out("shallow", depths < config.rarefy, f"have fewer reads than data.rarefy={config.rarefy}")
    if known is not None:
        leave_out_absent("no_metadata", known.ids, f"{known.source} (data.metadata)", "; choose data.id_column")
        for reason, key, name in _list_columns(config):
            markers = [*config.missing, *known.missing.get(name, ())]
            none = metadata_.is_missing(known.column(name, key), markers)
            lacking = {known.ids[row] for row in np.flatnonzero(none)}
            leave_out(reason, [sample in lacking for sample in names], f"have no value of '{name}'")
    matrix = load_matrix(config)
    if matrix is not None and matrix.ids is not None:
        leave_out_absent("no_distances", matrix.ids, str(matrix))
    elif matrix is not None and len(matrix.values) != len(names):
        raise DataError(
            f"{matrix} has {len(matrix.values)} rows and no ids, but {config.table} has {len(names)} samples; give a "
            "file with ids (.npz, .h5, .tsv), or one row per sample of the table, in its order"
        )
    return kept


def _read_metadata(config: Study) -> Metadata | None:
    columns = _list_columns(config)
    if not (paths := config.metadata_files):
        for _, key, name in reversed(columns):
            raise ConfigError(f"{key}={name} is a column of the metadata: set data.metadata")
        return None
    strip = config.white_space == "strip"
    used = [name for _, _, name in reversed(columns)]
    read = [metadata_.read_metadata(path, "data.metadata", config.id_column, strip, used) for path in paths]
    found = metadata_.join_metadata(read, "data.metadata", config.id_column)
    ids = config.id_column or next(iter(found.columns))
    for _, key, name in reversed(columns):
        found.column(name, key)
        if name == ids and key != "data.group":
            raise ConfigError(f"{key}={name} is the column of the samples' ids, from which nothing can be learnt")
    return found


def _list_columns(config: Study) -> list[tuple[Reason, str, str]]:
    """The columns of the metadata that are needed: why a sample without a value is left out, the setting, its name."""
    single: tuple[tuple[Reason, str], ...] = (
        ("no_group", "group"), ("no_target", "target"), ("no_covariate", "target_by"),
    )  # fmt: skip
    found = [(reason, f"data.{key}", name) for reason, key in single if (name := getattr(config, key)) is not None]
    return [*found, *(("no_covariate", "data.covariates", name) for name in config.covariates)]
