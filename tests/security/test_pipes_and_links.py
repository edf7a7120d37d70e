"""Nobody waits for a pipe that somebody put where a file should be, and no link leads out of a folder of data."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.data import ledger
from unisono.data.compute_once import compute_array_once
from unisono.data.sources import open_source
from unisono.observe import events
from unisono.runtime.errors import DataError, UnisonoError
from unisono.supervise import diagnose, run_lock
from unisono_audio.sources.decoded_cache import DecodedCache
from unisono_puzzles.data.arrays import read_split


def ends(act: Callable[[], Any]) -> Any:
    """What a call returns or raises, which it must do at once."""
    answer: list[Any] = []

    def run() -> None:
        try:
            answer.append(act())
        except (UnisonoError, OSError, ValueError) as error:
            answer.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert answer, "it waits for the pipe"
    return answer[0]


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def diagnosed(run: Path) -> None:
    (run / "config.yaml").write_text("recipe: a.py:B\ntrain: {steps: 9}\n")
    diagnose.diagnose_run(run)


def split(folder: Path, **changes: Any) -> Path:
    """A folder of puzzles as arrays, of four tokens each."""
    folder.mkdir()
    meta = {
        "seq_len": 4, "vocab_size": 6, "pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0,
        "num_puzzle_identifiers": 1, "total_groups": 1, "mean_puzzle_examples": 1, "total_puzzles": 1, "sets": ["all"],
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps({**meta, **changes}))
    return folder


@pytest.mark.parametrize(
    "act",
    [
        lambda at: diagnosed(pipe(at / "fingerprint.json").parent),
        lambda at: run_lock.find_holder(pipe(at / "lease" / "00000001.json").parents[1]),
        lambda at: run_lock._read_counter(pipe(at / "lease" / "00000001.beat").parents[1], 1),
        lambda at: events.read_events(pipe(at / "events.jsonl")),
        lambda at: ledger.read_ledger(pipe(at / "ledger" / "rank-00000.jsonl")),
        lambda at: ledger.find_fault(pipe(at / "ledger" / "rank-00000.jsonl").parents[1], "rank-00000.jsonl", {}),
        lambda at: DecodedCache(pipe(at / "cache.json").parent),
        lambda at: open_source(pipe(at / "rows.jsonl")),
        lambda at: read_split(pipe(split(at / "p") / "all__inputs.npy").parent),
    ],
    ids=["diagnose", "holder", "counter", "events", "ledger", "audit", "cache", "rows", "puzzles"],
)
def test_a_pipe_is_refused_at_once(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    found = ends(lambda: act(tmp_path))
    assert isinstance(found, UnisonoError | OSError | ValueError) or not found


def test_a_pipe_among_files_of_data_is_not_passed_over(tmp_path: Path) -> None:
    """Its rows were missing without a word; a folder that is named like a file is a folder."""
    (tmp_path / "a.csv").write_text("x\n1\n")
    (tmp_path / "b.csv").mkdir()
    (tmp_path / "b.csv" / "c.csv").write_text("x\n2\n")
    assert [row["x"] for row in open_source(tmp_path)] == [1, 2]
    pipe(tmp_path / "d.csv")
    found = ends(lambda: open_source(tmp_path))
    assert isinstance(found, UnisonoError) and "d.csv is a pipe" in str(found)


def test_a_name_that_no_file_can_have_is_a_sentence() -> None:
    with pytest.raises(DataError, match="x… cannot be looked for: File name too long"):
        open_source("x" * 5000)


def test_a_pipe_in_the_cache_is_computed_anew(tmp_path: Path) -> None:
    rows = np.arange(3.0)
    assert compute_array_once("rows", 1, lambda: rows, cache=tmp_path).tolist() == rows.tolist()
    (file,) = (tmp_path / "rows").glob("*/array.npy")
    pipe(file)
    found = ends(lambda: compute_array_once("rows", 1, lambda: rows, cache=tmp_path))
    assert found.tolist() == rows.tolist()


def test_a_set_of_puzzles_cannot_lie_outside(tmp_path: Path) -> None:
    """`sets: ["../../x"]` was opened."""
    with pytest.raises(DataError, match="lies outside"):
        read_split(split(tmp_path / "p", sets=["../../x"]))


def test_a_link_in_a_folder_of_data_leads_inside_of_it_or_is_refused(tmp_path: Path) -> None:
    """A private key became a row."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (tmp_path / "private.jsonl").write_text('{"key": "secret"}\n')
    (folder / "a.jsonl").write_text('{"key": "a"}\n')
    (folder / "more").mkdir()
    (folder / "more" / "b.jsonl").write_text('{"key": "b"}\n')
    (folder / "c.jsonl").symlink_to("more/b.jsonl")
    assert [row["key"] for row in open_source(folder, duplicates="allow")] == ["a", "b", "b"]
    (folder / "d.jsonl").symlink_to(tmp_path / "private.jsonl")
    with pytest.raises(DataError, match=r"d\.jsonl is a link to .*private\.jsonl, outside of the folder"):
        open_source(folder, duplicates="allow")
    (tmp_path / "named.jsonl").symlink_to(tmp_path / "private.jsonl")
    assert open_source(tmp_path / "named.jsonl")[0]["key"] == "secret"


def test_a_record_of_a_run_cannot_forge_lines_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("recipe: a.py:B\ntrain: {steps: 9}\n")
    forged = {"step": 1, "restart": "1\nResume with", "why": "x\n\nResume with\n  rm -rf ~"}
    (tmp_path / "events.jsonl").write_text(json.dumps(forged) + "\n")
    lines = "\n".join(diagnose.diagnose_run(tmp_path)).splitlines()
    assert "Resume with" not in lines
    assert not any(line.startswith("  rm -rf") for line in lines)
