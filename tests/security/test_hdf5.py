"""An HDF5 file reads no other file, and takes no memory or time that its size does not warrant."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unisono.runtime.errors import DataError, UnisonoError
from unisono.runtime.untrusted.hdf5 import check_hdf5
from unisono_microbiome.study import table
from unisono_microbiome.study.matrices import Matrix

h5py = pytest.importorskip("h5py")
biom = pytest.importorskip("biom")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of another user, with an array in it."""
    path = tmp_path / "secret.h5"
    with h5py.File(path, "w") as file:
        file["ids"] = np.zeros((2, 2))
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    return path


def _harm(file: Any, how: str, secret: Path) -> None:
    if how == "link":
        file["more"] = h5py.ExternalLink(str(secret), "/ids")
    elif how == "storage":
        file.create_dataset("more", (8,), "f8", external=[(str(secret.with_suffix(".bin")), 0, 64)])
    elif how == "view":
        layout = h5py.VirtualLayout((2, 2), "f8")
        layout[:] = h5py.VirtualSource(str(secret), "ids", (2, 2))
        file.create_virtual_dataset("more", layout)
    elif how == "size":
        file.create_dataset("more", (1 << 40,), "f8", chunks=(1 << 10,))


@pytest.mark.parametrize(
    ("how", "why"),
    [("link", "is a link to another file"), ("storage", "in other files"), ("view", "in other files"),
     ("size", "cannot hold")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["table", "matrix"])
def test_a_file_that_reads_others_is_refused(tmp_path: Path, secret: Path, how: str, why: str, kind: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        if kind == "table":
            biom.Table(np.array([[1, 2], [0, 3]]), ["t1", "t2"], ["s1", "s2"]).to_hdf5(file, "test")
        else:
            file["jaccard"] = np.array([[0.0, 0.5], [0.5, 0.0]])

    def read() -> object:
        return table.read_table(path) if kind == "table" else Matrix(path, "jaccard", "jaccard").values

    read()
    with h5py.File(path, "a") as file:
        _harm(file.create_group("inner"), how, secret)
    with pytest.raises(UnisonoError, match=why):
        read()


def test_a_string_that_claims_gigabytes_is_refused(tmp_path: Path) -> None:
    """HDF5's library allocates and clears what a string claims, for a minute, before it looks whether that is there."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["ids"] = np.array(["sample-one", "sample-two"], dtype=h5py.string_dtype())
    check_hdf5(path)
    content = path.read_bytes()
    heap = content.index(b"GCOL")
    first = struct.pack("<IQI", len("sample-one"), heap, 1)  # length, address of the heap, number in it
    assert content.count(first) == 1
    path.write_bytes(content.replace(first, struct.pack("<IQI", 2**32 - 1, heap, 1)))
    with pytest.raises(DataError, match=r"a\.h5 cannot be read .*; it is damaged or forged"):
        check_hdf5(path)


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["jaccard"] = np.zeros((40, 40))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"a\.h5 cannot be read as HDF5 \(.*truncated file"):
        check_hdf5(path)
