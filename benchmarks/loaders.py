r"""Loaders of one data set, each as its library's guide would have it, for `benchmarks.loader` and `benchmarks.resume`.

The data are rows of token ids in Parquet shards and the same in an Arrow file. A sample is made by one and the same
function, `light` (cut, cast) or `heavy` (a loop over the tokens in Python, with random draws); a batch is two arrays of
`BATCH` rows. All have `WORKERS` workers. What is not installed is left out:

    pip install --target PEERS --no-deps grain torchdata==0.11.0 array_record absl-py etils cloudpickle \
        ml_collections dm-tree importlib_resources attrs wrapt protobuf more_itertools zipp portpicker
    PYTHONPATH=PEERS:src python -m benchmarks.loader
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, SHARDS, VOCABULARY = 32768, 1024, 8, 50_000
BATCH, WORKERS, SEED = 32, 2, 0
Batches = Iterator[Any]


def generate(folder: Path) -> None:
    """Write the data set."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(SEED)
    tokens = rng.integers(VOCABULARY, size=(ROWS, LENGTH + 1), dtype=np.int32)
    tokens[:, 0] = np.arange(ROWS)
    table = pa.table({"ids": pa.FixedSizeListArray.from_arrays(tokens.ravel(), LENGTH + 1).cast(pa.list_(pa.int32()))})
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    for shard in range(SHARDS):
        part = table.slice(shard * ROWS // SHARDS, ROWS // SHARDS)
        pq.write_table(part, folder / f"rows-{shard}.parquet", row_group_size=1000)


class Rows:
    """The Arrow file, mapped: what any map-style loader can read."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / "rows.arrow")
        self._open()

    def _open(self) -> None:
        import pyarrow as pa

        table = pa.ipc.open_file(pa.memory_map(self._path)).read_all()
        self._chunks = [chunk.values.to_numpy() for chunk in table["ids"].chunks]
        self._offsets = [chunk.offsets.to_numpy() for chunk in table["ids"].chunks]

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self._path = path
        self._open()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> np.ndarray:
        chunk, offset = divmod(int(row), 1000)
        offsets = self._offsets[chunk]
        return self._chunks[chunk][offsets[offset] : offsets[offset + 1]]


def light(ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs and targets."""
    ids = np.asarray(ids).astype(np.int64)
    return {"inputs": ids[:-1], "targets": ids[1:]}


def heavy(ids: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Spans of tokens masked, token by token in Python."""
    inputs, targets, left = [], [], 0
    starts = (rng.random(LENGTH) < 0.05).tolist()
    for token, start in zip(np.asarray(ids)[:-1].tolist(), starts, strict=True):
        left = 3 if start else max(0, left - 1)
        inputs.append(VOCABULARY if left else token)
        targets.append(token if left else -100)
    return {"inputs": np.array(inputs, dtype=np.int64), "targets": np.array(targets, dtype=np.int64)}


WORK = {"light": light, "heavy": heavy}


def stack(samples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """A batch."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _stack_tensors(samples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in stack(samples).items()}


def _generator() -> np.random.Generator:
    """What a worker of a loader without keyed draws has: one for all its samples."""
    global _GENERATOR
    if _GENERATOR is None:
        _GENERATOR = np.random.default_rng()
    return _GENERATOR


_GENERATOR: np.random.Generator | None = None

# ours -----------------------------------------------------------------------------------------------------------------


def _task(work: str) -> Any:
    from unisono.task import SampleContext, Task

    class Peer(Task):
        def data(self) -> Any: ...

        def sample(self, record: Any, context: SampleContext) -> Any:
            return WORK[work](record, context.rng)

        def collate(self, samples: Any) -> Any:
            return stack(samples)

        def counts(self, batch: Any) -> dict[str, float]:
            return {"token": float(batch["targets"].size)}

        def build(self) -> Any: ...

        outputs = loss = build

    Peer.__qualname__ = f"Peer_{work}"
    Peer.__module__ = __name__
    return Peer


def __getattr__(name: str) -> Any:
    """Our tasks, made when they are asked for: peers' processes should not import Unisono."""
    if not name.startswith("Peer_"):
        raise AttributeError(name)
    globals()[name] = _task(name.removeprefix("Peer_"))
    return globals()[name]


def unisono(kind: str, folder: Path, work: str, skip: int = 0, epochs: float = 1.0) -> Batches:
    """Our loader, with everything the ledger needs."""
    import benchmarks.loaders as here
    from unisono.config.batch_split import BatchSplit
    from unisono.data.loading.loader import Loader
    from unisono.data.order.order import Order
    from unisono.data.order.plan import StreamPlan

    task, source = getattr(here, f"Peer_{work}")(), Rows(folder)
    plan = StreamPlan.create(Order(ROWS, SEED), BATCH, None, epochs)
    loader = Loader(
        task, source, plan, BatchSplit.create(BATCH, 1, BATCH), 0, workers=WORKERS, worker_kind=kind, contents=True
    )
    try:
        for (micro,) in loader.steps(skip):
            yield micro.arrays
    finally:
        loader.close()


# peers ----------------------------------------------------------------------------------------------------------------


class MapStyle:
    """A map-style data set of torch."""

    def __init__(self, folder: Path, work: str) -> None:
        self._rows, self._work = Rows(folder), work

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return WORK[self._work](self._rows[row], _generator())


def _all_of(work: str, rows: dict[str, Any]) -> dict[str, Any]:
    samples = [WORK[work](ids, _generator()) for ids in rows["ids"]]
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def _of_one(work: str, row: dict[str, Any]) -> dict[str, Any]:
    return WORK[work](row["ids"], _generator())


def datasets_map(folder: Path, work: str) -> Any:
    """Hugging Face datasets, map-style, in torch's DataLoader."""
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader

    data = Dataset.from_parquet(
        [str(folder / f"rows-{n}.parquet") for n in range(SHARDS)], cache_dir=str(folder / "cache")
    )
    data = data.with_format("numpy")
    shuffle = torch.Generator().manual_seed(SEED)
    return DataLoader(
        _Transformed(data, work), BATCH, shuffle=True, num_workers=WORKERS, collate_fn=_stack_tensors, generator=shuffle
    )


class _Transformed:
    """Rows of a Hugging Face data set, fetched a batch at a time as its DataLoader integration does."""

    def __init__(self, data: Any, work: str) -> None:
        self._data, self._work = data, work

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, rows: list[int]) -> list[dict[str, np.ndarray]]:
        return [WORK[self._work](ids, _generator()) for ids in self._data[rows]["ids"]]


def _streamed(folder: Path, work: str) -> Any:
    from datasets import load_dataset

    files = [str(folder / f"rows-{n}.parquet") for n in range(SHARDS)]
    data = load_dataset("parquet", data_files=files, streaming=True, split="train", cache_dir=str(folder / "cache"))
    data = data.with_format("numpy").shuffle(seed=SEED, buffer_size=1000)
    return data.map(partial(_of_one, work), remove_columns=["ids"])


def datasets_streaming(folder: Path, work: str) -> Any:
    """Hugging Face datasets, streaming, in torch's DataLoader."""
    from torch.utils.data import DataLoader

    return DataLoader(_streamed(folder, work), BATCH, num_workers=WORKERS, collate_fn=_stack_tensors)


def stateful(folder: Path, work: str) -> Any:
    """The StatefulDataLoader of torchdata over a map-style data set."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    shuffle = torch.Generator().manual_seed(SEED)
    data = MapStyle(folder, work)
    return StatefulDataLoader(
        data, BATCH, shuffle=True, num_workers=WORKERS, collate_fn=_stack_tensors, generator=shuffle
    )


def stateful_streaming(folder: Path, work: str) -> Any:
    """The StatefulDataLoader of torchdata over a streaming Hugging Face data set, which has a state of its own."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(_streamed(folder, work), BATCH, num_workers=WORKERS, collate_fn=_stack_tensors)


class _Work:
    """A transformation of grain that gets a generator."""

    def __init__(self, work: str) -> None:
        self._work = work

    def __call__(self, ids: Any, rng: np.random.Generator) -> Any:
        return WORK[self._work](ids, rng)


def grain(kind: str, folder: Path, work: str) -> Any:
    """A data set of grain of a random-access source; threads read ahead, or processes make batches."""
    import grain as library

    data = library.MapDataset.source(Rows(folder)).seed(SEED).shuffle().random_map(_Work(work)).batch(BATCH)
    if kind == "threads":
        return data.to_iter_dataset(library.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=4))
    options = library.multiprocessing.MultiprocessingOptions(num_workers=WORKERS, per_worker_buffer_size=2)
    return data.to_iter_dataset(library.ReadOptions(num_threads=1, prefetch_buffer_size=1)).mp_prefetch(options)


