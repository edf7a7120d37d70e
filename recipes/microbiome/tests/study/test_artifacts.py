"""Artifacts of QIIME 2: all that a study has is read from them, forged ones are refused, and predictions are ones."""

from __future__ import annotations

import csv
import io
import stat
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.microbiome.tests.studies import (
    COUNTS,
    DNA,
    METADATA,
    NEWICK,
    SAMPLES,
    TAXA,
    changed,
    study,
    unweighted,
    weighted,
    write_hdf5,
    write_rows,
)  # fmt: skip
from unisono.runtime.errors import DataError, UnisonoError
from unisono_microbiome.study import artifacts
from unisono_microbiome.study.artifacts import open_data, write_artifact, write_distances, write_metadata
from unisono_microbiome.study.library import open_library
from unisono_microbiome.study.matrices import Matrix
from unisono_microbiome.study.metadata import read_metadata

ROOT = "8f71b73d-b028-4cbc-9894-738bdfe718bf"
TABLE = "FeatureTable[Frequency]"


def forge(path: Path, members: dict[str, str | bytes], kind: str = TABLE, root: str = ROOT) -> Path:
    """An archive with these files beside VERSION and metadata.yaml."""
    usual = {
        "VERSION": "QIIME 2\narchive: 7.1\nframework: 2025.10.1\n",
        "metadata.yaml": f"uuid: {root}\ntype: {kind}\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**usual, **members}.items():
            archive.writestr(f"{root}/{name}" if not name.startswith("/") else name[1:], content)
    return path


def convert(folder: Path) -> dict[str, Path]:
    """A small study as artifacts."""
    fasta = "".join(f">{taxon}\n{dna}\n" for taxon, dna in zip(TAXA, DNA, strict=True))
    lineages = "Feature ID\tTaxon\n" + "".join(f"{taxon}\tk__{taxon}\n" for taxon in TAXA)
    told = {
        "table": (TABLE, "feature-table.biom", write_hdf5(folder / "t.biom").read_bytes()),
        "tree": ("Phylogeny[Rooted]", "tree.nwk", NEWICK.encode()),
        "fasta": ("FeatureData[Sequence]", "dna-sequences.fasta", fasta.encode()),
        "taxonomy": ("FeatureData[Taxonomy]", "taxonomy.tsv", lineages.encode()),
        "metadata": (
            "ImmutableMetadata", "metadata.tsv", write_rows(folder / "m.tsv", METADATA).read_bytes(),
        ),
    }  # fmt: skip
    return {
        key: write_artifact(folder / f"{key}.qza", kind, "DirFmt", {name: content})
        for key, (kind, name, content) in told.items()
    }


def test_a_study_of_artifacts_is_that_of_the_files_in_them(tmp_path: Path) -> None:
    library = open_library(study(tmp_path / "s", target="age", group="subject").model_copy(update=convert(tmp_path)))
    assert np.array_equal(library.counts.toarray(), COUNTS)
    assert library.dna() == list(DNA)
    assert library.taxonomy == [f"k__{taxon}" for taxon in TAXA]
    assert library.target is not None
    assert library.target.values.tolist() == [float(age) for age in METADATA["age"]]
    assert np.abs(library.distances("unweighted_unifrac") - unweighted(COUNTS)).max() < 1e-12
    assert np.abs(library.distances("weighted_normalized_unifrac") - weighted(COUNTS, True)).max() < 1e-12


def test_distances_are_read_from_an_artifact_with_properties(tmp_path: Path) -> None:
    content = write_distances(tmp_path / "d.tsv", SAMPLES, unweighted(COUNTS)).read_bytes()
    path = forge(
        tmp_path / "d.qza", {"data/distance-matrix.tsv": content}, "DistanceMatrix % Properties('phylogenetic')"
    )
    library = open_library(study(tmp_path / "s", distances=path))
    assert np.abs(library.distances() - unweighted(COUNTS)).max() < 1e-5


def test_alpha_diversity_is_metadata(tmp_path: Path) -> None:
    lines = "\tshannon\n" + "".join(f"{name}\t{number}.5\n" for number, name in enumerate(SAMPLES))
    path = forge(tmp_path / "a.qza", {"data/alpha-diversity.tsv": lines}, "SampleData[AlphaDiversity]")
    library = open_library(study(tmp_path / "s").model_copy(update={"metadata": path, "target": "shannon"}))
    assert library.target is not None
    assert library.target.values.tolist() == [number + 0.5 for number in range(8)]


# what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("members", "kind", "told"),
    [
        ({"data/x": "x"}, TABLE, r"has no data/feature-table\.biom"),
        (
            {},
            "FeatureTable[RelativeFrequency]",
            r"of type FeatureTable\[RelativeFrequency\], but this setting needs Fea",
        ),
        ({}, "Phylogeny[Rooted]", r"of type Phylogeny\[Rooted\], but this setting needs FeatureTable\[Frequency\]"),
        ({}, "Visualization", r"of type Visualization.*open it with `qiime tools view`"),
        ({"VERSION": "whatever"}, TABLE, "its VERSION does not begin with 'QIIME 2'"),
        ({"VERSION": "QIIME 2" + "\n" * 70000}, TABLE, "has a huge VERSION"),
        ({"/other/VERSION": "QIIME 2"}, TABLE, "should have one folder with a file VERSION, and has"),
        ({"../../../etc/passwd": "x"}, TABLE, r"which lies outside"),
        ({"//etc/passwd": "x"}, TABLE, r"which lies outside"),
        ({"data/feature-table.biom": "no table"}, TABLE, r"a\.qza/data/feature-table\.biom \(data\.table\) is neither"),
    ],
)
def test_what_is_no_artifact_of_that_type_is_refused(
    tmp_path: Path, members: dict[str, str | bytes], kind: str, told: str
) -> None:
    path = forge(tmp_path / "a.qza", members, kind)
    with pytest.raises(UnisonoError, match=told):
        open_library(study(tmp_path / "s", table=path))


