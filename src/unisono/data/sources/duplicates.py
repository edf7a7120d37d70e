"""Files that are there twice: their rows would be, too, and nothing in a run would say so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

from unisono.data.sources.storage import File, reading
from unisono.runtime.errors import DataError

_ENDS = 1 << 16  # bytes at either end of a file
_CHUNK = 1 << 20
_AT_ONCE = 16  # files that are looked at together


def refuse(files: Iterable[File], key: str) -> None:
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
                f"{key}: {file.path} is there twice, so its rows would be, too; name it once, or allow duplicates "
                "(open_source(duplicates='allow'))"
            )
        seen.add(file.path)
    framed = sorted((f for f in files if f.format != "text" and f.size), key=lambda f: (f.format, f.size))
    groups = [list(group) for _, group in groupby(framed, key=lambda f: (f.format, f.size))]
    suspect = [file for group in groups if len(group) > 1 for file in group]
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="unisono-source") as pool:
        digests = dict(zip(suspect, pool.map(ends, suspect), strict=True))
    alike: dict[bytes, list[File]] = {}
    for file in suspect:
        others = alike.setdefault(digests[file], [])
        for other in others:
            if _equal(other, file):
                raise DataError(
                    f"{key}: {file.path} has the content of {other.path}, so their rows would be there twice; remove "
                    "one, or allow duplicates (open_source(duplicates='allow'))"
                )
        others.append(file)


def ends(file: File) -> bytes:
    """A digest of a file's size and of what stands at both of its ends; of all of it, if it is small."""
    digest = hashlib.blake2b(f"{file.format} {file.size} ".encode(), digest_size=16)
    with reading(file):
        digest.update(file.range(0, min(_ENDS, file.size)))
        if file.size > _ENDS:
            digest.update(file.range(max(_ENDS, file.size - _ENDS), file.size))
    return digest.digest()


def _equal(one: File, other: File) -> bool:
    """Whether two files of one size hold the same, read as far as they do."""
    with reading(one), one.stream() as first, other.stream() as second:
        while chunk := first.read(_CHUNK):
            if chunk != second.read(len(chunk)):
                return False
    return True