def plainly(make: Callable[[Path, str], Any], folder: Path, work: str) -> Batches:
    """What a loader that begins at its beginning gives."""
    return iter(make(folder, work))


CONTENDERS: dict[str, tuple[str, Callable[[Path, str], Batches]]] = {
    "Unisono, threads": ("unisono", partial(unisono, "threads")),
    "Unisono, threads, again": ("unisono", partial(unisono, "threads")),
    "Unisono, processes": ("unisono", partial(unisono, "processes")),
    "datasets, map-style + DataLoader": ("datasets", partial(plainly, datasets_map)),
    "datasets, streaming + DataLoader": ("datasets", partial(plainly, datasets_streaming)),
    "torchdata StatefulDataLoader": ("torchdata", partial(plainly, stateful)),
    "grain, threads": ("grain", partial(plainly, partial(grain, "threads"))),
    "grain, processes": ("grain", partial(plainly, partial(grain, "processes"))),
}


def installed(package: str) -> bool:
    """Whether a contender can take part."""
    return find_spec(package) is not None


def checked(batches: Batches, work: str) -> Batches:
    """The same batches, of which the first is what it should be: whole rows, none twice."""
    first = {name: np.asarray(array) for name, array in next(batches).items()}
    assert first["inputs"].shape == first["targets"].shape == (BATCH, LENGTH)
    if work == "light":
        assert (first["inputs"][:, 1:] == first["targets"][:, :-1]).all()
        assert len(np.unique(first["inputs"][:, 0])) == BATCH
    else:
        assert 0 < (first["targets"] != -100).mean() < 1
    return itertools.chain([first], batches)
