"""Opens zip archives of others, .npz among them, unless they unpack to far more than they have bytes."""

from __future__ import annotations

import os
from io import BufferedReader
from typing import TYPE_CHECKING, Any

from unisono.runtime.errors import DataError, find_duplicates, format_examples

if TYPE_CHECKING:
    from zipfile import ZipFile

_FREE, _RATIO = 1 << 30, 200  # bytes that an archive may always have, and per byte of the file


def open_archive(file: BufferedReader) -> ZipFile:
    """Open a zip archive, as .npz and .qza are, unless its members unpack to far more than it has bytes.

    `zipfile` reads no more of a member than its entry says, so what they say together is a bound.

    Raises:
        DataError: If they are too large.
        ValueError: If two have the same name.
        BadZipFile: If it is no archive.
    """
    from zipfile import ZipFile

    archive, size = ZipFile(file), os.fstat(file.fileno()).st_size
    if doubles := find_duplicates([member.filename for member in archive.infolist()]):
        raise ValueError(f"it has two files {format_examples(doubles)}, of which readers take either; write it again")
    unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > max(_FREE, _RATIO * size):
        raise DataError(
            f"it unpacks to {unpacked / 1e9:.1f} GB, more than {_RATIO} times its {size} bytes and than "
            f"{_FREE >> 30} GiB. It was not read; if it is intended, unpack it yourself"
        )
    return archive


def load_arrays(file: BufferedReader) -> dict[str, Any]:
    """Read the arrays of an open file of NumPy's format .npz, within the limits of `open_archive`.

    Raises:
        ValueError: If it is no such file, or holds Python objects.
        DataError: As for `open_archive`.
    """
    import numpy as np

    names = [name.removesuffix(".npy") for name in open_archive(file).namelist()]
    if doubles := find_duplicates(names):  # NumPy takes `a` for `a.npy`
        raise ValueError(f"it has two arrays {format_examples(doubles)}; write it again")
    file.seek(0)
    with np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}
