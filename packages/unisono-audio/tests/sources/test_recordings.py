"""Recordings as sources: every layout, labels, rows left out, windows; scans and caches of them."""

from __future__ import annotations

import errno
import json
import os
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

import unisono_audio as audio
from unisono.cli.main import main
from unisono.runtime.errors import BadSamplesError, ConfigError, DataError
from unisono_audio.sources import cut_windows, open_recordings
from unisono_audio.sources.decoded_cache import DecodedCache, make_cache
from unisono_audio.sources.metadata import MetadataTable
from unisono_audio.sources.scan import scan

from .written import BAD, LAYOUTS, ROWS, encoded, labels, table, write

pytest.importorskip("soundfile")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_recordings_and_their_labels_in_order(layout: str, tmp_path: Path) -> None:
    source = open_recordings(write(tmp_path, layout), label="ebird_code")
    assert len(source) == ROWS
    records = [source[row] for row in range(ROWS)]
    assert [record["row"] for record in records] == list(range(ROWS))
    assert [record["ebird_code"] for record in records] == labels()
    for record, data in zip(records, encoded(), strict=True):
        assert bytes(audio.recordings.data_of(record["audio"])) == data
        assert str(tmp_path) in record["name"]
    again = open_recordings(write(tmp_path, layout), label="ebird_code")
    assert again.fingerprint == source.fingerprint
    again.check_same(source.manifest)
    again.check_files()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_of_all_rows_are_read_without_recordings(layout: str, tmp_path: Path) -> None:
    source = open_recordings(write(tmp_path, layout), leave_out=BAD)
    found = source.read_columns(["ebird_code", "audio"])
    there = [row for row in range(ROWS) if row not in BAD]
    assert found["ebird_code"] == [labels()[row] for row in there]
    files = layout in ("json", "csv", "tsv")
    assert found["audio"] == [f"clips/{row}.bin" if files else None for row in there]
    assert source.class_names("ebird_code") is None
    with pytest.raises(DataError, match=r"no column 'ebird_kode', did you mean 'ebird_code'"):
        source.read_columns(["ebird_kode"])


@pytest.mark.parametrize("layout", ["parquet", "csv"])
def test_a_label_that_is_no_integer_is_refused_by_its_column(layout: str, tmp_path: Path) -> None:
    if layout == "parquet":
        pq.write_table(table(pa.array([f"bird {row}" for row in range(ROWS)])), tmp_path / "a.parquet")
    else:
        write(tmp_path, "csv")
        path = tmp_path / "metadata.csv"
        path.write_text(path.read_text().replace(",3\n", ",song\n").replace(",3\r\n", ",song\r\n"))
    with pytest.raises(DataError, match=r"column 'ebird_code' is (string|text), not int(64)? or null"):
        open_recordings(tmp_path, label="ebird_code")
    with pytest.raises(DataError, match=r"no column 'ebird_kode'.*did you mean 'ebird_code'"):
        open_recordings(tmp_path, label="ebird_kode")


def test_recordings_that_are_not_there_are_refused_before_the_start(tmp_path: Path) -> None:
    folder = write(tmp_path, "csv")
    (tmp_path / "clips" / "5.bin").unlink()
    with pytest.raises(DataError, match=r"metadata.csv, row 5 \(from 0\): .*clips/5.bin does not exist.*data scan"):
        open_recordings(folder)
    found = scan(open_recordings(folder, require_files=False), tmp_path / "bad.jsonl", workers=1)
    assert tuple(found.bad) == tuple(sorted({*BAD, 5})) and "No such file" in found.bad[5]
    assert len(open_recordings(folder, leave_out=found.path)) == ROWS - len(found.bad)
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="there is no column 'audio' of recordings"):
        open_recordings(tmp_path / "x.parquet")
    with pytest.raises(DataError, match="column 'x' is int64, not recordings"):
        open_recordings(tmp_path / "x.parquet", audio="x")


