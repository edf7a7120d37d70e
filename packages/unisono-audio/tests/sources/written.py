"""Recordings in every layout, and a task over them that worker processes can import without torch."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import unisono_audio as audio
from unisono.task import Batch, SampleContext, Task
from unisono_audio.sources import open_recordings

from ..make_golden import clip

ROWS, BAD = 23, (4, 11, 12)


@cache
def encoded() -> list[bytes]:
    """Recordings of several formats and rates; some are damaged."""
    from ..test_decode import recording

    made = []
    for row in range(ROWS):
        form, rate = ("flac16", "vorbis", "wav16")[row % 3], (44100, 16000, 22050, 8000)[row % 4]
        data = recording(form, rate, 1 + row % 2, x=clip(rate, 0.3 + 0.05 * (row % 5), row))
        made.append(data[: len(data) // 3] if row in BAD else data)
    return made


def labels() -> list[int | None]:
    return [None if row == 7 else row % 5 for row in range(ROWS)]


def table(label: Any = None) -> Any:
    audio_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    structs = [{"bytes": data, "path": f"clip-{row}.bin"} for row, data in enumerate(encoded())]
    return pa.table({"audio": pa.array(structs, audio_type), "ebird_code": label or pa.array(labels(), pa.int64())})


def write(folder: Path, layout: str) -> Any:
    """Write them, and say what to open."""
    folder.mkdir(parents=True, exist_ok=True)
    if layout == "arrow stream":
        for part, first in enumerate((0, 10)):
            with pa.OSFile(str(folder / f"part-{part}.arrow"), "wb") as sink:
                rows = table().slice(first, 10 if part == 0 else None)
                with pa.ipc.new_stream(sink, rows.schema) as writer:
                    writer.write_table(rows, max_chunksize=4)
        return folder
    if layout == "parquet":
        pq.write_table(table(), folder / "all.parquet", row_group_size=7)
        return str(folder / "*.parquet")
    if layout == "tar":
        with tarfile.open(folder / "shard-0.tar", "w") as archive:
            for row, data in enumerate(encoded()):
                about = json.dumps({"ebird_code": labels()[row]}).encode()
                for name, content in ((f"s/{row:03}.flac", data), (f"s/{row:03}.json", about)):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return folder / "shard-0.tar"
    (folder / "clips").mkdir(exist_ok=True)
    rows = []
    for row, data in enumerate(encoded()):
        (folder / "clips" / f"{row}.bin").write_bytes(data)
        rows.append({"file": f"clips/{row}.bin", "ebird_code": labels()[row]})
    if layout == "json":
        (folder / "metadata.json").write_text(json.dumps({"info": {}, "samples": rows}))
        return folder
    with (folder / f"metadata.{layout}").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if layout == "tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return folder if layout == "csv" else folder / "metadata.tsv"


LAYOUTS = ("arrow stream", "parquet", "tar", "json", "csv", "tsv")


class Listener(Task):
    """Random windows, augmented, made into features by one call for a batch.

    Args:
        path: of the recordings.
        backend: of the pipeline.
        settings: of `Task`.
    """

    def __init__(self, path: str, backend: str = "auto", **settings: Any) -> None:
        super().__init__(**settings)
        self.path = path
        self.pipeline = audio.Pipeline(16000, 0.25, audio.Fbank(20), 30, -4.0, 3.0, backend=backend)  # type: ignore[arg-type]

    def data(self) -> Any:
        return open_recordings(self.path, label="ebird_code")

    def sample(self, record: Any, context: SampleContext) -> Any:
        return {"audio": record["audio"], "name": record["name"], "row": record["row"],
                "window": audio.Window.random(context.rng), "seed": int(context.rng.integers(1 << 31))}  # fmt: skip

    def collate(self, samples: Sequence[Any]) -> Batch:
        batch = self.pipeline(
            [s["audio"] for s in samples], [s["window"] for s in samples], names=[s["name"] for s in samples]
        )
        features = [
            audio.spec_augment(values, np.random.default_rng(s["seed"]), frequency_width=4, time_width=6)
            for values, s in zip(batch.values, samples, strict=True)
        ]
        return {"features": np.stack(features), "row": np.array([s["row"] for s in samples])}

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"row": float(len(batch["row"]))}

    def build(self) -> Any:
        raise NotImplementedError

    outputs = loss = build
