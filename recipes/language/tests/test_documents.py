"""Documents from files: one order, and errors that say where and what to do."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from packages.unisono.tests.checkpoint import stores
from recipes.language.tests.corpora import DIFFICULT, corpus, write_jsonl
from unisono.runtime.errors import DataError
from unisono_language.data import texts as documents


def texts(*paths: Path, pattern: str = "*", split: str | None = None, **how: str) -> list[str]:
    found = documents.find_texts(paths, pattern, split)
    return [text for file in found.files for text in documents.read_documents(file, **how)]


def names(*paths: Path, pattern: str = "*") -> list[str]:
    return [file.name for file in documents.find_texts(paths, pattern).files]


def test_the_column_can_have_any_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "1.jsonl", ["from JSON"], column="the body")
    pq.write_table(pa.table({"the body": ["from Parquet"], "text": ["not this"]}), tmp_path / "2.parquet")
    assert texts(tmp_path, column="the body") == ["from JSON", "from Parquet"]


def test_a_python_file_may_declare_its_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'café'\n".encode("latin-1"))
    assert texts(tmp_path, pattern="*.py") == ["# -*- coding: latin-1 -*-\nname = 'café'\n"]


def test_the_standard_library_holds_modules_without_their_tests() -> None:
    found = documents.standard_library()
    listed = [file.name for file in found.files]
    assert {"json/decoder.py", "os.py"} <= set(listed)
    assert listed == sorted(listed, key=lambda name: Path(name).parts)
    assert not [name for name in listed if {"test", "tests", "site-packages"} & set(Path(name).parts)]


# which files, and in what order -----------------------------------------------------------------------------------


def _tree(root: Path, *files: str) -> Path:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = _tree(tmp_path / "root", *(f"{i:02}.txt" for i in range(20)))
    search = Path.rglob
    listed = texts(root)
    for turned in (1, -1):
        monkeypatch.setattr(Path, "rglob", lambda self, glob, turned=turned: sorted(search(self, glob))[::turned])
        assert texts(root) == listed == sorted(listed)


@pytest.mark.parametrize(
    ("files", "paths", "found"),
    [
        (
            ["b/z.txt", "a/b/c/d.txt", "c.txt", "a/b.txt", "B.txt", "a/b/a.txt"], [""],
            ["B.txt", "a/b/a.txt", "a/b/c/d.txt", "a/b.txt", "b/z.txt", "c.txt"],
        ),
        (["x/2.txt", "x/1.txt", "y/1.txt", "z.txt"], ["y", "z.txt", "x"], ["y/1.txt", "z.txt", "x/1.txt", "x/2.txt"]),
        (["a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "c/.git/d/e.txt"], [""], ["a.txt"]),
        ([".b.txt"], [".b.txt"], [".b.txt"]),
    ],
    ids=["any depth, by path", "paths as they are given", "nothing hidden", "unless it is named"],
)  # fmt: skip
def test_folders_are_searched_and_sorted(tmp_path: Path, files: list[str], paths: list[str], found: list[str]) -> None:
    root = _tree(tmp_path / "root", *files)
    assert texts(*(root / path for path in paths)) == found


def test_names_do_not_depend_on_where_the_corpus_lies(tmp_path: Path) -> None:
    here, there = _tree(tmp_path / "a" / "corpus", "x/1.txt"), _tree(tmp_path / "b" / "corpus", "x/1.txt")
    assert names(here) == names(there) == ["corpus/x/1.txt"]


@pytest.mark.parametrize(("ending", "content"), [("json", '{"text": "it"}\n'), ("py", "it"), ("md", "it")])
def test_other_endings_are_read_only_where_the_pattern_names_them(tmp_path: Path, ending: str, content: str) -> None:
    (tmp_path / "a.txt").write_text("known")
    (tmp_path / f"b.{ending}").write_text(content)
    assert texts(tmp_path) == ["known"]
    assert texts(tmp_path, pattern=f"*.{ending}") == ["it"]


def test_what_is_passed_over_is_listed(tmp_path: Path) -> None:
    root = _tree(tmp_path / "root", "a.txt", "sub/README.md", "picture.png")
    assert documents.find_texts([root]).ignored == ("picture.png", "sub/README.md")
    assert documents.find_texts([root], "*.md").ignored == ("a.txt", "picture.png")


def test_a_url_stays_a_url_and_a_path_may_be_one_of_pathlib(tmp_path: Path) -> None:
    assert corpus("s3://bucket/corpus").path == "s3://bucket/corpus"  # type: ignore[arg-type]
    assert corpus([tmp_path, "gs://b/c"]).path == [str(tmp_path), "gs://b/c"]  # type: ignore[list-item]


def test_documents_lie_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    with stores.serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        bucket = s3fs.S3FileSystem(skip_instance_cache=True)
        bucket.mkdir("texts")
        bucket.pipe("texts/corpus/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
        bucket.pipe("texts/corpus/b.txt", b"three")
        found = documents.find_texts(["s3://texts/corpus"])
        assert [text for file in found.files for text in documents.read_documents(file)] == ["one", "two", "three"]


# saved data sets --------------------------------------------------------------------------------------------------


def _splits(folder: Path, *splits: str) -> Path:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.DatasetDict({split: datasets.Dataset.from_dict({"text": [split]}) for split in splits}).save_to_disk(
        folder
    )
    return folder


@pytest.mark.parametrize(
    ("splits", "chosen", "read"),
    [
        (["test", "train"], None, "train"),
        (["test", "train"], "test", "test"),
        (["only"], None, "only"),
        (["one", "other"], "other", "other"),
    ],
)
def test_the_split_is_the_one_chosen_or_train_or_the_only_one(
    tmp_path: Path, splits: list[str], chosen: str | None, read: str
) -> None:
    assert texts(_splits(tmp_path / "saved", *splits), split=chosen) == [read]


@pytest.mark.parametrize("chosen", [None, "trian"])
def test_a_split_that_cannot_be_told_is_refused_with_those_there_are(tmp_path: Path, chosen: str | None) -> None:
    with pytest.raises(DataError, match=r"saved has the splits one, other; choose one by data\.split"):
        texts(_splits(tmp_path / "saved", "one", "other"), split=chosen)


def test_a_selection_of_a_saved_data_set_is_refused_with_the_remedy(tmp_path: Path) -> None:
    """`datasets` writes the whole table and which of its rows count; reading the table would bring back the others."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": ["kept", "left out"]}).save_to_disk(tmp_path / "saved")
    state = json.loads((tmp_path / "saved" / "state.json").read_text())
    (tmp_path / "saved" / "state.json").write_text(json.dumps({**state, "_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match=r"saved was saved with an indices mapping.*dataset\.flatten_indices\(\)"):
        texts(tmp_path / "saved")


def test_a_selection_is_saved_without_a_mapping_today(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).select([2, 0]).save_to_disk(tmp_path / "saved")
    assert texts(tmp_path / "saved") == ["c", "a"]


def test_a_missing_shard_of_a_saved_data_set_is_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": DIFFICULT}).save_to_disk(tmp_path / "saved", num_shards=3)
    (tmp_path / "saved" / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00003\.arrow is listed in state\.json but missing"):
        texts(tmp_path / "saved")


# errors -----------------------------------------------------------------------------------------------------------


def _refused(path: Path, *parts: str, **how: str) -> None:
    """Reading must fail with a message that holds all parts, the file's name among them."""
    with pytest.raises(DataError) as caught:
        texts(path, **how)
    for part in (path.name, *parts):
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_a_folder_without_documents_says_what_was_passed_over_and_what_is_known(tmp_path: Path) -> None:
    _tree(tmp_path / "root", "a.md", "b.doc")
    _refused(tmp_path / "root", "no documents", "a.md, b.doc", ".jsonl", "data.pattern")
    with pytest.raises(DataError, match=r"no documents.*pattern '\*\.tex'"):
        texts(tmp_path / "root", pattern="*.tex")


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow"])
def test_a_missing_column_suggests_the_nearest_and_one_that_is_not_text_is_refused(tmp_path: Path, ending: str) -> None:
    where = ["line 1"] if ending == "jsonl" else []
    path = _with_column(tmp_path, ending, ["it"])
    _refused(path, *where, "'txt'", "did you mean 'text'?", "data.column", column="txt")
    _refused(_with_column(tmp_path, ending, [3]), "'text'", "int", "not text", "data.column")


def _with_column(folder: Path, ending: str, values: list[object]) -> Path:
    path = folder / f"a.{ending}"
    table = pa.table({"text": values})
    if ending == "jsonl":
        path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    elif ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    return path


def test_a_line_of_jsonl_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    good, deep = b'{"text": "good"}\n', b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    (tmp_path / "lines.jsonl").write_bytes(good + b"\n" + deep + good)
    _refused(tmp_path / "lines.jsonl", "line 3 is not JSON", "recursion")


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\\ud83c\\udfbb"}\n')
    assert texts(tmp_path) == ["🎻"]


def test_python_that_is_not_utf8_and_does_not_say_so_is_refused_with_the_byte(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes("# café\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.py is not UTF-8 text: byte 5 is 0xe9"):
        texts(tmp_path, pattern="*.py")


@pytest.mark.parametrize("damage", ["truncated", "overwritten"])
@pytest.mark.parametrize("name", ["a.txt.gz", "a.feather"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    if name == "a.feather":
        pyarrow.feather.write_feather(pa.table({"text": DIFFICULT}), path, compression="lz4", chunksize=5)
    else:
        path.write_bytes(gzip.compress(DIFFICULT[0].encode()))
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: -len(content) // 3], "overwritten": b"\xff" * 64}[damage])
    _refused(path, "cannot be read as")


def test_a_gzip_whose_middle_is_damaged_is_named(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(json.dumps({"text": "x" * 1000}).encode() * 50))
    content[20:40] = bytes(20)
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(content))
    _refused(tmp_path / "a.jsonl.gz", "cannot be read as jsonl")


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    found = documents.find_texts([_tree(tmp_path / "root", "a.txt")])
    (tmp_path / "root" / "a.txt").unlink()
    with pytest.raises(DataError, match=re.escape("a.txt cannot be read as text")):
        list(documents.read_documents(found.files[0]))