def test_a_column_of_a_list_is_floats_only_where_none_of_its_ids_changes(tmp_path: Path) -> None:
    lines = ["9007199254740993,1000000000000000", "1.5,0.5", ",2.5"]
    (tmp_path / "a.csv").write_text("\n".join(["file,id,gain", *(f"{n}.wav,{line}" for n, line in enumerate(lines))]))
    rows = MetadataTable(tmp_path / "a.csv", None, "data.path")
    assert [rows.record(row)["id"] for row in range(3)] == ["9007199254740993", "1.5", ""]
    assert [rows.record(row)["gain"] for row in range(3)] == [1e15, 0.5, 2.5]


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    ("member", "told"),
    [
        (link("s/900.flac", "000.flac"), "s/900.flac is a link, so the archive does not hold its bytes"),
        (link("s/000.txt", "000.json"), "s/000.txt is a link, so"),
        (link("s/900.flac", "s/000.flac", tarfile.LNKTYPE), "s/900.flac is a link, so"),
        (link("more", "/data/more"), "more is a link to /data/more, which is no file of the archive"),
        (link("v1.0", "s"), "v1.0 is a link to s, which is no file of the archive"),
        (link("README", "./s/000.json"), None),
        (link("s/README.md", "../s/./000.json"), None),
        (link("README", "s/000.json", tarfile.LNKTYPE), None),
    ],
)
def test_a_link_in_an_archive_is_refused_where_a_row_may_be_missing(
    tmp_path: Path, member: tarfile.TarInfo, told: str | None
) -> None:
    archive = write(tmp_path, "tar")
    with tarfile.open(archive, "a") as file:
        file.addfile(member)
    if told is None:
        assert len(open_recordings(archive, label="ebird_code")) == ROWS
    else:
        with pytest.raises(DataError, match=told):
            open_recordings(archive)


def test_files_that_change_are_refused_by_name(tmp_path: Path) -> None:
    source = open_recordings(write(tmp_path, "csv"))
    before = source.manifest
    (tmp_path / "clips" / "5.bin").write_bytes(b"something else")
    with pytest.raises(DataError, match=r"clips/5.bin has changed since it was found: it had \d+ bytes and has 14"):
        source.check_files()
    with pytest.raises(DataError, match="the data changed since the last start"):
        open_recordings(tmp_path).check_same(before)


def test_an_archive_that_is_gone_or_changed_is_refused_by_name(tmp_path: Path) -> None:
    archive = write(tmp_path, "tar")
    source = open_recordings(archive)
    archive.write_bytes(archive.read_bytes() + b"more")
    with pytest.raises(DataError, match=r"shard-0.tar has changed since it was opened"):
        source.check_files()
    archive.unlink()
    with pytest.raises(DataError, match=r"shard-0.tar is no longer there"):
        source.check_files()


def test_rows_are_left_out_without_moving_the_others(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "parquet")
    whole, some = open_recordings(path), open_recordings(path, leave_out=BAD)
    assert len(some) == ROWS - len(BAD)
    assert [some[row]["row"] for row in range(len(some))] == [row for row in range(ROWS) if row not in BAD]
    assert some.fingerprint != whole.fingerprint
    with pytest.raises(DataError, match="leave_out differs"):
        some.check_same(whole.manifest)
    with pytest.raises(DataError, match="leave_out names row 99"):
        open_recordings(path, leave_out=[99])


def test_long_recordings_are_cut_into_rows_of_windows(tmp_path: Path) -> None:
    source = open_recordings(write(tmp_path, "parquet"), leave_out=BAD)
    cut = cut_windows(source, 0.2)
    lengths = [audio.probe(source[row]["audio"]) for row in range(len(source))]
    assert len(cut) == sum(int(np.ceil((h.frames or 0) / h.rate / 0.2 - 1e-9)) for h in lengths) > len(source)
    record = cut[1]
    assert (record["row"], record["window"]) == (0, audio.Window(0.2))


