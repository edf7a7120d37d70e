"""What of a study is kept: samples that have reads and everything that is asked for, taxa that are known.

What cannot be used is one error that lists all of it, each with the name of the reason for which it may be left out.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, format_examples, format_share
from unisono.recipes.microbiome import nucleotides
from unisono.recipes.microbiome.settings import Reason, Study
from unisono.recipes.microbiome.study import metadata as metadata_
from unisono.recipes.microbiome.study import sequences as sequences_
from unisono.recipes.microbiome.study import table as tables
from unisono.recipes.microbiome.study.matrices import Matrix
from unisono.recipes.microbiome.study.metadata import Metadata
from unisono.recipes.microbiome.study.table import Table
from unisono.recipes.microbiome.study.tree import Tree

Chosen = NDArray[np.bool_]
_NEEDED: tuple[tuple[Reason, str], ...] = (("no_group", "group"), ("no_target", "target"))


@dataclass(frozen=True)
class Filtered:
    """What is kept.

    Attributes:
        table: of it.
        rows: of its samples in the file, (samples,).
        columns: of the metadata, aligned to its samples.
        sequences: of its taxa, or None.
        left_out: ids of the rest, by reason.
    """

    table: Table
    rows: NDArray[np.int64]
    columns: dict[str, list[str]]
    sequences: list[str] | None
    left_out: dict[str, list[str]]


def filter_study(config: Study) -> Filtered:
    """Read a table and what belongs to it, and leave out what the settings say.

    Raises:
        ConfigError: for a column that does not exist.
        DataError: for what does not fit and is not to be left out.
    """
    table, known = tables.read(config.table), _metadata(config)
    filter_ = _Filter(config)
    taxa, sequences = _taxa(config, table, filter_)
    table = table.of(np.arange(len(table.samples)), np.flatnonzero(taxa))
    rows = np.flatnonzero(_samples(config, table, known, filter_))
    if filter_.faults:
        raise DataError(
            f"{config.table}: {'; '.join(filter_.faults)}. Fix the files, or leave these out: data.leave_out=[…] with the "
            "reasons in brackets"
        )
    table = table.of(rows, np.arange(len(table.taxa)))
    columns = {} if known is None else known.aligned(table.samples)
    return Filtered(table, rows, columns, sequences, filter_.left_out)


def matrix_of(config: Study) -> Matrix | None:
    """The ready distances, where the settings name some."""
    if config.distances is None:
        return None
    if config.metric == "faith_pd":
        raise ConfigError(
            "data.distances holds distances, and data.metric=faith_pd is none; give ready values of each sample as a "
            "column of the metadata, by data.target"
        )
    return Matrix(config.distances, config.metric, config.distances_key)


@dataclass
class _Filter:
    """Leaves out what may be, and collects what may not."""

    config: Study
    left_out: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def keep(
        self, kept: Chosen, bad: Collection[bool], names: list[str], reason: Reason, what: str, why: str
    ) -> Chosen:
        """What is kept so far without the bad, each of which is listed once, for its first reason."""
        wrong = np.array(bad, dtype=bool) & kept
        found = [names[number] for number in np.flatnonzero(wrong)]
        if found and reason in self.config.leave_out:
            self.left_out[reason] = found
            if not (kept & ~wrong).any():
                raise DataError(
                    f"{self.config.table}: all {len(names)} {what} {why}, so that leaving them out leaves none"
                )
        elif found:
            self.faults.append(f"{format_share(found, len(names), what)} {why} [{reason}]")
        return kept & ~wrong


def _taxa(config: Study, table: Table, filter_: _Filter) -> tuple[Chosen, list[str] | None]:
    """The taxa that are kept, and the sequences of those that are."""
    names, kept = table.taxa, np.ones(len(table.taxa), dtype=bool)
    if "not_in_tree" in config.leave_out and config.tree is not None:  # else it is read when it is needed
        absent = set(Tree(config.tree).missing(names))
        why = f"are not among the tips of {config.tree}"
        kept = filter_.keep(kept, [name in absent for name in names], names, "not_in_tree", "taxa", why)
    known = None if config.fasta is None else sequences_.fasta(config.fasta)
    if known is not None or "not_dna" in config.leave_out:
        lacking = [not nucleotides.is_dna(name) if known is None else name not in known for name in names]
        why = "have ids that are no sequences" if known is None else f"have no sequence in {config.fasta}"
        kept = filter_.keep(kept, lacking, names, "not_dna", "taxa", why)
    left = [names[number] for number in np.flatnonzero(kept)]
    if known is not None:
        return kept, [known.get(name, "") for name in left]
    return kept, left if all(map(nucleotides.is_dna, left)) else None


def _samples(config: Study, table: Table, known: Metadata | None, filter_: _Filter) -> Chosen:
    """The samples that are kept."""
    names, kept = table.samples, np.ones(len(table.samples), dtype=bool)

    def leave_out(reason: Reason, bad: Collection[bool], why: str) -> None:
        nonlocal kept
        kept = filter_.keep(kept, bad, names, reason, "samples", why)

    def leave_out_absent(reason: Reason, ids: list[str], where: str, remedy: str = "") -> None:
        there = set(ids)
        if there.isdisjoint(names):
            raise DataError(
                f"none of the {len(names)} samples of {config.table} is in {where}: here they are called "
                f"{format_examples(names)}, there {format_examples(ids) or 'nothing'}{remedy}"
            )
        leave_out(reason, [name not in there for name in names], f"are not in {where}")

    leave_out("empty", table.depths == 0, "have no reads")
    if config.rarefy is not None:
        leave_out("shallow", table.depths < config.rarefy, f"have fewer reads than data.rarefy={config.rarefy}")
    if known is not None:
        leave_out_absent("no_metadata", known.ids, f"{known.path} (data.metadata)", "; choose data.id_column")
        for reason, setting in _NEEDED:
            if (name := getattr(config, setting)) is not None:
                none = metadata_.missing(known.column(name, f"data.{setting}"), config.missing)
                lacking = {known.ids[row] for row in np.flatnonzero(none)}
                leave_out(reason, [sample in lacking for sample in names], f"have no value of '{name}'")
    matrix = matrix_of(config)
    if matrix is not None and matrix.ids is not None:
        leave_out_absent("no_distances", matrix.ids, str(matrix))
    elif matrix is not None and len(matrix.values) != len(names):
        raise DataError(
            f"{matrix} has {len(matrix.values)} rows and no ids, and {config.table} has {len(names)} samples; give a file "
            "with ids (.npz, .h5, .tsv), or a row for each sample of the table, in its order"
        )
    return kept


def _metadata(config: Study) -> Metadata | None:
    asked = {key: name for _, key in reversed(_NEEDED) if (name := getattr(config, key)) is not None}
    if config.metadata is None:
        for key, name in asked.items():
            raise ConfigError(f"data.{key}={name} is a column of the metadata: set data.metadata")
        return None
    strip = config.white_space == "strip"
    found = metadata_.read(config.metadata, "data.metadata", config.id_column, strip, list(asked.values()))
    for key, name in asked.items():
        found.column(name, f"data.{key}")
    return found