def test_a_visualization_is_told_as_that(tmp_path: Path) -> None:
    path = forge(tmp_path / "summary.qzv", {"data/index.html": "x"}, "Visualization")
    with pytest.raises(DataError, match=r"summary\.qzv \(data\.table\) is .* Visualization.* with `qiime tools view`"):
        open_library(study(tmp_path / "s", table=path))


@pytest.mark.parametrize(
    ("key", "name"), [("table", "feature-table.biom"), ("tree", "tree.nwk"), ("metadata", "metadata.tsv")]
)
def test_a_folder_that_qiime_exports_is_told_with_the_file_to_name(tmp_path: Path, key: str, name: str) -> None:
    """`qiime tools export` makes a folder, and it was said not to exist."""
    folder = tmp_path / "exported"
    folder.mkdir()
    config = study(tmp_path / "s").model_copy(update={key: folder})
    with pytest.raises(DataError, match=rf"exported \(data\.{key}\) is a folder: name a file in it"):
        open_library(config).check()
    (folder / name).write_text("x")
    with pytest.raises(DataError, match=rf"\(data\.{key}\) is a folder: name .*exported/{name}"):
        open_library(config).check()


def test_a_link_in_an_artifact_is_refused(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.qza", {})
    with zipfile.ZipFile(path, "a") as archive:
        entry = zipfile.ZipInfo(f"{ROOT}/data/feature-table.biom")
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, "/etc/passwd")
    with pytest.raises(DataError, match="is a link"), open_data(path, "data.table"):
        pass


def test_an_artifact_with_a_file_twice_is_refused(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.qza", {"data/feature-table.biom": "one"})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(f"{ROOT}/data/feature-table.biom", "two")
    with pytest.raises(DataError, match="has two files"), open_data(path, "data.table"):
        pass


def test_an_artifact_that_unpacks_to_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.qza", {})
    content = path.read_bytes()
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{ROOT}/data/feature-table.biom", bytes(1 << 20))
    lied = path.read_bytes().replace((1 << 20).to_bytes(4, "little"), (3 << 30).to_bytes(4, "little"))
    assert lied != content
    path.write_bytes(lied)
    with pytest.raises(DataError, match=r"unpacks to 3\.2 GB"), open_data(path, "data.table"):
        pass


def test_a_file_that_unpacks_to_less_than_it_declares_is_refused(tmp_path: Path) -> None:
    path = forge(tmp_path / "a.qza", {"data/feature-table.biom": b"x" * 1000})
    path.write_bytes(path.read_bytes().replace(b"x" * 1000, b"x" * 999 + b"y"))  # what its checksum does not say
    with pytest.raises(DataError, match="is not a readable QIIME 2 artifact: Bad CRC"), open_data(path, "data.table"):
        pass


# types of metadata ------------------------------------------------------------------------------------------------


def typed(kinds: tuple[str, ...], columns: dict[str, list[str]] = METADATA) -> dict[str, list[str]]:
    row = ("#q2:types", *kinds)
    return {name: [kind, *values] for kind, (name, values) in zip(row, columns.items(), strict=True)}


def test_the_types_of_qiime_say_what_a_target_is(tmp_path: Path) -> None:
    for kind, expected in (("numeric", "regression"), ("categorical", "classification"), ("", "regression")):
        numbered = {**METADATA, "age": ["1", "2"] * 4}
        told = typed(("categorical", "categorical", kind), numbered)
        library = open_library(study(tmp_path / f"s{kind}", metadata=told, target="age"))
        assert library.target is not None
        assert library.target.kind == expected
        assert library.samples == list(SAMPLES)


def test_types_of_qiime_are_checked(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.tsv", typed(("categorical", "number", "numeric")))
    with pytest.raises(DataError, match=r"'number of state'; valid are numeric, categorical"):
        read_metadata(path, "data.metadata")
    late = {
        name: [*values, kind] for (name, values), kind in zip(METADATA.items(), ("#q2:types", "", "", ""), strict=True)
    }
    with pytest.raises(DataError, match="must be a line directly after the header"):
        read_metadata(write_rows(tmp_path / "l.tsv", late), "data.metadata")
    told = typed(("categorical", "categorical", "numeric"), changed("age", 2, "old"))
    with pytest.raises(DataError, match="are not finite numbers"):
        open_library(study(tmp_path / "s", metadata=told, target="age"))


@pytest.mark.parametrize("schemes_first", [False, True])
def test_what_qiime_writes_as_missing_is_missing(tmp_path: Path, schemes_first: bool) -> None:
    columns = changed("age", 2, "not collected")
    rows = [("#q2:types", "categorical", "categorical", "numeric"), ("#q2:missing", "blank", "", "INSDC:missing")]
    if schemes_first:
        rows.reverse()
    told = {name: [row[place] for row in rows] + values for place, (name, values) in enumerate(columns.items())}
    library = open_library(study(tmp_path, metadata=told, target="age", missing=[""], leave_out=["no_target"]))
    assert library.left_out == {"no_target": ["s3"]}
    assert library.target is not None and library.target.kind == "regression"
    assert library.samples == [*SAMPLES[:2], *SAMPLES[3:]]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([("#q2:missing", "", "", "none")], "'none of age'; valid are blank, no-missing, INSDC:missing"),
        (
            [("#q2:missing", "", "", "no-missing")],
            r"column 'age' is 'no-missing' .* 1 of 8 rows \('s3'\) have no value",
        ),
        ([("#q2:units", "", "", "years")], "no line '#q2:units' in QIIME 2, but #q2:types and #q2:missing"),
        ([("#q2:types", "", "", "numeric")] * 2, "has two lines '#q2:types'"),
    ],
)
def test_directives_that_qiime_does_not_know_are_refused(tmp_path: Path, rows: list[tuple[str]], told: str) -> None:
    columns = changed("age", 2, "")
    written = {name: [row[place] for row in rows] + values for place, (name, values) in enumerate(columns.items())}
    with pytest.raises(DataError, match=told):
        read_metadata(write_rows(tmp_path / "m.tsv", written), "data.metadata")


