"""Sequences from FASTA, lineages from a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.runtime.errors import DataError
from unisono_microbiome.study.sequences import read_fasta, read_lineages


def test_sequences_are_read_over_several_lines(tmp_path: Path) -> None:
    (tmp_path / "r.fasta").write_text(">a some words\nACGT\nRYNU\n\n>b\nacgt\n")
    assert read_fasta(tmp_path / "r.fasta") == {"a": "ACGTRYNU", "b": "acgt"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ACGT\n", "line 1: a FASTA file must begin with a header"),
        (">a\nAC-GT\n", "line 2: 'AC-GT' of 'a' is not DNA"),
        (">a\nMKVL\n>b\nEEE\n", "line 2: 'MKVL' of 'a' is not DNA"),
        (">a\nACGT\n>a\nACGT\n", "line 3: the id 'a' occurs twice"),
        (">\nACGT\n", "line 1: a header without an id"),
        (">a\n>b\nACGT\n", r"1 of 2 ids \('a'\) have no sequence"),
    ],
)
def test_what_is_no_fasta_is_refused_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "r.fasta").write_text(text)
    with pytest.raises(DataError, match=rf"r\.fasta \(data\.fasta\).*{told}"):
        read_fasta(tmp_path / "r.fasta")


def test_a_compressed_or_absent_fasta_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_fasta(tmp_path / "r.fasta")
    (tmp_path / "r.fasta").write_bytes(b"\x1f\x8b\x08\xff\xff")
    with pytest.raises(DataError, match=r"is not text .*unpack it"):
        read_fasta(tmp_path / "r.fasta")


def test_lineages_are_aligned_to_the_taxa(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("Feature ID\tConfidence\tTaxon\nB\t1\tk__B\nA\t1\tk__A; p__x\nC\t1\t\n")
    assert read_lineages(path, ["B", "D", "A", "C"]) == ["k__B", "Unassigned", "k__A; p__x", "Unassigned"]
    path.write_text("taxon id\twhat it is\nA\tx\n")
    assert read_lineages(path, ["A"]) == ["x"]


def test_lineages_of_other_taxa_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.tsv"
    path.write_text("Feature ID\tTaxon\nX\tk__A\n")
    with pytest.raises(DataError, match=r"has none of the 2 taxa .* its ids are 'X', the table's 'A', 'B'"):
        read_lineages(path, ["A", "B"])
    path.write_text("Feature ID\nA\n")
    with pytest.raises(DataError, match="has one column"):
        read_lineages(path, ["A"])
