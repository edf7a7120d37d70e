"""Sequences of the taxa, from a FASTA file or from their ids, and their lineages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from unisono import DataError
from unisono.recipe_tools import format_examples, format_share, safe_paths
from unisono_microbiome.study import artifacts, metadata

_LETTERS = re.compile(r"[ACGTURYSWKMBDHVN]+", re.IGNORECASE)  # bases, and the signs for several of them

UNASSIGNED = "Unassigned"


def read_fasta(path: Path) -> dict[str, str]:
    """The sequences of a FASTA file by their ids, which are the first words of the headers and may not occur twice."""
    artifacts.check_file(path, "data.fasta", "the sequences of the taxa as FASTA, or a .qza")
    with artifacts.open_data(path, "data.fasta") as inner:
        return _parse_fasta(inner)


def _parse_fasta(path: Path) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = None
    try:
        lines = safe_paths.read_regular(path).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} (data.fasta) is not text ({error}); if it is compressed, unpack it") from error
    for number, line in enumerate(lines, start=1):
        if line.startswith(">"):
            name = (line[1:].split() or [""])[0]
            if not name or name in found:
                raise DataError(
                    f"{path} (data.fasta), line {number}: "
                    + (f"the id '{name}' occurs twice; keep one" if name else "a header without an id")
                )
            found[name] = []
        elif line.strip():
            if name is None:
                raise DataError(f"{path} (data.fasta), line {number}: a FASTA file must begin with a header, '>id'")
            if not _LETTERS.fullmatch(line.strip()):
                raise DataError(
                    f"{path} (data.fasta), line {number}: {format_examples([line.strip()])} of '{name}' is not DNA; "
                    "remove gaps and other symbols"
                )
            found[name].append(line.strip())
    if empty := [name for name, parts in found.items() if not parts]:
        raise DataError(f"{path} (data.fasta): {format_share(empty, len(found), 'ids')} have no sequence")
    return {name: "".join(parts) for name, parts in found.items()}


def read_lineages(path: Path, taxa: Sequence[str]) -> list[str]:
    """The lineage of each taxon, from a table whose first column is the taxon; `Unassigned` if it is missing."""
    with artifacts.open_data(path, "data.taxonomy") as inner:
        found = metadata.read_metadata(inner, "data.taxonomy", strip=True)
    named = [name for name in found.columns if name.lower() in ("taxon", "taxonomy", "lineage")]
    column = named[0] if named else list(found.columns)[1] if len(found.columns) > 1 else None
    if column is None:
        raise DataError(f"{path} (data.taxonomy) has one column; it needs taxon and lineage, separated by a tab")
    known = dict(zip(found.ids, found.columns[column], strict=True))
    if not known.keys() & set(taxa):
        raise DataError(
            f"{path} (data.taxonomy) has none of the {len(taxa)} taxa of the table: its ids are "
            f"{format_examples(found.ids)}, the table's {format_examples(taxa)}; give the taxonomy of this table"
        )
    return [known.get(taxon) or UNASSIGNED for taxon in taxa]
