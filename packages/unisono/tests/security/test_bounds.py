"""What would take all time or all memory is refused fast, by a sentence that says what was too much."""

from __future__ import annotations

import gzip
import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unisono.checkpoint.core import manifest
from unisono.config.compose import compose
from unisono.data.sources import storage
from unisono.data.sources.column_schema import ColumnRequest
from unisono.data.sources.files import open_source
from unisono.data.sources.formats import npy
from unisono.data.sources.storage import File
from unisono.runtime.errors import CheckpointError, ConfigError, DataError


def doubled(levels: int, kind: str) -> str:
    """YAML in which each key stands for the next one, twice."""
    form = {"text": "v{0}: ${{v{1}}}${{v{1}}}", "group": "v{0}: {{a: '${{v{1}}}', b: '${{v{1}}}'}}"}[kind]
    lines = [form.format(level, level + 1) for level in range(levels)]
    return "\n".join(["defaults: [task, _self_]", *lines, f"v{levels}: x"]) + "\n"


@pytest.mark.parametrize("kind", ["text", "group"])
@pytest.mark.parametrize("levels", [14, 40])
def test_references_that_double_are_refused_at_once(kind: str, levels: int, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(doubled(levels, kind))
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"references .* stand for more than"):
        compose("mine", config_dir=tmp_path)
    assert time.process_time() - began < 30  # it was hours


def test_a_long_text_may_not_be_multiplied_either(tmp_path: Path) -> None:
    text = f"defaults: [task, _self_]\nlong: {'x' * 10_000}\nmany: '{'${long}' * 500}'\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"references .* stand for more than"):
        compose("mine", config_dir=tmp_path)


def test_references_that_a_person_writes_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(doubled(6, "text"))
    assert compose("mine", config_dir=tmp_path).values["v0"] == "x" * 64


def test_a_manifest_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    with (folder / manifest.NAME).open("wb") as file:
        file.truncate(9 << 30)  # a hole, which takes no room
    with pytest.raises(CheckpointError, match=r"has 9663676416 bytes; at most"):
        manifest.read_manifest(folder)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.csv.gz"])
def test_gzip_unpacks_to_no_more_than_text_would(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "_FREE", 1 << 20)
    (tmp_path / name).write_bytes(gzip.compress(b" " * (8 << 20)))
    with pytest.raises(DataError, match=r"unpacks to more than 200 times"):
        list(_rows(tmp_path / name))


def _rows(path: Path) -> Any:
    source = open_source(path)
    return (source[row] for row in range(len(source)))


def _npy(header: str) -> bytes:
    text = header.encode() + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "header",
    ["{'descr': '<f4', 'fortran_order': False, 'shape': (-5,)}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': ()}",
     "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1099511627776)}",
     "{'descr': '|V0', 'fortran_order': False, 'shape': (1000000000000,)}",
     "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000, 0)}",
     f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({'9' * 5000},)}}",
     "{'descr': {'a': 1}, 'fortran_order': False, 'shape': (1,)}", "[" * 300, "{'descr': '<f4'}", "{}", "1",
     "{'descr': [('a', '<f4', -1)], 'fortran_order': False, 'shape': (1,)}"],
)  # fmt: skip
def test_a_header_of_npy_that_lies_is_one_sentence(header: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(_npy(header) + bytes(64))
    with pytest.raises(DataError, match=r"a\.npy"):
        npy.NpyReader(File.from_path(path, "npy", "a.npy"), ColumnRequest())


def test_rows_that_no_file_of_that_size_can_hold_are_refused(tmp_path: Path) -> None:
    sink = io.BytesIO()
    schema = pa.schema([("a", pa.null())])
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.record_batch([pa.nulls(100_000_000)], schema=schema))
    (tmp_path / "a.arrow").write_bytes(sink.getvalue())
    with pytest.raises(DataError, match=r"100000000 rows, which \d+ bytes cannot hold"):
        open_source(tmp_path / "a.arrow")


def test_files_that_are_what_they_say_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(3, 2))
    (tmp_path / "b.jsonl.gz").write_bytes(
        gzip.compress(b"".join(json.dumps({"a": n}).encode() + b"\n" for n in range(9)))
    )
    assert len(list(_rows(tmp_path / "a.npy"))) == 3
    assert [row["a"] for row in _rows(tmp_path / "b.jsonl.gz")] == list(range(9))
