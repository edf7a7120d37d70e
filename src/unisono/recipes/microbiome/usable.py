"""What of a table can be used: samples that have reads and everything that is asked for, taxa that are known.

What cannot is an error that tells all of it at once, with the name of the reason for which it may be left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from unisono.recipes.microbiome import metadata as metadata_
from unisono.recipes.microbiome import nucleotides
from unisono.recipes.microbiome import sequences as sequences_
from unisono.recipes.microbiome import table as tables
from unisono.recipes.microbiome.matrices import Matrix
from unisono.recipes.microbiome.metadata import Metadata
from unisono.recipes.microbiome.settings import Reason, Study
from unisono.recipes.microbiome.table import Table
from unisono.recipes.microbiome.told import examples, how_many
from unisono.recipes.microbiome.tree import Tree
from unisono.runtime.errors import ConfigError, DataError

Chosen = NDArray[np.bool_]


@dataclass(frozen=True)
class Usable:
    """What is left.

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


def usable(config: Study) -> Usable:
    """Read a table and what belongs to it, and leave out what the settings say.

    Raises:
        ConfigError: for a column that is not there.
        DataError: for what does not fit and is not to be left out.
    """
    table, known = tables.read(config.table), _metadata(config)
    sieve = _Sieve(config)
    taxa, sequences = _taxa(config, table, sieve)
    table = table.of(np.arange(len(table.samples)), np.flatnonzero(taxa))
    samples = _samples(config, table, known, sieve)
    sieve.finish()
    rows = np.flatnonzero(samples)
    table = table.of(rows, np.arange(len(table.taxa)))
    columns = {} if known is None else known.aligned(table.samples)
    return Usable(table, rows, columns, sequences, sieve.left_out)


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
class _Sieve:
    """Leaves out what may be, and collects what may not."""

    config: Study
    left_out: dict[str, list[str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def keep(self, kept: Chosen, bad: Chosen, names: list[str], reason: Reason, what: str, told: str) -> Chosen:
        """What is kept so far without the bad, each of which is told once, for its first reason."""
        bad = bad & kept
        found = [names[number] for number in np.flatnonzero(bad)]
        if not found:
            return kept
        if reason in self.config.leave_out:
            self.left_out[reason] = found
            if not (kept & ~bad).any():
                raise DataError(
                    f"{self.config.table}: all {len(names)} {what} {told}, so that leaving them out leaves none"
                )
        else:
            self.faults.append(f"{how_many(found, len(names), what)} {told} [{reason}]")
        return kept & ~bad

    def finish(self) -> None:
        """Tell what may not be left out."""
        if self.faults:
            raise DataError(
                f"{self.config.table}: {'; '.join(self.faults)}. Mend the files, or leave these out by data.leave_out "
                "with the reasons in brackets"
            )


def _taxa(config: Study, table: Table, sieve: _Sieve) -> tuple[Chosen, list[str] | None]:
    """The taxa that are kept, and the sequences of those that are."""
    kept = np.ones(len(table.taxa), dtype=bool)
    if "not_in_tree" in config.leave_out and config.tree is not None:  # else it is read when it is needed
        absent = set(Tree(config.tree).missing(table.taxa))
        bad = np.array([name in absent for name in table.taxa], dtype=bool)
        kept = sieve.keep(kept, bad, table.taxa, "not_in_tree", "taxa", f"are not among the tips of {config.tree}")
    known = None if config.fasta is None else sequences_.fasta(config.fasta)
    has = [nucleotides.is_dna(name) if known is None else name in known for name in table.taxa]
    if known is not None or "not_dna" in config.leave_out:
        told = "have ids that are no sequences" if known is None else f"have no sequence in {config.fasta}"
        kept = sieve.keep(kept, ~np.array(has, dtype=bool), table.taxa, "not_dna", "taxa", told)
    left = [table.taxa[number] for number in np.flatnonzero(kept)]
    if known is not None:
        return kept, [known[name] for name in left]
    return kept, left if all(map(nucleotides.is_dna, left)) else None


def _samples(config: Study, table: Table, known: Metadata | None, sieve: _Sieve) -> Chosen:
    """The samples that are kept."""
    names = table.samples
    kept = np.ones(len(names), dtype=bool)

    def leave_out(reason: Reason, bad: Chosen, told: str) -> None:
        nonlocal kept
        kept = sieve.keep(kept, bad, names, reason, "samples", told)

    leave_out("empty", table.depths == 0, "have no reads")
    if config.rarefy is not None:
        leave_out("shallow", table.depths < config.rarefy, f"have fewer reads than data.rarefy={config.rarefy}")
    if known is not None:
        row = {name: number for number, name in enumerate(known.ids)}
        absent = np.array([name not in row for name in names], dtype=bool)
        _refuse_strangers(config, names, known.ids, absent, f"{known.path} (data.metadata)", "; choose data.id_column")
        leave_out("no_metadata", absent, f"are not in {known.path}")
        for reason, column in _NEEDED:
            if (name := getattr(config, column)) is not None:
                none = metadata_.missing(known.column(name, f"data.{column}"), config.missing)
                lacking = np.array([sample in row and bool(none[row[sample]]) for sample in names], dtype=bool)
                leave_out(reason, lacking, f"have no value of '{name}'")
    matrix = matrix_of(config)
    if matrix is not None:
        if matrix.ids is None:
            if len(matrix.values) != len(names):
                raise DataError(
                    f"{matrix} has {len(matrix.values)} rows and no ids, and {config.table} has {len(names)} samples; "
                    "give a file with ids (.npz, .h5, .tsv), or a row for each sample of the table, in its order"
                )
        else:
            there = set(matrix.ids)
            absent = np.array([name not in there for name in names], dtype=bool)
            _refuse_strangers(config, names, matrix.ids, absent, str(matrix), "")
            leave_out("no_distances", absent, f"are not in {matrix}")
    return kept


_NEEDED: tuple[tuple[Reason, str], ...] = (("no_group", "group"), ("no_target", "target"))


def _refuse_strangers(config: Study, names: list[str], ids: list[str], absent: Chosen, where: str, remedy: str) -> None:
    if absent.all():
        raise DataError(
            f"none of the {len(names)} samples of {config.table} is in {where}: here they are called "
            f"{examples(names)}, there {examples(ids) or 'nothing'}{remedy}"
        )


def _metadata(config: Study) -> Metadata | None:
    if config.metadata is None:
        for key in ("target", "group"):
            if (name := getattr(config, key)) is not None:
                raise ConfigError(f"data.{key}={name} is a column of the metadata: set data.metadata")
        return None
    used = [name for name in (config.target, config.group) if name is not None]
    strip = config.white_space == "strip"
    found = metadata_.read(config.metadata, "data.metadata", config.id_column, strip, used)
    for _, key in _NEEDED:
        if (name := getattr(config, key)) is not None:
            found.column(name, f"data.{key}")
    return found
