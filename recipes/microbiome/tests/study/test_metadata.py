"""Metadata are read as they are written in the field, and everything that would mislead is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipes.microbiome.tests.studies import METADATA, SAMPLES, changed, write_rows
from unisono.runtime.errors import ConfigError, DataError
from unisono_microbiome.settings import MISSING
from unisono_microbiome.study.metadata import is_missing, join_metadata, parse_number, parse_target, read_metadata


def test_columns_are_aligned_to_the_samples(tmp_path: Path) -> None:
    found = read_metadata(write_rows(tmp_path / "m.tsv", METADATA), "data.metadata")
    assert found.ids == list(SAMPLES)
    assert found.align(["s4", "s1"])["age"] == ["4.25", "31"]
    assert list(found.columns) == list(METADATA)


def test_a_csv_and_another_column_of_ids(tmp_path: Path) -> None:
    columns = {"age": METADATA["age"], "id": [f'"{s}, of 2"' for s in SAMPLES]}
    found = read_metadata(write_rows(tmp_path / "m.csv", columns, ","), "data.metadata", "id")
    assert found.ids == [f"{s}, of 2" for s in SAMPLES]


def test_comments_directives_byte_order_marks_and_short_lines_are_as_qiime_has_them(tmp_path: Path) -> None:
    path = tmp_path / "m.tsv"
    text = "# a comment\n#SampleID\tage\tnote\n#q2:types\tnumeric\tcategorical\ns1\t3\tx\n\n# s0\t1\ty\ns2\t4\n"
    path.write_text(text, encoding="utf-8-sig")
    found = read_metadata(path, "data.metadata")
    assert found.columns == {"#SampleID": ["s1", "s2"], "age": ["3", "4"], "note": ["x", ""]}
    path.write_text("id\tage\r\ns1\t3\r\n#s2\t3\r\n")
    assert read_metadata(path, "data.metadata").columns == {"id": ["s1"], "age": ["3"]}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is empty"),
        ("id\tage\ns1\t3\ts\n", "line 2: 3 values, but the header has 2 columns"),
        ("id\tage\tage\ns1\t3\t4\n", "columns of the same name: 'age'"),
        ("id\t\tage\ns1\t3\t4\n", "column 2 of 3 has no name"),
        ("id\tage \ns1\t3\n", r"white space around the names of 1 of 2 columns \('age '\).*data\.white_space=strip"),
        ("id\tage\ns1\t3\ns1\t4\n", r"column 'id', has duplicate ids: 1 of 2 rows \('s1'\)"),
        (
            'id\tage\ns1\t"3\ns2\t4\n',
            "cannot be read as a table: unexpected end of data; is a quotation mark left open",
        ),
        (
            "#sample\tage\ns1\t3\n",
            r"line 1, which begins with '#', is a comment.*call .* 'sample', or #sam",
        ),
        ("id\tage\ns1 \t3\n", r"column 'id': white space around 1 of 1 values \('s1 '\)"),
        ("id\tage\ns1\t 3\n", r"column 'age': white space around 1 of 1 values \(' 3'\)"),
    ],
)
def test_a_table_that_would_mislead_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "m.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"m\.tsv \(data\.metadata\).*{told}"):
        read_metadata(path, "data.metadata", used=["age"])


def test_white_space_is_taken_away_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.tsv"
    path.write_text("id\t age \ns1 \t 3\n s2\t4 \n")
    found = read_metadata(path, "data.metadata", strip=True, used=["age"])
    assert found.columns == {"id": ["s1", "s2"], "age": ["3", "4"]}
    path.write_text("id\tage\ns1\t3\n s1\t4 \n")
    with pytest.raises(DataError, match="duplicate ids"):
        read_metadata(path, "data.metadata", strip=True)


def test_white_space_in_a_column_that_nobody_uses_is_nobodys_concern(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "m.tsv", changed("state", 3, "well "))
    assert read_metadata(path, "data.metadata", used=["age"]).columns["state"][3] == "well "
    with pytest.raises(DataError, match=r"'state': white space around 1 of 8 values \('well '\)"):
        read_metadata(path, "data.metadata", used=["state"])


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_metadata(tmp_path / "m.tsv", "data.metadata")
    (tmp_path / "m.tsv").write_bytes(b"id\tage\ns1\t\xff\n")
    with pytest.raises(DataError, match="is not UTF-8"):
        read_metadata(tmp_path / "m.tsv", "data.metadata")


def test_a_column_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.id_column=sample: .*no such column, did you mean 'sample_name'"):
        read_metadata(write_rows(tmp_path / "m.tsv", METADATA), "data.metadata", "sample")


def test_several_files_are_joined_by_id_as_qiime_does(tmp_path: Path) -> None:
    one, other = tmp_path / "one.tsv", tmp_path / "other.csv"
    one.write_text("id\tage\tsite\n#q2:types\tnumeric\t\ns1\t3\tgut\ns2\t4\tskin\ns3\t5\tgut\n")
    other.write_text("sample,dose\n#q2:types,categorical\n#q2:missing,INSDC:missing\ns3,1\ns4,2\ns1,missing\n")
    found = join_metadata([read_metadata(path, "data.metadata") for path in (one, other)], "data.metadata")
    assert found.ids == ["s1", "s3"]
    assert found.columns == {"id": ["s1", "s3"], "age": ["3", "5"], "site": ["gut", "gut"], "dose": ["missing", "1"]}
    assert found.types == {"age": "numeric", "dose": "categorical"}
    assert "not collected" in found.missing["dose"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("id\tage\ns1\t3\n", r"columns of the same name: 'age' in \S*one\.tsv and \S*other\.tsv; remove or rename"),
        ("name\tid\ns1\t3\n", r"columns of the same name: 'id' in "),
        (
            "name\tdose\nS1\t3\n",
            r"no id is in all files: .*one\.tsv has 's1'; .*other\.tsv has 'S1'; choose data\.id_column",
        ),
    ],
)
def test_files_that_cannot_be_joined_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "one.tsv").write_text("id\tage\ns1\t3\n")
    (tmp_path / "other.tsv").write_text(text)
    tables = [read_metadata(tmp_path / name, "data.metadata") for name in ("one.tsv", "other.tsv")]
    with pytest.raises(DataError, match=f"data.metadata: {told}"):
        join_metadata(tables, "data.metadata")


# what is to be predicted ------------------------------------------------------------------------------------------


def target(column: str, *, values: list[str] | None = None, **settings):
    return parse_target(column, values or METADATA[column], SAMPLES, **settings)


def test_numbers_are_a_regression_and_words_classes() -> None:
    age = target("age")
    assert (age.kind, age.classes) == ("regression", None)
    assert age.values.tolist() == [31, 31.5, 4, 4.25, 60, 61, 70, 71]
    state = target("state")
    assert (state.kind, state.classes) == ("classification", ["ill", "well"])
    assert state.values.tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert state.values.dtype == np.int64


def test_numbers_are_classes_where_that_is_asked_for() -> None:
    found = target("grade", values=["2", "10", "2", "1"] * 2, kind="classification")
    assert (found.classes, found.values.tolist()) == (["1", "10", "2"], [2, 1, 2, 0] * 2)


def test_classes_keep_the_numbers_they_are_given() -> None:
    found = target("state", classes=["well", "better", "ill"])
    assert found.values.tolist() == [2, 2, 0, 0, 2, 2, 0, 0]
    one = parse_target("state", ["ill", "ill"], ["a", "b"], classes=["well", "ill"])  # e.g. samples to be predicted
    assert one.values.tolist() == [1, 1]


@pytest.mark.slow
def test_a_label_is_found_among_a_million_classes_and_a_wrong_one_is_told_in_a_line() -> None:
    """To look for each through a list would take hours."""
    classes = [f"class {number}" for number in range(10**6)]
    names = [f"s{number}" for number in range(10**6)]
    assert parse_target("kind", classes, names, classes=classes).values.tolist() == list(range(10**6))
    with pytest.raises(
        DataError, match=r"1 of 1000000 values \('-1 of s7'\) are not among .*classes \('class 0', "
    ) as told:
        parse_target("kind", [*classes[:7], "-1", *classes[8:]], names, classes=classes)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize(
    ("values", "settings", "told"),
    [
        (
            ["1", "x", "3"],
            {"kind": "regression"},
            r"1 of 3 values \('x of s2'\) are not finite numbers.*classification",
        ),
        (["1", "nan", "inf"], {"kind": "regression"}, r"2 of 3 values \('nan of s2', 'inf of s3'\)"),
        (
            ["1", "2 years", "3"],
            {},
            r"1 of 3 values \('2 years of s2'\) are not numeric, unlike the others: set .*kind",
        ),
        (["a", "b", "NaN"], {}, r"1 of 3 values \('NaN of s3'\) are numeric, unlike the others: set"),
        (["a", "b", "c"], {}, r"all 3 samples have different classes \('a', 'b', 'c'\)"),
        (["1", "inf", "3"], {}, r"1 of 3 values \('inf of s2'\)"),
        (["2.0", "2", "2"], {}, r"is '2\.0' in all 3 samples: there is nothing to predict"),
        (["a", "a", "a"], {}, r"is 'a' in all 3 samples"),
        (
            ["a", "b", "c"],
            {"classes": ["a", "b"]},
            r"1 of 3 values \('c of s3'\) are not among data\.classes \('a', 'b'\)",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(values: list[str], settings: dict, told: str) -> None:
    with pytest.raises(DataError, match=told):
        parse_target("column", values, ["s1", "s2", "s3"], **settings)


def test_values_that_mean_none_are_known_in_any_case() -> None:
    values = ["", "NA", "nan", "Not Applicable", "not provided", "0", "none", "no"]
    assert is_missing(values, MISSING).tolist() == [True] * 5 + [False] * 3
    assert is_missing(["-9", "x"], ["-9"]).tolist() == [True, False]


@pytest.mark.parametrize(("text", "number"), [("1_000", None), ("0x10", None), ("1e3", 1000.0), (" 5 ", 5.0)])
def test_only_what_everybody_takes_for_a_number_is_one(text: str, number: float | None) -> None:
    assert parse_number(text) == number
