"""Recordings in the layouts that people have them in: labels, names, groups, splits, windows, events, and refusals."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from unisono import ConfigError, DataError, UnisonoError
from unisono_birdsong.data.library import Library, open_library
from unisono_birdsong.settings import RecordingsData

soundfile = pytest.importorskip("soundfile")
SHARED = Path(__file__).parents[5] / "shared" / "data"
RATE = 8000


def sound(seconds: float = 0.5, number: int = 0) -> bytes:
    wave = np.sin(np.arange(int(seconds * RATE)) * (0.1 + 0.01 * number)).astype(np.float32) / 2
    buffer = io.BytesIO()
    soundfile.write(buffer, wave, RATE, format="WAV")
    return buffer.getvalue()


def folder(path: Path, rows: list[dict[str, Any]], seconds: float = 0.5) -> Path:
    """A folder with metadata.csv and its recordings."""
    path.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        if not (path / row["file"]).exists():
            (path / row["file"]).write_bytes(sound(seconds, number))
    with (path / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def birds(count: int = 12) -> list[dict[str, Any]]:
    return [
        {"file": f"{n}.wav", "label": n % 3, "species": f"bird {n % 3}", "recordist": f"person {n % 4}"}
        for n in range(count)
    ]


def library(path: Any, **settings: Any) -> Library:
    return open_library(RecordingsData(kind="recordings", path=str(path), **settings))


def sides(found: Library) -> tuple[set[str], set[str]]:
    return tuple({part[n]["group"] for n in range(len(part))} for part in (found.training, found.held_out))  # type: ignore[return-value]


def test_a_recordist_is_on_one_side_wherever_the_folder_lies_and_each_is_held_out_once(tmp_path: Path) -> None:
    held_out: list[set[str]] = []
    for fold in range(4):
        found = library(folder(tmp_path / "a", birds()), group="recordist", held_out=0.25, fold=fold)
        training, aside = sides(found)
        assert not training & aside
        assert len(found.training) + len(found.held_out) == 12
        held_out.append(aside)
    assert sorted(name for part in held_out for name in part) == [f"person {n}" for n in range(4)]
    default = library(tmp_path / "a")
    moved = library(folder(tmp_path / "elsewhere", birds()))
    assert sides(default) == sides(moved)
    assert len(default.held_out) == 2


def test_hugging_face_data_with_class_labels_and_nulls(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "audio": datasets.Audio(decode=False),
            "ebird_code": datasets.ClassLabel(names=["amerob", "bkcchi", "norcar"]),
            "filepath": datasets.Value("string"),
        }
    )
    rows = [
        {"audio": {"bytes": sound(number=n), "path": f"{n}.wav"}, "ebird_code": None if n == 3 else n % 3,
         "filepath": f"{n // 2}.ogg"}
        for n in range(8)
    ]  # fmt: skip
    data = datasets.Dataset(pa.Table.from_pylist(rows, schema=features.arrow_schema))
    data.save_to_disk(tmp_path / "saved")
    data.to_parquet(tmp_path / "all.parquet")
    found = [library(tmp_path / name, held_out=0.25) for name in ("saved", "all.parquet")]
    for one in found:
        assert one.training.classes == ("amerob", "bkcchi", "norcar")
        records = [part[n] for part in (one.training, one.held_out) for n in range(len(part))]
        assert {r["row"]: r["labels"] for r in records} == {n: () if n == 3 else (n % 3,) for n in range(8)}
        assert {r["row"]: r["known"] for r in records} == {n: n != 3 for n in range(8)}
        training, aside = sides(one)
        assert not training & aside  # rows of one file
        assert all(record["audio"][:4] == b"RIFF" for record in records)
    assert sides(found[0]) == sides(found[1])


def test_lists_of_classes_and_starts_are_windows_with_several_birds(tmp_path: Path) -> None:
    audio = pa.array([{"bytes": sound(2.0), "path": "night.wav"}] * 4)
    table = pa.table(
        {
            "audio": audio,
            "filepath": ["night.wav"] * 2 + ["dawn.wav"] * 2,
            "start_time": [0.0, 0.5, 0.0, None],
            "ebird_code_multilabel": pa.array([[1, 0], [], None, [2]], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "soundscapes.parquet")
    found = library(tmp_path / "soundscapes.parquet", held_out=0).training
    assert [found[n]["labels"] for n in range(4)] == [(0, 1), (), (), (2,)]
    assert [found[n]["known"] for n in range(4)] == [True, True, False, True]
    assert [found[n]["window"].start if "window" in found[n] else None for n in range(4)] == [0.0, 0.5, 0.0, None]


def test_windows_of_long_recordings_have_the_classes_of_their_events(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", [{"file": "night.wav"}, {"file": "dawn.wav"}], seconds=4.0)
    events = tmp_path / "events.csv"
    events.write_text("recording,start,end,label\nnight.wav,0.2,1.4,1\nnight.wav,1.9,2.05,0\ndawn.wav,3,4,2\n")
    found = library(path, window_seconds=1.0, events=events, held_out=0.5)
    parts = [part[n] for part in (found.training, found.held_out) for n in range(len(part))]
    by_recording = {
        name: [record["labels"] for record in parts if record["group"] == name] for name in ("night.wav", "dawn.wav")
    }
    # 0.4 s of the event that begins at 0.2 s are not enough for the second window; of a short event all there is, is
    assert by_recording["night.wav"] == [(1,), (), (), ()]
    assert by_recording["dawn.wav"] == [(), (), (), (2,)]
    assert [found.training[n]["window"].start for n in range(4)] == [0.0, 1.0, 2.0, 3.0]
    training, aside = sides(found)
    assert len(training) == len(aside) == 1
    short = library(path, window_seconds=1.0, events=events, held_out=0, overlap=0.1).training
    assert [short[n]["labels"] for n in range(3)] == [(1,), (0, 1), ()]


def test_rows_to_leave_out_and_rows_that_are_wanted_keep_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"row": 4, "reason": "cut off"}\n')
    path = folder(tmp_path / "a", birds())
    found = library(path, where={"species": "bird 1"}, leave_out=tmp_path / "bad.jsonl", held_out=0, names="species")
    assert [found.training[n]["row"] for n in range(len(found.training))] == [1, 7, 10]
    assert found.training.classes == ("class 0", "bird 1")
    assert found.training.fingerprint != library(path, held_out=0).training.fingerprint


def test_a_set_of_its_own_to_evaluate_on(tmp_path: Path) -> None:
    path, other = folder(tmp_path / "a", birds()), folder(tmp_path / "b", birds(3))
    found = library(path, test=str(other))
    assert (len(found.training), len(found.held_out)) == (12, 3)
    with pytest.raises(DataError, match=r"data.test has rows of recordist 'person 0' and 2 others that data.path has"):
        library(path, test=str(other), group="recordist")
    swapped = [{**row, "species": f"bird {(row['label'] + 1) % 3}"} for row in birds(3)]
    with pytest.raises(DataError, match=r"class 0 is 'bird 0' in data.path and 'bird 1' in data.test"):
        library(path, test=str(folder(tmp_path / "c", swapped)), names="species")


REFUSED = {
    "text": ({"label": "species"}, r"data.path: column 'species' has text in row 0 .*ClassLabel.*data.label"),
    "no column": ({"label": "lable"}, r"no column 'lable' of labels .*did you mean 'label'.*data.label=null"),
    "no group": ({"group": "recorder"}, r"data.group=recorder: there is no such column, did you mean 'recordist'"),
    "no such group": ({"group": "recordist", "held_out_groups": ["Ann"]}, r"no row has recordist=Ann"),
    "no such rows": ({"where": {"species": "bird 7"}}, r"no row has species=bird 7 \(data.where\), did you mean"),
    "names differ": ({"names": "recordist"}, r"row 3 \(from 0\): class 0 is 'person 3' here and 'person 0'"),
    "no names": ({"names": "nowhere.json"}, r"data.names=nowhere.json cannot be read"),
    "a fold": ({"held_out": 0.5, "fold": 5}, r"data.fold=5: 12 groups, 6 of them held out at a time, make 2 folds"),
    "events without windows": ({"events": "e.csv"}, r"data.events gives classes to windows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_are_refused_with_what_to_do(case: str, tmp_path: Path) -> None:
    settings, told = REFUSED[case]
    with pytest.raises((UnisonoError, ValueError), match=told):
        library(folder(tmp_path, birds()), **settings)


def test_events_that_do_not_fit_are_refused_by_row(tmp_path: Path) -> None:
    path, events = folder(tmp_path / "a", [{"file": "night.wav"}, {"file": "dawn.wav"}]), tmp_path / "e.csv"
    for line, told in (
        ("nigth.wav,0,1,0", r"has events of 'nigth.wav', .*did you mean 'night.wav'"),
        ("night.wav,2,1,0", r"row 0 \(from 0\): from 2 s to 1 s of class 0"),
        ("night.wav,0,1,robin", r"row 0 \(from 0\): .*classes integers"),
        ("night.wav,7,8,0", r"no event of .*e.csv is heard for data.overlap=0.5 s within one of the windows of 0.25 s"),
    ):
        events.write_text(f"recording,start,end,label\n{line}\n")
        with pytest.raises(DataError, match=told):
            library(path, window_seconds=0.25, events=events)


def test_names_in_a_file_have_to_number_the_classes(tmp_path: Path) -> None:
    path, names = folder(tmp_path / "a", birds()), tmp_path / "names.json"
    names.write_text(json.dumps({"wren": 2, "robin": 0, "crow": 1}))
    assert library(path, names=str(names)).training.classes == ("robin", "crow", "wren")
    names.write_text(json.dumps({"wren": 2, "robin": 0}))
    with pytest.raises(ConfigError, match="with the classes 0, 1, 2"):
        library(path, names=str(names))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recordings are not in this checkout (../shared/data)")
def test_real_recordings_split_by_recordist() -> None:
    found = library(SHARED / "birdsong_xc", names="species", group="recordist", where={"source": "phoebe"})
    assert (len(found.training) + len(found.held_out), len(found.training.classes)) == (78, 10)
    training, aside = sides(found)
    assert training and aside and not training & aside
