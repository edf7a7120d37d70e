"""What a second attack found, on formats that the first had not tried: each by what it was given, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.security import thrift
from unisono.config.code import foreign_run
from unisono.data import ledger
from unisono.observe import events
from unisono.runtime.display.text_table import format_table
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.untrusted import archives, safe_paths
from unisono_sweeps import search, study


@pytest.mark.parametrize(
    "event", [{"step": 1, "seconds": 10**400}, {"step": 2**62}, {"step": -5}, {"step": 1, "a": 2**70}]
)
def test_an_event_whose_numbers_no_float_holds_is_left_out(tmp_path: Path, event: dict[str, int]) -> None:
    """Sums of seconds and axes of pictures overflowed."""
    (tmp_path / "events.jsonl").write_text(json.dumps({"loss": 1.0, **event}) + '\n{"step": 3, "loss": 2.0}\n')
    assert [one["step"] for one in events.read_events(tmp_path / "events.jsonl")] == [3]


@pytest.mark.parametrize("text", ["1: 2\nrecipe: a.py:B\n", "recipe: a.py:B\ntask: {1: 2}\n", "? [1, 2]\n: 3\n"])
def test_keys_of_a_configuration_are_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        foreign_run.read_values(tmp_path / "config.yaml")


def test_a_file_of_another_name_is_no_part_of_a_ledger(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    for name in ("rank-00001", "rank-x", "rank-" + "9" * 200, "rank-00000"):
        (tmp_path / "ledger" / f"{name}.jsonl").touch()
    assert [path.stem for path in ledger.find_files(tmp_path)] == ["rank-00000", "rank-00001"]


def test_a_name_of_a_folder_forges_no_line_of_a_table() -> None:
    lines = format_table(["run", "loss"], [["a\nResume with", "1"], ["\x1b[2J", "2"]])
    assert len(lines) == 3
    assert "\x1b" not in "".join(lines)


def test_an_archive_that_unpacks_to_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    """A matrix of distances (.npz, .qza) of a few kilobytes."""
    path = tmp_path / "a.npz"
    np.savez(path, a=np.arange(3), b=np.ones((2, 2)))
    with safe_paths.open_regular(path) as file:
        assert {name: array.shape for name, array in archives.load_arrays(file).items()} == {"a": (3,), "b": (2, 2)}
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as file,
    ):
        for _ in range(1100):
            file.write(bytes(1 << 20))
    assert path.stat().st_size < 2 << 20
    with (
        safe_paths.open_regular(path) as file,
        pytest.raises(DataError, match=r"unpacks to 1\.2 GB, more than 200 times"),
    ):
        archives.load_arrays(file)


@pytest.mark.parametrize("journal", [b"garbage\n", b'{"op_code": 0}\n', b'[1]\n{"op_code": 99}\n', b"link"])
def test_a_journal_of_somebody_else_s_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: bytes
) -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("unisono_language")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text('{"command": [], "runs": {}}')
    if journal == b"link":
        (tmp_path / "private").write_text("mine")
        (folder / study.STUDY).symlink_to(tmp_path / "private")
    else:
        (folder / study.STUDY).write_bytes(journal)
    words = ["optim.lr=interval(1e-4,1e-3)", "name=s", "trials=1", "metric=[loss]"]
    with pytest.raises(ConfigError, match=r"study\.journal"):
        search.run_search("language", None, words)
    assert journal != b"link" or (tmp_path / "private").read_text() == "mine"


def test_a_parquet_footer_whose_size_statistics_lie_ends_no_process(tmp_path: Path) -> None:
    """Arrow throws from a constructor that Python's binding takes for one that cannot: the process aborted."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": ["x", None]}), path)
    value = thrift.PARQUET.parse(path.read_bytes())
    column = value["footer"]["4"][1][1][0]["1"][1][1][0]["3"][1]  # its row groups, their columns, the metadata of each
    column["16"][1]["3"][1][1].append(5)  # a level more in the histogram
    path.write_bytes(thrift.PARQUET.seal(value))
    read = "import sys\nfrom unisono.data.sources import open_source\nopen_source(sys.argv[1])[0]"
    done = subprocess.run([sys.executable, "-c", read, str(path)], capture_output=True, text=True)
    assert (done.returncode, "histogram size mismatch" in done.stderr, "DataError" in done.stderr) == (1, True, True)
