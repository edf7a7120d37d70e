"""`unisono data scan` and `audio-cache` as they are typed: what they say of what is wrong, and what they count."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from unisono.cli.main import main

soundfile = pytest.importorskip("soundfile")


@pytest.fixture
def clips(tmp_path: Path) -> Path:
    """Three recordings of a second at 8 kHz."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for number in range(3):
        soundfile.write(folder / f"{number}.wav", np.sin(np.arange(8000) * (number + 1) / 20), 8000)
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["data", *map(os.fspath, words)]) == 2
    return capsys.readouterr().err


def test_a_scan_that_finds_nothing_says_so(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "scan", str(clips), f"out={tmp_path / 'bad.jsonl'}"]) == 0
    assert capsys.readouterr().out == "all 3 recordings can be decoded\n"


def test_a_folder_without_recordings_is_refused_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "train.csv").write_text("question,answer\n1,2\n")
    (tmp_path / "texts" / "notes.txt").write_text("no recording\n")
    said = error_of(capsys, "scan", tmp_path / "texts", "out=bad.jsonl")
    assert "texts has no recordings: neither audio files, nor metadata.csv" in said


def test_an_archive_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = error_of(capsys, "scan", tmp_path / "none.tar", "out=bad.jsonl")
    assert "none.tar does not exist" in said
    assert "Errno" not in said


def test_a_list_of_rows_to_leave_out_has_to_be_one(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, "audio-cache", clips, f"out={tmp_path / 'cache'}", f"leave_out={tmp_path / 'bad.jsonl'}")
    assert "bad.jsonl does not exist; `unisono data scan PATH out=" in said
    (tmp_path / "other.csv").write_text("file,label\n")
    said = error_of(capsys, "audio-cache", clips, f"out={tmp_path / 'cache'}", f"leave_out={tmp_path / 'other.csv'}")
    assert "other.csv is not a list that `unisono data scan` wrote" in said


def test_a_bad_recording_stops_a_cache_with_what_to_do(
    clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clips / "1.wav").write_bytes(b"")
    out = f"out={tmp_path / 'cache'}"
    said = error_of(capsys, "audio-cache", clips, out, "rate=8000", "duration=1")
    assert "row 1 of the source: " in said
    assert f"on_error=mask; or list them with `unisono data scan {clips} out=bad.jsonl`" in said


def test_progress_of_a_cache_counts_windows(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rate=8000", "duration=0.25", "windows=all", "num_mel_bins=20"]
    assert main(["data", "audio-cache", str(clips), f"out={tmp_path / 'cache'}", *words]) == 0
    counts = re.findall(r"(\d+) of (\d+) records", capsys.readouterr().err)
    assert counts
    assert counts[-1] == ("12", "12")
