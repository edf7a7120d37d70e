"""The file of results: rows are added and replaced by key, by several processes at a time, and others can read it."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono import ConfigError, DataError
from unisono_birdsong.evaluation import results

ONE = results.Result(
    "0a1b", "xc@77", 0, "linear", "runs/a", 10, "model", 40, 20, 12, 10, "cross_entropy", 0.1,
    0.5, 0.4, 0.6, 0.8, 0.7, 0.9, 0.3, 0.2, 0.4, "2026-01-01T00:00:00+00:00",
)  # fmt: skip


def test_a_row_of_the_same_key_is_replaced_and_others_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "new" / "probes.parquet"
    assert results.append(path, [ONE, replace(ONE, probe="centroid", decay=None)]) == 2
    assert results.append(path, [replace(ONE, cmap=0.7, run="runs/b")]) == 2
    assert results.append(path, [replace(ONE, seed=1), replace(ONE, task="other"), replace(ONE, checkpoint="ff")]) == 5
    table = pq.read_table(path)
    assert sorted(table["cmap"].to_pylist()) == [0.5, 0.5, 0.5, 0.5, 0.7]
    assert table.schema.field("step").type == pa.int64()
    assert table["decay"].null_count == 1


def test_writers_at_the_same_time_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "probes.parquet"
    threads = [threading.Thread(target=results.append, args=(path, [replace(ONE, seed=n)])) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(pq.read_table(path)["seed"].to_pylist()) == list(range(12))


def test_duckdb_reads_it(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    results.append(tmp_path / "probes.parquet", [ONE, replace(ONE, seed=1, cmap=0.7)])
    found = (
        duckdb.connect().execute(f"select probe, avg(cmap) from '{tmp_path}/probes.parquet' group by probe").fetchall()
    )
    assert found == [("linear", pytest.approx(0.6))]


def test_another_file_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "probes.parquet"
    pq.write_table(pa.table({"x": [1]}), path)
    before = path.read_bytes()
    for act in (lambda: results.check(path), lambda: results.append(path, [ONE])):
        with pytest.raises(DataError, match=r"is not a file of probe results .*; add to another file by out="):
            act()
    assert path.read_bytes() == before
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        results.check(path)
    with pytest.raises(ConfigError, match=r"ends in \.parquet"):
        results.check(tmp_path / "probes.csv")
