"""Loaders of one set of recordings, each as its library's guide would have it, for `benchmarks.audio`.

Clips are 5 s mono: synthetic ones, and real ones (ESC-10) where `../shared/data` is. They lie in an Arrow file, in
Parquet with an `Audio` column, in a WebDataset archive and in a folder. A batch is 32 times (512, 128) float32 and
labels: Kaldi's filter bank at 32 kHz, padded and normalised. Peers without a filter bank of their own get one with
cached tables in torch and soxr's resampler, which is twice as fast as torchaudio's. All have two workers. What is not
installed is left out:

    apt-get install ffmpeg; pip install soxr torchcodec==0.13.0
    pip install --target PEERS --no-deps grain array_record absl-py etils dm-tree importlib_resources portpicker zipp \
        ml_collections webdataset braceexpand lhotse intervaltree cytoolz toolz lilcom audioread tabulate spdl \
        spdl-core spdl-io
    PYTHONPATH=PEERS:src python -m benchmarks.audio
"""

from __future__ import annotations

import io
import itertools
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

BATCH, FRAMES, BANDS, RATE, SECONDS, MEAN, STD = 32, 512, 128, 32_000, 5.0, -7.2, 8.86
WORKERS, DISTINCT, ROWS = 2, 64, 512
SETS = {"flac": (44_100, "FLAC", "PCM_16"), "ogg": (32_000, "OGG", "VORBIS")}
SHARED = Path(__file__).parents[2] / "shared/data/esc10/clips"
Batches = Iterator[Any]


def clips(rate: int) -> list[Any]:
    """Samples of the distinct clips: half of them real, where there are real ones."""
    import soundfile

    import unisono_audio as audio

    rng = np.random.default_rng(0)
    time = np.arange(int(SECONDS * rate)) / rate
    encoded_clips = []
    for _ in range(DISTINCT):
        x = 0.01 * rng.standard_normal(len(time))
        for start in rng.uniform(0, 4.5, 12):
            at = np.clip((time - start) / rng.uniform(0.05, 0.4), 0, 1)
            low, high = rng.uniform(0.03, 0.4, 2) * rate
            x += 0.1 * np.sin(2 * np.pi * (low + (high - low) * at / 2) * (time - start)) * np.sin(np.pi * at) ** 2
        encoded_clips.append(x.astype(np.float32))
    for number, path in enumerate(sorted(SHARED.glob("*.ogg"))[: DISTINCT // 2] if SHARED.exists() else []):
        x, source = soundfile.read(path, dtype="float32")
        x = np.resize(audio.resample(x, source, rate, "kaiser_best"), len(time))
        encoded_clips[2 * number] = x / max(1.0, np.abs(x).max())
    return encoded_clips


def generate(folder: Path, kind: str) -> None:
    """Write a set in every layout."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import soundfile

    rate, form, subtype = SETS[kind]
    encoded = []
    for x in clips(rate):
        file = io.BytesIO()
        soundfile.write(file, x, rate, format=form, subtype=subtype)
        encoded.append(file.getvalue())
    directory = folder / kind
    (directory / "files").mkdir(parents=True)
    structs = [{"bytes": encoded[row % DISTINCT], "path": f"{row}.{kind}"} for row in range(ROWS)]
    labels = list(range(ROWS))
    table = pa.table(
        {
            "audio": pa.array(structs, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "label": pa.array(labels, pa.int64()),
        }
    )
    with pa.OSFile(str(directory / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    pq.write_table(table, directory / "rows.parquet", row_group_size=64)
    with tarfile.open(directory / "rows.tar", "w") as archive:
        for row in range(ROWS):
            for name, content in ((f"{row:05}.{kind}", encoded[row % DISTINCT]), (f"{row:05}.cls", str(row).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    for number, content in enumerate(encoded):
        (directory / "files" / f"{number}.{kind}").write_bytes(content)


# Unisono -------------------------------------------------------------------------------------------------------------


def _loader(folder: Path, kind: str, worker_kind: str, backend: str, workers: int = WORKERS) -> Batches:
    from benchmarks.audio_task import Recordings
    from unisono.config.batch_split import BatchSplit
    from unisono.data.loading.loader import Loader
    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan

    task = Recordings(str(folder / kind / "rows.arrow"), backend)
    source = task.data()
    plan = StreamPlan.create(Order(len(source), 0), BATCH, 100_000, None)
    split = BatchSplit.create(BATCH, 1, BATCH)
    loader = Loader(task, source, plan, split, 0, workers=workers, worker_kind=worker_kind, prefetch=2 * workers)
    for (batch,) in loader.steps():
        yield batch.arrays["features"]


def unisono(folder: Path, kind: str, workers: int = WORKERS) -> Batches:
    """The loader of a run, threads, the native core."""
    return _loader(folder, kind, "threads", "native", workers)


def unisono_numpy(folder: Path, kind: str) -> Batches:
    """The same without the native core: processes and NumPy."""
    return _loader(folder, kind, "processes", "numpy")


def decoding_alone(folder: Path, kind: str) -> Batches:
    """Nothing but decoding, by the core's own threads: what a loader cannot be faster than."""
    from unisono_audio import Pipeline

    pipeline = Pipeline(SETS[kind][0], SECONDS, None)
    records = _arrow(folder, kind)
    for first in itertools.cycle(range(0, ROWS, BATCH)):
        yield pipeline([records[first + row] for row in range(BATCH)], threads=WORKERS).values


# Peers ---------------------------------------------------------------------------------------------------------------


@cache
def _tables() -> tuple[Any, Any]:
    import torch

    from unisono_audio import Fbank

    plan = Fbank(BANDS, window_type="hanning").plan(RATE)
    return torch.from_numpy(plan.shape), torch.from_numpy(plan.banks)


def features(x: Any, rate: int) -> Any:
    """A clip's filter bank in torch, with cached tables; resampled by soxr."""
    import soxr
    import torch

    if rate != RATE:
        x = soxr.resample(x, rate, RATE, quality="HQ")
    shape, banks = _tables()
    frames = torch.from_numpy(np.ascontiguousarray(x[: int(SECONDS * RATE)])).unfold(0, 800, 320)
    frames = frames - frames.mean(1, keepdim=True)
    frames = (frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], 1)) * shape
    spectrum = torch.view_as_real(torch.fft.rfft(frames, 1024))
    energies = torch.log((spectrum.square().sum(-1) @ banks).clamp_min(1.1920929e-07))
    out = torch.full((FRAMES, BANDS), float(energies.min()))
    out[: len(energies)] = energies
    return (out - MEAN) / STD