# what is written ------------------------------------------------------------------------------------------------

WRITTEN: dict[str, Any] = {"sample-id": ["a", "b"], "state": ["1", "2"], "p(1)": np.array([0.25, 1e-7])}


def test_a_written_table_has_the_types_of_its_columns(tmp_path: Path) -> None:
    text = write_metadata(tmp_path / "p.tsv", WRITTEN).read_text()
    assert text.splitlines() == [
        "sample-id\tstate\tp(1)",
        "#q2:types\tcategorical\tnumeric",
        "a\t1\t0.25",
        "b\t2\t1e-07",
    ]
    inside = open_data(write_metadata(tmp_path / "p.qza", WRITTEN), "data.metadata")
    with inside as found:
        assert found.read_text() == text
    empty = write_metadata(tmp_path / "n.tsv", {"sample-id": ["a", "b"], "age": [float("nan"), 2.0]}).read_text()
    assert empty.splitlines()[2:] == ["a\t", "b\t2"]
    plain = write_metadata(tmp_path / "p.csv", WRITTEN).read_text()
    assert next(iter(csv.DictReader(io.StringIO(plain)))) == {"sample-id": "a", "state": "1", "p(1)": "0.25"}


def test_ids_and_classes_in_an_artifact_are_as_they_were_given(tmp_path: Path) -> None:
    names = ["=a", "-b+", "@c", "d"]
    with open_data(
        write_metadata(tmp_path / "p.qza", {"sample-id": names, "gene": ["+/+", "-/-"] * 2}), "data.metadata"
    ) as file:
        found = read_metadata(file, "data.metadata")
    assert (found.ids, found.columns["gene"]) == (names, ["+/+", "-/-"] * 2)
    near = write_distances(tmp_path / "d.qza", names, unweighted(COUNTS[:4]))
    assert Matrix(near, "unweighted_unifrac").ids == names


def test_an_artifact_has_the_layout_that_qiime_publishes(tmp_path: Path) -> None:
    path = write_distances(tmp_path / "d.qza", SAMPLES, unweighted(COUNTS))
    with zipfile.ZipFile(path) as archive:
        (root,) = {name.split("/")[0] for name in archive.namelist()}
        inside = {name.removeprefix(f"{root}/"): archive.read(name) for name in archive.namelist()}
    assert inside["metadata.yaml"].decode() == (
        f"uuid: {root}\ntype: DistanceMatrix\nformat: DistanceMatrixDirectoryFormat\n"
    )
    assert inside["VERSION"] == inside["provenance/VERSION"] == b"QIIME 2\narchive: 5\nframework: 2018.11.0\n"
    sums = dict(reversed(line.split("  ")) for line in inside.pop("checksums.md5").decode().splitlines())
    assert sums == {name: artifacts._md5(content) for name, content in inside.items()}