class Stop:
    """Progress that interrupts when it is told for the third time; of how many rows it was told."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, rows: int, bad: int) -> None:
        self.rows.append(rows)
        if len(self.rows) == 3:
            raise KeyboardInterrupt


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono_audio.sources.journal._CHUNK_ROWS", 4)


@pytest.mark.usefixtures("small_chunks")
def test_a_scan_finds_what_cannot_be_decoded_and_resumes(tmp_path: Path) -> None:
    source = open_recordings(write(tmp_path / "data", "csv"))
    out = tmp_path / "bad.jsonl"
    for before in (0, 8):
        stop = Stop()
        with pytest.raises(KeyboardInterrupt):
            scan(source, out, workers=1, progress=stop)
        assert stop.rows == [before, 4, 4]  # it went on
        with (tmp_path / "bad.jsonl.progress").open("a") as journal:
            journal.write('{"first": 8, "ro')  # a line that the interruption cut off
    assert not out.exists()
    rows = list[int]()
    found = scan(source, out, workers=1, progress=lambda count, bad: rows.append(count))
    assert rows == [16, 4, 3]
    assert tuple(found.bad) == BAD
    assert all("cut off" in reason for reason in found.bad.values())
    assert scan(source, out, workers=2) == found  # is not made again
    clean = open_recordings(tmp_path / "data", leave_out=out)
    assert len(clean) == ROWS - len(BAD)
    for row in range(len(clean)):
        audio.decode(clean[row]["audio"])


@pytest.mark.usefixtures("small_chunks")
def test_a_cache_holds_what_the_pipeline_makes_and_resumes(tmp_path: Path) -> None:
    path = write(tmp_path / "data", "arrow stream")
    source = open_recordings(path, leave_out=BAD)
    pipeline = audio.Pipeline(16000, 0.25, audio.Fbank(20), 30, -4.0, 3.0)
    expected = pipeline([source[row]["audio"] for row in range(len(source))])
    with pytest.raises(KeyboardInterrupt):
        make_cache(source, pipeline, tmp_path / "cache", progress=Stop())
    with pytest.raises(DataError, match="is not a finished cache"):
        DecodedCache(tmp_path / "cache")
    rows = list[int]()
    cache = make_cache(source, pipeline, tmp_path / "cache", progress=lambda count, bad: rows.append(count))
    assert rows[0] == 8  # those of before
    assert len(cache) == len(source)
    for row in range(len(cache)):
        assert (cache[row]["values"] == expected.values[row]).all()
        assert cache[row]["row"] == source[row]["row"]
    with pytest.raises(ConfigError, match="contains a cache of other data or settings"):
        make_cache(source, audio.Pipeline(16000, 0.25, audio.Fbank(20), 30), tmp_path / "cache")
    with pytest.raises(DataError, match=r"was built with a different .*method"):
        DecodedCache(
            tmp_path / "cache", audio.Pipeline(16000, 0.25, audio.Fbank(20), 30, -4.0, 3.0, method="kaiser_best")
        )
    whole = open_recordings(path)
    with pytest.raises(BadSamplesError, match=r"row 4 of the source: .*part-0.arrow, row 4 \(from 0\), clip-4.bin"):
        make_cache(whole, pipeline, tmp_path / "strict")
    masked = make_cache(
        whole, pipeline, tmp_path / "masked", on_error="mask", dtype="float16", windows="centre", workers=2
    )
    assert [masked[row]["row"] for row in range(len(masked))] == [row for row in range(ROWS) if row not in BAD]


def test_the_verbs_scan_and_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", "csv")
    data, bad = str(tmp_path / "data"), str(tmp_path / "bad.jsonl")
    assert main(["data", "scan", data, f"out={bad}", "workers=2"]) == 1
    assert "23 recordings, 3 cannot be decoded" in capsys.readouterr().out
    assert [json.loads(line).get("row") for line in Path(bad).read_text().splitlines()][1:] == list(BAD)
    words = [f"out={tmp_path / 'cache'}", "rate=16000", "duration=0.25", "num_mel_bins=20", f"leave_out={bad}"]
    assert main(["data", "audio-cache", data, *words]) == 0
    assert "20 rows of 23 × 20 float32, 0 left out" in capsys.readouterr().out


@pytest.mark.parametrize("share", [1.0, 0.95])
def test_channels_in_opposite_phase_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    """They became silence without a word; quiet, mono and one-sided recordings are right as they are."""
    folder = tmp_path / "rows"
    folder.mkdir()
    tone = (0.05 * np.sin(np.arange(32_000) / 7)).astype(np.float32)
    kinds = {
        "a": np.stack([tone, -share * tone], 1), "b": np.stack([tone, tone], 1), "c": np.stack([tone, 0 * tone], 1),
        "d": tone[:, None] / 100, "e": np.zeros((32_000, 2), np.float32),
    }  # fmt: skip
    for name, frames in kinds.items():
        soundfile.write(folder / f"{name}.wav", frames, 16_000)
    source, out = open_recordings(folder), tmp_path / "bad.jsonl"
    found = scan(source, out, workers=1)
    assert (found.bad, found.cancelled) == ({}, [0])
    assert scan(source, out, workers=2) == found, "kept where the scan is finished"
    assert main(["data", "scan", str(folder), f"out={tmp_path / 'again.jsonl'}"]) == 0
    assert (
        "rows 0: the channels cancel each other, so the mix to mono is next to silence (1 of 5"
        in capsys.readouterr().err
    )
    assert len(open_recordings(folder, leave_out=out)) == 5, "a warning leaves nothing out"


def test_a_disk_that_is_full_is_a_sentence_and_kills_nothing(tmp_path: Path) -> None:
    """The space of the array was not reserved, so the first write beyond the disk ended the process by SIGBUS."""
    source = open_recordings(write(tmp_path / "data", "csv"), leave_out=BAD)
    pipeline = audio.Pipeline(16000, 0.25, audio.Fbank(20))
    reserved: list[int] = []

    def reserve(descriptor: int, first: int, size: int) -> None:
        reserved.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = tmp_path / "cache"
    with mock.patch.object(os, "posix_fallocate", reserve), pytest.raises(DataError) as caught:
        make_cache(source, pipeline, folder)
    assert reserved[0] > len(source) * 20 * 4
    assert str(caught.value).startswith(f"{folder} cannot be written (No space left on device); free some space")
    assert not (folder / "values.npy").exists()
    lost = mock.patch.object(np.memmap, "flush", side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with lost, pytest.raises(DataError, match=r"cannot be written \(Input/output error\); .* goes on from there"):
        make_cache(source, pipeline, folder)
    assert len(make_cache(source, pipeline, folder)) == len(source)


def test_a_disk_that_is_full_for_what_is_finished_is_a_sentence_too(tmp_path: Path) -> None:
    """To close the file wrote once more what could not be written, outside of what tells it."""
    source = open_recordings(write(tmp_path / "data", "csv"), leave_out=BAD)
    pipeline = audio.Pipeline(16000, 0.25, audio.Fbank(20))
    folder = tmp_path / "cache"
    with mock.patch.object(np.memmap, "flush", side_effect=OSError(errno.EIO, "no")), pytest.raises(DataError):
        make_cache(source, pipeline, folder)
    real = Path.open

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        return real(Path("/dev/full") if path.name == "progress.jsonl" else path, *arguments, **options)

    with mock.patch.object(Path, "open", full), pytest.raises(DataError, match="No space left on device"):
        make_cache(source, pipeline, folder)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        make_cache(source, pipeline, tmp_path / "file" / "cache")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01\x00"])
def test_half_an_array_of_a_cache_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    """A traceback. It is renamed into its place by now, so that no start leaves one."""
    source = open_recordings(write(tmp_path / "data", "csv"), leave_out=BAD)
    pipeline = audio.Pipeline(16000, 0.25, audio.Fbank(20))
    folder = tmp_path / "cache"
    with mock.patch.object(np.memmap, "flush", side_effect=OSError(errno.EIO, "no")), pytest.raises(DataError):
        make_cache(source, pipeline, folder)
    (folder / "values.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"values.npy cannot be read: .*; remove the folder, and build it again"):
        make_cache(source, pipeline, folder)
    np.save(folder / "values.npy", np.zeros(3))
    with pytest.raises(DataError, match="is another array than that of this cache"):
        make_cache(source, pipeline, folder)
