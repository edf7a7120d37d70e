"""A table that is mapped from a file is the same table, and nothing that is half-written or damaged is believed."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch
from scipy.sparse import csr_array

from recipes.microbiome.tests.made import TINY
from recipes.microbiome.tests.studies import COUNTS, METADATA, study, write_hdf5, write_json
from unisono.data.loading import ipc
from unisono.runtime.errors import DataError
from unisono.task import Context, GlobalBatch, SampleContext
from unisono_microbiome.settings import LossWeights, MicrobiomeConfig, ModelSettings
from unisono_microbiome.study import diversity, sparse, storage
from unisono_microbiome.study.library import Library, open_library
from unisono_microbiome.study.sparse import Blocks
from unisono_microbiome.study.storage import Storage
from unisono_microbiome.study.table import read_table
from unisono_microbiome.task import Microbiome

ENTRIES = int((COUNTS > 0).sum())


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row or two at a time, without a process for each file."""
    monkeypatch.setattr(sparse, "_BLOCK", 5)
    monkeypatch.setattr("unisono_microbiome.study.table.check_hdf5", lambda *_: None)


def is_mapped(matrix: csr_array) -> bool:
    """Whether the columns and the values of a matrix are those of a file, of which none can be changed."""
    owners = []
    for array in (matrix.indices, matrix.data):
        owner: Any = array
        while isinstance(owner, np.ndarray) and not isinstance(owner, np.memmap):
            owner = owner.base
        owners.append(owner is not None and not array.flags.writeable)
    assert len(set(owners)) == 1
    return owners[0]


def assert_equal(one: csr_array, other: csr_array) -> None:
    for name in ("indptr", "indices", "data"):
        mine, theirs = getattr(one, name), getattr(other, name)
        assert mine.dtype == theirs.dtype
        assert mine.tobytes() == theirs.tobytes()
    one.check_format(full_check=True)
    assert one.shape == other.shape


def list_entries(cache: Path) -> list[Path]:
    """The folders of a cache, half-written ones included."""
    return [found for found in cache.glob("microbiome/*") if found.is_dir()]


@pytest.mark.parametrize("write", [write_hdf5, write_json])
def test_a_mapped_table_is_the_table_in_memory(tmp_path: Path, write) -> None:
    path = write(tmp_path / "t.biom")
    one, other = read_table(path, Storage(True)), read_table(path, Storage(False, tmp_path))
    assert (is_mapped(one.counts), is_mapped(other.counts)) == (False, True)
    assert_equal(other.counts, one.counts)
    assert other.digest == one.digest
    assert other.depths.tolist() == COUNTS.sum(1).tolist()
    assert np.array_equal(diversity.shannon(other), diversity.shannon(one))
    samples, taxa = np.array([5, 2, 7, 0]), np.array([4, 0, 3])
    for found, wanted in (
        (other.select(samples, taxa), one.select(samples, taxa)),
        (other.select(np.arange(8)[::-1], np.arange(6)[::-1]), one.select(np.arange(8)[::-1], np.arange(6)[::-1])),
        (diversity.rarefy_once(other, 8), diversity.rarefy_once(one, 8)),
    ):
        assert (is_mapped(found.counts), is_mapped(wanted.counts)) == (True, False)
        assert (found.samples, found.taxa) == (wanted.samples, wanted.taxa)
        assert_equal(found.counts, wanted.counts)
    assert one.select(samples, taxa).counts.toarray().tolist() == COUNTS[samples][:, taxa].tolist()
    whole = one.select(np.arange(8)[::-1], np.arange(6)[::-1])
    assert whole.counts.toarray().tolist() == COUNTS[::-1, ::-1].tolist()


def test_a_table_is_mapped_where_it_would_take_more_than_half_of_the_memory(tmp_path: Path, monkeypatch) -> None:
    path, storage_ = write_hdf5(tmp_path / "t.biom"), Storage("auto", tmp_path)
    for available, mapped in ((ENTRIES * 12 * 2, False), (ENTRIES * 12 * 2 - 1, True)):
        monkeypatch.setattr(psutil, "virtual_memory", lambda there=available: SimpleNamespace(available=there))
        assert is_mapped(read_table(path, storage_).counts) == mapped
    few = np.array([3])
    assert not is_mapped(read_table(path, storage_).select(few, np.arange(6)).counts)  # its part fits again


def test_a_table_that_is_to_be_in_memory_and_does_not_fit_is_refused_unread() -> None:
    blocks = Blocks((1, 9), 1 << 45, "t", lambda: pytest.fail("was read"))
    with pytest.raises(
        DataError, match=r"35184372088832 entries, which need .* GB of memory.*set data\.in_memory=auto"
    ):
        Storage(True).keep(blocks, lambda: "t")


