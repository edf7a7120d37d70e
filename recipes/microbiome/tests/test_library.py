"""A library aligns everything to its samples, holds whole subjects out, and refuses in sentences what does not fit."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.microbiome.tests import studies
from recipes.microbiome.tests.studies import (
    COUNTS,
    DNA,
    METADATA,
    NEWICK,
    SAMPLES,
    TAXA,
    changed,
    study,
    write_hdf5,
    write_matrix,
)  # fmt: skip
from unisono import Subset
from unisono.runtime.errors import ConfigError, DataError
from unisono_microbiome.rarefy import rarefy
from unisono_microbiome.settings import Simulated, Study
from unisono_microbiome.study.library import Library, SampleRecord, open_library

TRUE = studies.unweighted(COUNTS)


def names(rows: Subset) -> list[str]:
    return [rows[n].name for n in range(len(rows))]


def subjects(library: Library, rows: Subset) -> set[str]:
    return {METADATA["subject"][SAMPLES.index(name)] for name in names(rows)}


# rows -------------------------------------------------------------------------------------------------------------


def test_records_hold_what_the_table_has(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, target="age"))
    seen = {}
    for rows in (library.training(), library.held_out()):
        for record in (rows[n] for n in range(len(rows))):
            assert isinstance(record, SampleRecord)
            assert record.name == library.samples[record.number]
            assert record.taxa.dtype == record.counts.dtype == np.int64
            whole = np.zeros(len(TAXA), dtype=np.int64)
            whole[record.taxa] = record.counts
            seen[record.name] = (whole.tolist(), record.target)
            assert (record.counts > 0).all()
    assert len(library.held_out()) == 2
    assert seen == {s: (row.tolist(), float(a)) for s, row, a in zip(SAMPLES, COUNTS, METADATA["age"], strict=True)}


def test_a_record_is_the_callers_own(tmp_path: Path) -> None:
    rows = open_library(study(tmp_path)).training()
    rows[0].counts[:] = 0
    rows[0].taxa[:] = 0
    assert rows[0].counts.all()
    assert rows[0].target is None
    with pytest.raises(IndexError, match="row 8 of 6"):
        rows[8]


def test_classes_are_integers(tmp_path: Path) -> None:
    rows = open_library(study(tmp_path, target="state")).training()
    assert all(type(rows[n].target) is int for n in range(len(rows)))
    assert {rows[n].target for n in range(len(rows))} == {0, 1}


def test_no_subject_stands_on_both_sides(tmp_path: Path) -> None:
    seen = set()
    for fold in range(4):
        library = open_library(study(tmp_path, group="subject", fold=fold))
        training, held = library.training(), library.held_out()
        assert len(held) == 2
        assert not subjects(library, training) & subjects(library, held)
        assert sorted(names(training) + names(held)) == list(SAMPLES)
        seen |= subjects(library, held)
    assert seen == set(METADATA["subject"])
    alone = open_library(study(tmp_path))  # where nobody says what belongs together, a subject does stand on both
    both = subjects(alone, alone.training()) & subjects(alone, alone.held_out())
    assert both


def test_named_groups_are_held_out(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, group="subject", held_out_groups=["u2", "u3"]))
    assert names(library.held_out()) == ["s3", "s4", "s5", "s6"]
    assert len(open_library(study(tmp_path, held_out=0.0)).held_out()) == 0


def test_a_library_and_its_rows_pickle_without_the_distances(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, target="age", group="subject"))
    before = len(pickle.dumps(library))
    distances = library.distances()
    assert len(pickle.dumps(library)) == before
    again = pickle.loads(pickle.dumps(library.training()))
    assert again.fingerprint == library.training().fingerprint
    assert names(again) == names(library.training())
    assert np.array_equal(again.source.distances(), distances)


def test_a_fingerprint_changes_with_what_is_learnt(tmp_path: Path) -> None:
    def fingerprint(part: str = "a", **given: Any) -> str:
        return open_library(study(tmp_path / part, **given)).training().fingerprint

    more = COUNTS.copy()
    more[0, 0] += 1
    others = [
        fingerprint("b", counts=more),
        fingerprint("c", target="age"),
        fingerprint("d", target="age", metadata=changed("age", 0, "32")),
        fingerprint("e", newick=NEWICK.replace("A:1", "A:2")),
        fingerprint("f", metric="jaccard"),
        fingerprint("g", held_out=0.5),
        fingerprint("h", rarefy=8, distances_of="rarefied"),
    ]
    assert len({fingerprint(), *others}) == 8
    assert fingerprint("again") == fingerprint() == fingerprint("i", rarefy=8)


def test_files_are_told_with_what_they_hold(tmp_path: Path) -> None:
    rows = open_library(study(tmp_path)).training()
    assert [file["name"] for file in rows.manifest["files"]] == ["table.biom", "metadata.tsv", "tree.nwk"]
    assert len({file["digest"] for file in rows.manifest["files"]}) == 3


def test_metadata_of_several_files_are_those_of_one(tmp_path: Path) -> None:
    split = [{"sample_name": list(SAMPLES), "age": METADATA["age"]}, {k: v for k, v in METADATA.items() if k != "age"}]
    paths = [studies.write_rows(tmp_path / f"{n}.tsv", part) for n, part in enumerate(split)]
    given = {"target": "age", "group": "subject", "covariates": ["state"]}
    config = study(tmp_path, **given)
    several = Study.model_validate({**config.model_dump(), "metadata": paths})
    whole, joined = open_library(config), open_library(several)
    assert joined.fingerprint == whole.fingerprint
    assert joined.facts() == whole.facts()
    assert [file["name"] for file in joined.manifest["files"]] == ["table.biom", "0.tsv", "1.tsv", "tree.nwk"]
    studies.write_rows(paths[1], {name: values[2:] for name, values in split[1].items()})
    with pytest.raises(DataError, match=r"2 of 8 samples \('s1', 's2'\) are not in the join of .*0\.tsv and .*1\.tsv"):
        open_library(several)


# distances --------------------------------------------------------------------------------------------------------


def test_distances_are_computed_or_read_and_aligned(tmp_path: Path) -> None:
    library = open_library(study(tmp_path))
    assert np.abs(library.distances() - TRUE).max() < 1e-12
    assert np.abs(library.distances("jaccard") - studies.jaccard(COUNTS)).max() < 1e-12
    assert np.abs(library.diversity("faith_pd") - studies.faith_pd(COUNTS)).max() < 1e-12
    order = [4, 2, 0, 1, 3, 7, 6, 5]
    path = write_matrix(tmp_path / "d.tsv", [SAMPLES[n] for n in order], TRUE[np.ix_(order, order)] / 2)
    ready = open_library(study(tmp_path, distances=path))
    assert np.array_equal(ready.distances(), TRUE / 2)
    assert np.abs(ready.distances("jaccard") - studies.jaccard(COUNTS)).max() < 1e-12


def test_distances_stay_aligned_where_samples_are_left_out(tmp_path: Path) -> None:
    counts = COUNTS.copy()
    counts[[1, 6]] = 0
    left = [0, 2, 3, 4, 5, 7]
    np.save(tmp_path / "d.npy", TRUE)
    for given in ({}, {"distances": tmp_path / "d.npy"}):
        library = open_library(study(tmp_path / "files", counts, leave_out=["empty"], **given))
        assert library.samples == [SAMPLES[n] for n in left]
        assert library.left_out == {"empty": ["s2", "s7"]}
        assert np.abs(library.distances() - TRUE[np.ix_(left, left)]).max() < 1e-12
        assert library.metadata["age"] == [METADATA["age"][n] for n in left]
        assert [
            library.held_out()[n].number for n in range(len(library.held_out()))
        ] == library.held_out().rows.tolist()
        assert library.facts()["left_out"] == {"empty": 2}


def test_distances_are_of_all_reads_or_of_those_drawn_once(tmp_path: Path) -> None:
    whole = open_library(study(tmp_path, rarefy=8))
    assert np.abs(whole.distances() - TRUE).max() < 1e-12
    drawn = open_library(study(tmp_path, rarefy=8, distances_of="rarefied"))
    from unisono_microbiome.study.diversity import rarefy_once
    from unisono_microbiome.study.table import CountTable

    counts = rarefy_once(CountTable(drawn.samples, drawn.taxa, drawn.counts), 8).counts.toarray()
    assert np.abs(drawn.distances() - studies.unweighted(counts)).max() < 1e-12
    assert np.abs(drawn.distances() - TRUE).max() > 0.01
    assert np.abs(drawn.diversity("faith_pd") - studies.faith_pd(counts)).max() < 1e-12


def test_faith_pd_is_no_distance(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, metric="faith_pd"))
    with pytest.raises(ConfigError, match="is not a distance between samples"):
        library.distances()
    with pytest.raises(ConfigError, match=r"data\.metric=faith_pd is not one; give .* data\.target"):
        open_library(study(tmp_path, metric="faith_pd", distances=tmp_path / "d.npy"))


# sequences --------------------------------------------------------------------------------------------------------


def test_ids_are_sequences_where_all_are(tmp_path: Path) -> None:
    newick = NEWICK
    for taxon, sequence in zip(TAXA, DNA, strict=True):
        newick = newick.replace(f"{taxon}:", f"{sequence}:")
    library = open_library(study(tmp_path, taxa=DNA, newick=newick))
    assert library.dna() == library.sequences == list(DNA)
    library.check()


def test_without_sequences_everything_works_that_needs_none(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, target="age"))
    library.check()
    assert library.sequences is None
    assert library.training()[0].target is not None
    with pytest.raises(DataError, match=r"ids of 6 of 6 taxa \('A', 'B', 'C', …\) are not .* set data\.fasta"):
        library.dna()


def test_some_ids_that_are_no_sequences_are_told_or_left_out(tmp_path: Path) -> None:
    taxa = [*DNA[:4], "E", "F"]
    mixed = study(tmp_path, taxa=taxa, tree=None)
    with pytest.raises(DataError, match=r"2 of 6 taxa \('E', 'F'\).* or skip these taxa with .*\[not_dna\]"):
        open_library(mixed).dna()
    library = open_library(mixed.model_copy(update={"leave_out": ["not_dna"]}))
    assert library.taxa == library.dna() == taxa[:4]
    assert library.counts.toarray().tolist() == COUNTS[:, :4].tolist()
    with pytest.raises(DataError, match="all 6 taxa have ids that are not sequences, so none would be left"):
        open_library(study(tmp_path, leave_out=["not_dna"]))


def test_sequences_come_from_fasta_in_the_tables_order(tmp_path: Path) -> None:
    path = tmp_path / "r.fasta"
    path.write_text("".join(f">{t}\n{s}\n" for t, s in reversed(list(zip(TAXA, DNA, strict=True)))))
    assert open_library(study(tmp_path, fasta=path)).dna() == list(DNA)
    path.write_text("".join(f">{t}\n{s}\n" for t, s in zip(TAXA[1:], DNA, strict=False)))
    with pytest.raises(DataError, match=r"1 of 6 taxa \('A'\) have no sequence in .*r\.fasta \[not_dna\]"):
        open_library(study(tmp_path, fasta=path))
    assert open_library(study(tmp_path, fasta=path, leave_out=["not_dna"])).taxa == list("BCDEF")


# what does not fit ------------------------------------------------------------------------------------------------


def without(sample: str) -> dict[str, list[str]]:
    kept = [n for n, name in enumerate(SAMPLES) if name != sample]
    return {name: [values[n] for n in kept] for name, values in METADATA.items()}


SHALLOW = COUNTS.copy()
SHALLOW[3] = [0, 0, 0, 2, 0, 0]
EMPTY = COUNTS.copy()
EMPTY[3] = 0

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"counts": EMPTY}, r"have no reads"),
    "shallow": ({"counts": SHALLOW, "rarefy": 8}, r"have fewer reads than data\.rarefy=8"),
    "no_metadata": ({"metadata": without("s4")}, r"are not in .*metadata\.tsv \(data\.metadata\)"),
    "no_group": ({"group": "subject", "metadata": changed("subject", 3, "Not provided")}, "have no value of 'subject'"),
    "no_target": ({"target": "age", "metadata": changed("age", 3, "NaN")}, "have no value of 'age'"),
}


@pytest.mark.parametrize("reason", MISMATCHES)
def test_a_sample_that_cannot_be_used_is_told_or_left_out(tmp_path: Path, reason: str) -> None:
    given, told = MISMATCHES[reason]
    with pytest.raises(
        DataError, match=rf"1 of 8 samples \('s4'\) {told} \[{reason}\]\. Fix the files, or .* data\.leave_out"
    ):
        open_library(study(tmp_path, **given))
    library = open_library(study(tmp_path, **given, leave_out=[reason]))
    assert library.left_out == {reason: ["s4"]}
    assert library.samples == [name for name in SAMPLES if name != "s4"]
    assert library.counts.shape == (7, 6)


def test_all_mismatches_are_told_at_once_and_each_sample_once(tmp_path: Path) -> None:
    counts = SHALLOW.copy()
    counts[6] = 0
    metadata = without("s4") | {"age": ["na", *METADATA["age"][1:3], *METADATA["age"][4:]]}
    with pytest.raises(DataError) as refused:
        open_library(study(tmp_path, counts, metadata=metadata, target="age", rarefy=8))
    told = str(refused.value)
    assert "1 of 8 samples ('s7') have no reads [empty]" in told
    assert "1 of 8 samples ('s4') have fewer reads than data.rarefy=8 [shallow]" in told
    assert "1 of 8 samples ('s1') have no value of 'age' [no_target]" in told
    assert "no_metadata" not in told


def test_all_but_one_reason_left_out_is_still_refused(tmp_path: Path) -> None:
    given = {"counts": EMPTY, "target": "age", "metadata": changed("age", 0, "")}
    with pytest.raises(DataError, match=r"\('s1'\) have no value of 'age' \[no_target\]") as refused:
        open_library(study(tmp_path, **given, leave_out=["empty"]))
    assert "[empty]" not in str(refused.value)


def test_metadata_of_other_samples_are_refused_with_both_names(tmp_path: Path) -> None:
    other = METADATA | {"sample_name": [f"study.{name}" for name in SAMPLES]}
    with pytest.raises(
        DataError, match=r"none of the 8 samples .* here they are called 's1', .* there 'study\.s1', .* data\.id_column"
    ):
        open_library(study(tmp_path, metadata=other))
    ids = {"barcode": other["sample_name"], **METADATA}
    assert open_library(study(tmp_path, metadata=ids, id_column="sample_name")).samples == list(SAMPLES)


@pytest.mark.parametrize("written", ["00{}", "{}.0"])
def test_ids_that_were_read_as_numbers_are_told_as_that(written: str, tmp_path: Path) -> None:
    plain = [str(number) for number in range(1, 9)]
    metadata = METADATA | {"sample_name": [written.format(name) for name in plain]}
    assert open_library(study(tmp_path, samples=plain, metadata=METADATA | {"sample_name": plain})).samples == plain
    with pytest.raises(DataError, match=r"none of the 8 samples .* pandas has read ids as numbers: write them as in"):
        open_library(study(tmp_path, samples=plain, metadata=metadata))


def test_taxa_that_are_not_in_the_tree_are_told_or_left_out(tmp_path: Path) -> None:
    given: dict[str, Any] = {"newick": NEWICK.replace("F:", "G:")}
    with pytest.raises(DataError, match=r"1 of 6 taxa \('F'\) of the table are not among the tips of .*tree\.nwk"):
        open_library(study(tmp_path, **given)).check()
    with pytest.raises(DataError, match="are not among the tips"):
        open_library(study(tmp_path, **given)).distances()
    counts = COUNTS.copy()
    counts[4] = [0, 0, 0, 0, 0, 30]  # a sample of which nothing is left then
    with pytest.raises(DataError, match=r"\('s5'\) have no reads \[empty\]"):
        open_library(study(tmp_path, counts, **given, leave_out=["not_in_tree"]))
    library = open_library(study(tmp_path, counts, **given, leave_out=["not_in_tree", "empty"]))
    library.check()
    assert library.left_out == {"not_in_tree": ["F"], "empty": ["s5"]}
    assert (library.taxa, len(library.samples)) == (list("ABCDE"), 7)
    assert library.distances().shape == (7, 7)


def test_distances_that_lack_samples_are_told_or_left_out(tmp_path: Path) -> None:
    some = [0, 1, 2, 4, 5, 6, 7]
    path = write_matrix(tmp_path / "d.tsv", [SAMPLES[n] for n in some], TRUE[np.ix_(some, some)])
    with pytest.raises(DataError, match=r"1 of 8 samples \('s4'\) are not in .*d\.tsv .*\[no_distances\]"):
        open_library(study(tmp_path, distances=path))
    library = open_library(study(tmp_path, distances=path, leave_out=["no_distances"]))
    assert np.array_equal(library.distances(), TRUE[np.ix_(some, some)])
    write_matrix(path, [f"x{n}" for n in range(8)], TRUE)
    with pytest.raises(DataError, match=r"none of the 8 samples .* is in .*d\.tsv .* there 'x0'"):
        open_library(study(tmp_path, distances=path, leave_out=["no_distances"]))
    np.save(tmp_path / "d.npy", TRUE[:5, :5])
    with pytest.raises(DataError, match=r"has 5 rows and no ids, but .* has 8 samples"):
        open_library(study(tmp_path, distances=tmp_path / "d.npy"))


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"target": "ages"}, ConfigError, r"data\.target=ages: .*no such column, did you mean 'age'"),
        ({"group": "subjcet"}, ConfigError, r"data\.group=subjcet: .*did you mean 'subject'"),
        ({"target": "sample_name"}, ConfigError, r"data\.target=sample_name is the column of the samples' ids"),
        ({"covariates": ["sample_name"]}, ConfigError, r"data\.covariates=sample_name is the column of the sam"),
        ({"target": "age", "metadata_": None}, ConfigError, r"data\.target=age is a column .* set data\.metadata"),
        ({"group": "subject", "metadata": METADATA | {"subject": ["u"] * 8}}, DataError, "all 8 samples have subj"),
        ({"target": "state", "target_kind": "regression"}, DataError, r"8 of 8 values \('ill of s1'"),
        ({"target": "age", "metadata": METADATA | {"age": ["3"] * 8}}, DataError, "there is nothing to predict"),
        ({"target": "state", "metadata": changed("state", 0, " ill")}, DataError, r"column 'state': white space"),
        ({"target": "state", "group": "state", "held_out": 0.5}, DataError, r"1 of 2 classes .* held out with all"),
        ({"fold": 9}, ConfigError, r"data\.fold=9: 8 groups, 2 of them held out at a time, make 4 folds"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_files_are_refused(tmp_path: Path, given: dict, error: type, told: str) -> None:
    given = dict(given)
    update = {"metadata": None} if given.pop("metadata_", 1) is None else {}
    with pytest.raises(error, match=told):
        open_library(study(tmp_path, **given).model_copy(update=update))


def test_training_samples_of_one_target_only_are_refused(tmp_path: Path) -> None:
    ages = METADATA | {"age": ["1", "2", "5", "5", "5", "5", "5", "5"]}
    with pytest.raises(DataError, match=r"data\.target=age is the same in all training samples; choose others"):
        open_library(study(tmp_path, target="age", group="subject", held_out_groups=["u1"], metadata=ages))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"held_out_groups": ["a"]}, r"needs the column that it refers to: set data\.group"),
        ({"held_out_groups": ["a"], "group": "g", "fold": 1}, r"data\.fold has no effect with data\.held_out_groups"),
        ({"distances_of": "rarefied"}, r"needs data\.rarefy"),
        ({"classes": ["a", "a"]}, "names a class twice"),
        ({"leave_out": ["bad"]}, "Input should be 'empty'"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(given: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Study(kind="study", table=Path("t.biom"), **given)


@pytest.mark.parametrize("kind", [Study, Simulated])
def test_every_setting_is_explained(kind: type[Study | Simulated]) -> None:
    assert [name for name, field in kind.model_fields.items() if name != "kind" and not field.description] == []


# facts ------------------------------------------------------------------------------------------------------------


def test_facts_say_what_is_there_and_what_is_held_out(tmp_path: Path) -> None:
    library = open_library(study(tmp_path, target="state", group="subject", held_out_groups=["u3"], max_taxa=3))
    assert library.facts() == {
        "samples": 8,
        "taxa": 6,
        "reads_per_sample": {"min": 12, "median": 16.0, "max": 31},
        "taxa_per_sample": {"min": 1, "median": 3.0, "max": 6},
        "samples_with_more_than_max_taxa": 3,
        "groups": 4,
        "held_out_groups": ["u3"],
        "target": {
            "column": "state",
            "kind": "classification",
            "training": {"ill": 2, "well": 4},
            "held_out": {"ill": 2, "well": 0},
        },
    }
    unread = COUNTS * (np.arange(6) != 3)
    unread[3, 0] = 1
    assert open_library(study(tmp_path, unread)).facts()["taxa_without_reads"] == 1
    age = open_library(study(tmp_path, target="age", group="subject", held_out_groups=["u1"])).facts()["target"]
    assert age["held_out"] == {"mean": 31.25, "std": 0.25}


def test_a_sample_costs_as_many_taxa_as_are_drawn_of_it(tmp_path: Path) -> None:
    whole = open_library(study(tmp_path / "whole"))
    assert whole.lengths.tolist() == (COUNTS > 0).sum(1).tolist()
    assert open_library(study(tmp_path / "few", max_taxa=2)).lengths.max() == 2
    counts = np.zeros((2, 40), dtype=np.int64)
    counts[0, 0], counts[0, 1:] = 1000, 1  # one common taxon, and 39 that are drawn rarely
    counts[1, :20] = 100
    taxa = [f"t{number}" for number in range(40)]
    table = write_hdf5(tmp_path / "t.biom", counts, ["a", "b"], taxa)
    library = open_library(Study(kind="study", table=table, rarefy=200))
    drawn = [
        np.mean([(rarefy(counts[row], 200, np.random.default_rng(seed)) > 0).sum() for seed in range(200)])
        for row in range(2)
    ]
    assert library.lengths == pytest.approx(drawn, abs=0.75)  # they are whole numbers
    assert library.training().lengths is not None