def _sound(content: bytes) -> tuple[Any, int]:
    import soundfile

    x, rate = soundfile.read(io.BytesIO(content), dtype="float32")
    return x, rate


@cache
def _arrow(folder: Path, kind: str) -> Any:
    import pyarrow as pa

    table = pa.ipc.open_stream(pa.memory_map(str(folder / kind / "rows.arrow"))).read_all().combine_chunks()
    chunk = table["audio"].chunk(0).field("bytes")
    return [chunk[row].as_buffer() for row in range(len(chunk))]


class _Rows:
    """Map-style rows of the Arrow file."""

    def __init__(self, folder: Path, kind: str, decode: Callable[[bytes], Any]) -> None:
        self.folder, self.kind, self.decode = folder, kind, decode

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> Any:
        return self.decode(_arrow(self.folder, self.kind)[row].to_pybytes()), row


def _by_soundfile(content: bytes) -> Any:
    return features(*_sound(content))


def _by_torchcodec(content: bytes) -> Any:
    from torchcodec.decoders import AudioDecoder

    samples = AudioDecoder(content, sample_rate=RATE).get_all_samples()
    return features(samples.data[0].numpy(), RATE)


def _one_thread(_: int) -> None:
    import torch

    torch.set_num_threads(1)


def _data_loader(rows: Any) -> Batches:
    """Batches of random rows without end, so that no window measures the start of workers for a new epoch."""
    from torch.utils.data import DataLoader, RandomSampler

    sampler = RandomSampler(rows, replacement=True, num_samples=10**9)
    loader = DataLoader(rows, BATCH, sampler=sampler, num_workers=WORKERS, worker_init_fn=_one_thread)
    for batch in loader:
        yield batch[0] if isinstance(batch, list | tuple) else batch["features"]


def soundfile_soxr(folder: Path, kind: str) -> Batches:
    """The plain way: soundfile, soxr, a DataLoader."""
    return _data_loader(_Rows(folder, kind, _by_soundfile))


def torchcodec(folder: Path, kind: str) -> Batches:
    """Torchcodec decodes and resamples, in a DataLoader."""
    return _data_loader(_Rows(folder, kind, _by_torchcodec))


