"""Finds duplicate files: their rows would count twice, and nothing in a run would show it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from unisono.data.sources.storage import File, wrap_read_errors
from unisono.runtime.errors import DataError

_END_BYTES = 1 << 16  # bytes at either end of a file
_CHUNK = 1 << 20
_HASH_THREADS = 16  # files that are looked at together


def refuse_duplicates(files: Iterable[File], key: str) -> None:
    """Refuse a file that is named twice, and one with the content of another.

    Text files that are one document may well be alike. Only files of one size can be copies, and only of those whose
    ends are the same is more read than these.

    Raises:
        DataError: naming both.
    """
    seen: set[str] = set()
    for file in files:
        if file.path in seen:
            raise DataError(
                f"{key}: {file.path} is named twice, so its rows would count twice; name it once, or allow duplicates "
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
    """A digest of a file's size and of what stands at both of its ends; of all of it, if it is small."""
    digest = hashlib.blake2b(f"{file.format} {file.size} ".encode(), digest_size=16)
    with wrap_read_errors(file):
        digest.update(file.range(0, min(_END_BYTES, file.size)))
        if file.size > _END_BYTES:
            digest.update(file.range(max(_END_BYTES, file.size - _END_BYTES), file.size))
    return digest.digest()


def _is_equal(one: File, other: File) -> bool:
    """Whether two files of one size hold the same, read as far as they do."""
    with wrap_read_errors(one), one.stream() as first, other.stream() as second:
        while chunk := first.read(_CHUNK):
            if chunk != second.read(len(chunk)):
                return False
    return True