def test_a_table_without_an_entry_is_mapped(tmp_path: Path) -> None:
    found = read_table(write_hdf5(tmp_path / "t.biom", np.zeros_like(COUNTS)), Storage(False, tmp_path))
    assert found.counts.toarray().tolist() == np.zeros_like(COUNTS).tolist()


def test_blocks_of_rows_end_where_the_starts_end_of_32_bits(monkeypatch) -> None:
    monkeypatch.setattr(sparse, "_BLOCK", 1 << 20)
    starts = np.array([0, 2**31 - 5, 2**31 - 3, 2**31 - 1, 2**31 - 1], dtype=np.int32)
    assert list(sparse.split_rows(starts)) == [(0, 1), (1, 4)]


# a run ------------------------------------------------------------------------------------------------------------


def make_task(folder: Path, in_memory: bool, **settings: Any) -> Microbiome:
    data = study(
        folder, in_memory=in_memory, target="age", group="subject", leave_out=["shallow"], rarefy=13, **settings
    )
    weights = LossWeights(distance=1.0, counts=2.0, faith_pd=0.5, shannon=0.25, target=1.5)
    model = ModelSettings(**{**TINY, "encoder": "taxon"})
    return Microbiome(MicrobiomeConfig(weights=weights), model=model, data=data)


def step(made: Microbiome) -> tuple[dict[str, Any], float, list[torch.Tensor]]:
    """A batch, its loss and the gradients."""
    source = made.data()
    rows = [made.sample(source[row], SampleContext(np.random.default_rng(row), True)) for row in range(len(source))]
    batch = made.collate(rows)
    torch.manual_seed(0)
    network = made.build()
    given = {name: torch.as_tensor(value) for name, value in batch.items()}
    outputs = made.outputs(network, given, Context(0, True))
    everyone = GlobalBatch(outputs, made.shared(given), 0)
    loss = made.loss(outputs, given, Context(0, True, global_batch=everyone))
    total = sum(loss.weights[name] * value for name, value in loss.sums.items())
    total.backward()
    return batch, total.item(), [p.grad for p in network.parameters() if p.grad is not None]


def test_rows_batches_and_a_step_are_the_same_bits_from_memory_and_from_a_file(tmp_path: Path) -> None:
    """Samples are left out, so what is trained on is a selection; distances are of rarefied reads, another table."""
    one, other = (
        make_task(tmp_path / str(kept), kept, distances_of="rarefied", held_out=0.0) for kept in (True, False)
    )
    libraries: list[Library] = [one.library, other.library]
    assert [is_mapped(library.counts) for library in libraries] == [False, True]
    assert [is_mapped(library.rarefied_table.counts) for library in libraries] == [False, True]
    assert 0 < len(libraries[0]) < len(COUNTS)
    for number in range(len(libraries[0])):
        mine, theirs = (library[number] for library in libraries)
        assert (mine.name, mine.target) == (theirs.name, theirs.target)
        for name in ("taxa", "counts"):
            assert getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()
        theirs.counts[:] = 0  # the caller's own
    for value in ("fingerprint", "lengths"):
        assert np.array_equal(*(getattr(library, value) for library in libraries))
    assert libraries[0].facts() == libraries[1].facts()
    assert np.array_equal(*(library.distances() for library in libraries))
    (batch, loss, gradients), (batch_, loss_, gradients_) = step(one), step(other)
    assert batch.keys() == batch_.keys()
    assert all(batch[name].tobytes() == batch_[name].tobytes() for name in batch)
    assert loss == loss_
    assert loss > 0
    assert len(gradients) == len(gradients_) > 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients, gradients_, strict=True))


def test_workers_map_the_file_instead_of_receiving_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(ipc, "_REMAP_LIMIT", 0)
    counts = open_library(study(tmp_path, in_memory=False, metadata=METADATA)).counts
    for array in (counts.indices, counts.data):
        map_file, arguments = ipc._reduce_mapped(array)
        again = map_file(*arguments)
        assert again.tobytes() == array.tobytes()
        assert not again.flags.writeable