def _map_audio(record: Any) -> Any:
    batch_features = [features(decoder.get_all_samples().data[0].numpy(), RATE) for decoder in record["audio"]]
    return {"features": batch_features, "label": record["label"]}


def hf_datasets(folder: Path, kind: str) -> Batches:
    """`datasets` with its Audio feature, in a DataLoader."""
    import datasets

    rows = datasets.Dataset.from_parquet(str(folder / kind / "rows.parquet"), cache_dir=str(folder / "hf"))
    rows = rows.cast_column("audio", datasets.Audio(sampling_rate=RATE)).with_transform(_map_audio)
    return _data_loader(rows)


def grain(folder: Path, kind: str) -> Batches:
    """Grain with its reading threads."""
    import grain.python as pygrain
    import torch

    torch.set_num_threads(1)
    rows = pygrain.MapDataset.source(_Rows(folder, kind, _by_soundfile)).shuffle(0).repeat()
    read = pygrain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH)
    for batch in rows.to_iter_dataset(read).batch(BATCH):
        yield batch[0]


def _sample_of_tar(sample: Any) -> Any:
    content = sample.get("flac") or sample.get("ogg")
    return _by_soundfile(content), int(sample["cls"])


def webdataset(folder: Path, kind: str) -> Batches:
    """Webdataset in a DataLoader; the archive twice, for there are two workers."""
    import webdataset as wds

    path = str(folder / kind / "rows.tar")
    rows = wds.WebDataset([path, path], shardshuffle=2, resampled=True).shuffle(64).map(_sample_of_tar)
    from torch.utils.data import DataLoader

    for batch in DataLoader(rows.batched(BATCH), None, num_workers=WORKERS, worker_init_fn=_one_thread):
        yield batch[0]


def spdl(folder: Path, kind: str) -> Batches:
    """SPDL's pipeline with threads; its own decoding and resampling."""
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    torch.set_num_threads(1)
    rows = _Rows(folder, kind, bytes)

    def make(row: int) -> Any:
        frames = spdl.io.load_audio(
            rows[row][0], filter_desc=spdl.io.get_audio_filter_desc(sample_rate=RATE, sample_fmt="flt", num_channels=1)
        )
        return features(spdl.io.to_numpy(frames).reshape(-1), RATE)

    order = itertools.cycle(np.random.default_rng(0).permutation(ROWS).tolist())
    builder = PipelineBuilder().add_source(order).pipe(make, concurrency=WORKERS).aggregate(BATCH)
    pipeline = builder.pipe(lambda batch: torch.stack(batch)).add_sink(4).build(num_threads=WORKERS + 1)
    with pipeline.auto_stop():
        yield from pipeline


class _Cuts:
    """Rows by lhotse: its resampling and its own filter bank."""

    def __init__(self, folder: Path, kind: str) -> None:
        from lhotse import CutSet, Recording

        files = sorted((folder / kind / "files").iterdir())
        cuts = CutSet.from_cuts(Recording.from_file(path).to_cut() for path in files)
        self.cuts = list(cuts.resample(RATE) if SETS[kind][0] != RATE else cuts)

    def __len__(self) -> int:
        return ROWS

    @cache  # noqa: B019 - one a process
    def _fbank(self) -> Any:
        from lhotse import Fbank, FbankConfig

        return Fbank(FbankConfig(sampling_rate=RATE, num_filters=BANDS, frame_length=0.025, frame_shift=0.01))

    def __getitem__(self, row: int) -> Any:
        import torch

        cut_features = torch.from_numpy(self.cuts[row % len(self.cuts)].compute_features(self._fbank()))
        out = torch.full((FRAMES, BANDS), float(cut_features.min()))
        out[: len(cut_features)] = cut_features[:FRAMES]
        return (out - MEAN) / STD, row


def lhotse(folder: Path, kind: str) -> Batches:
    """Lhotse's cuts in a DataLoader."""
    return _data_loader(_Cuts(folder, kind))


LOADERS: dict[str, Callable[[Path, str], Batches]] = {
    "decoding alone": decoding_alone,
    "Unisono": unisono,
    "Unisono, NumPy": unisono_numpy,
    "torchcodec": torchcodec,
    "datasets": hf_datasets,
    "soundfile + soxr": soundfile_soxr,
    "grain": grain,
    "webdataset": webdataset,
    "SPDL": spdl,
    "lhotse": lhotse,
}
NEEDS = {"torchcodec": "torchcodec", "datasets": "datasets", "soundfile + soxr": "soxr", "SPDL": "spdl"}
