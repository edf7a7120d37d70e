"""Finds duplicate files, whose rows would silently count twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError

_END_BYTES = 1 << 16  # bytes at either end of a file
_CHUNK = 1 << 20
_HASH_THREADS = 16  # files hashed at a time


def refuse_duplicates(files: Iterable[File], key: str) -> None:
    """Raise if a file is listed twice, or has the same content as another.

    Text files are exempt, since identical documents are plausible. Only files of equal size are compared, and only
    those with equal ends are read completely.

    Raises:
        DataError: naming both.
    """
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise DataError(
                f"{key}: {file.path} is listed twice, so its rows would count twice; list it once, or allow duplicates "
                "(open_source(duplicates='allow'))"
            )
        seen.add(file.path)
    framed = sorted((f for f in files if f.format != "text" and f.size), key=lambda f: (f.format, f.size))
    groups = [list(group) for _, group in groupby(framed, key=lambda f: (f.format, f.size))]
    suspect = [file for group in groups if len(group) > 1 for file in group]
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="unisono-source") as pool:
        digests = dict(zip(suspect, pool.map(digest_ends, suspect), strict=True))
    alike: dict[bytes, list[File]] = {}
    for file in suspect:
        others = alike.setdefault(digests[file], [])
        for other in others:
            if _is_equal(other, file):
                raise DataError(
                    f"{key}: {file.path} has the same content as {other.path}, so its rows would count twice; remove "
                    "one, or allow duplicates (open_source(duplicates='allow'))"
                )
        others.append(file)


def digest_ends(file: File) -> bytes:
    """A digest of a file's size and both its ends; of the whole content, if it is small."""
    digest = hashlib.blake2b(f"{file.format} {file.size} ".encode(), digest_size=16)
    with wrap_read_errors(file):
        digest.update(file.range(0, min(_END_BYTES, file.size)))
        if file.size > _END_BYTES:
            digest.update(file.range(max(_END_BYTES, file.size - _END_BYTES), file.size))
    return digest.digest()


def _is_equal(one: File, other: File) -> bool:
    """Whether two files of equal size have the same content; stops reading at the first difference."""
    with wrap_read_errors(one), one.stream() as first, other.stream() as second:
        while chunk := first.read(_CHUNK):
            if chunk != second.read(len(chunk)):
                return False
    return True