# what is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("name", "places", "value", "told"),
    [
        ("indptr", (0, 3, 8), -1, "damaged or forged"),
        ("indptr", (0, 8), 5, "damaged or forged"),
        ("indices", (0, 9, ENTRIES - 1), 6, "damaged or forged"),
        ("indices", (0, 9, ENTRIES - 1), -1, "damaged or forged"),
        ("indices", (1,), 0, "in a place that has one already"),
        ("data", (0, 9, ENTRIES - 1), 0.5, "not whole numbers"),
        ("data", (0, ENTRIES - 1), float("nan"), "not finite"),
        ("data", (4,), -3.0, "below 0"),
    ],
)
def test_a_damaged_table_is_refused_in_memory_and_from_a_file(
    tmp_path: Path, in_memory: bool, name: str, places: tuple[int, ...], value: float, told: str
) -> None:
    for place in places:
        path = write_hdf5(tmp_path / "t.biom")
        with h5py.File(path, "r+") as file:
            file[f"sample/matrix/{name}"][place] = value
        with pytest.raises(DataError, match=told):
            read_table(path, Storage(in_memory, tmp_path / "cache"))
    assert not list_entries(tmp_path / "cache")


def test_an_error_of_a_file_that_is_read_is_none_of_the_cache(tmp_path: Path, monkeypatch) -> None:
    path = write_hdf5(tmp_path / "t.biom")
    monkeypatch.setattr(sparse, "from_compressed", lambda *_: (_ for _ in ()).throw(OSError("wrong checksum")))
    for in_memory in (True, False):
        with pytest.raises(DataError, match=r"t\.biom \(data\.table\) is not a readable BIOM table .*wrong checksum"):
            read_table(path, Storage(in_memory, tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["cut", "column", "order", "starts", "zero", "type"])
def test_kept_entries_that_were_damaged_are_written_again(tmp_path: Path, damage: str) -> None:
    path, kept = write_hdf5(tmp_path / "t.biom"), Storage(False, tmp_path / "cache")
    wanted = read_table(path, Storage(True)).counts
    read_table(path, kept)
    (entry,) = list_entries(tmp_path / "cache")
    place = entry / {"starts": "indptr.npy", "zero": "data.npy", "cut": "data.npy"}.get(damage, "indices.npy")
    if damage == "cut":
        place.write_bytes(place.read_bytes()[:-8])
    else:
        array = np.load(place)
        if damage == "type":
            array = array.astype(np.int64)
        elif damage == "order":
            array[[0, 1]] = array[[1, 0]]
        else:
            array[2] = {"column": 6, "starts": 0, "zero": 0}[damage]
        np.save(place, array)
    assert_equal(read_table(path, kept).counts, wanted)


def test_a_full_disk_is_told_before_and_while_it_is_written(tmp_path: Path, monkeypatch) -> None:
    path, kept = write_hdf5(tmp_path / "t.biom"), Storage(False, tmp_path / "cache")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(
            DataError, match=rf"{ENTRIES} entries, which need .* GB in the cache .*cache, but .*data\.cache"
        ):
            read_table(path, kept)
    with monkeypatch.context() as full:
        parts: list[int] = []

        def append(file: Any, part: Any) -> None:
            parts.append(len(part))
            if len(parts) > 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(storage._ArrayFile, "append", append)
        with pytest.raises(DataError, match=r"cache .*cannot be used \(No space left on device\); set data\.cache"):
            read_table(path, kept)
    assert not list_entries(tmp_path / "cache")
    assert read_table(path, kept).counts.toarray().tolist() == COUNTS.tolist()


def test_a_table_that_changes_while_it_is_read_is_not_kept(tmp_path: Path, monkeypatch) -> None:
    path, kept = write_hdf5(tmp_path / "t.biom"), Storage(False, tmp_path / "cache")
    written = storage._write

    def write(blocks: Blocks, folder: Path) -> None:
        written(blocks, folder)
        with path.open("ab") as file:
            file.write(b"more")

    monkeypatch.setattr(storage, "_write", write)
    with pytest.raises(DataError, match=r"t\.biom \(data\.table\) changed while it was read"):
        read_table(path, kept)
    assert not list_entries(tmp_path / "cache")


_KILLED = """
import os, signal, sys
from pathlib import Path
from unisono_microbiome.study import sparse, storage
from unisono_microbiome.study.table import read_table
sparse._BLOCK, append, parts = 5, storage._ArrayFile.append, []
def kill(file, part):
    append(file, part)
    parts.append(part)
    if len(parts) == 5:
        file._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
storage._ArrayFile.append = kill
read_table(Path(sys.argv[1]), storage.Storage(False, Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_what_a_killed_process_has_begun_to_write_is_not_believed(tmp_path: Path) -> None:
    path, cache = write_hdf5(tmp_path / "t.biom"), tmp_path / "cache"
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(path), str(cache)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (begun,) = (cache / "microbiome").glob("*.writing")
    assert (begun / "indices.npy").stat().st_size > 128
    found = read_table(path, Storage(False, cache)).counts
    assert is_mapped(found)
    assert found.toarray().tolist() == COUNTS.tolist()
