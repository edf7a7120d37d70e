"""Access to a run's objects in any store that fsspec supports, with a deadline for every response.

A store has no rename and its listings may be outdated, so nothing here relies on a listing alone. Uploads are read back
and hashed: that costs a download, but is the only check that works on every store. (S3's entity tags are MD5 hashes of
parts, and not even that under server-side encryption; checksums in an object's metadata only say what the sender
computed.)
"""

from __future__ import annotations

import contextlib
import hashlib
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from unisono.runtime.errors import DataError
from unisono.runtime.files import file_hash, fsync_path
from unisono.runtime.remote import DEADLINE, PIECE_BYTES, RemoteOptions, ask_remote, remote_options
from unisono.runtime.untrusted import safe_paths, safe_writing

T = TypeVar("T")
LARGEST = 256 << 20  # limit for objects that are read into memory, such as manifests
_MAX_PARTS = 9_000  # of one object; S3 allows 10,000
# Protocols without directories: creating one would create a bucket.
_FLAT_PROTOCOLS = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "oci", "ocilake", "tos", "r2", "memory"}
)


class ObjectError(DataError):
    """An object is missing or damaged; the store itself works."""


@dataclass(frozen=True)
class ObjectStore:
    """The prefix of one run in a store.

    Attributes:
        url: of the prefix, without a trailing slash.
        where: options of its file system, and the deadline of a response.
    """

    url: str
    where: RemoteOptions = field(default_factory=RemoteOptions)

    @classmethod
    def for_run(
        cls, url: str, name: str, given: dict[str, Any] | None = None, deadline: float = DEADLINE
    ) -> ObjectStore:
        """The store of a run below the URL for all runs."""
        return cls(f"{url.rstrip('/')}/{name}", remote_options(given, deadline))

    def url_of(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}"

    def get(self, name: str) -> bytes | None:
        """The content of a small object, or None if it does not exist; a large or damaged one is an `ObjectError`."""
        size = self.size(name)
        if size is None:
            return None
        if size > LARGEST:
            raise ObjectError(f"{self.url_of(name)} has {size} bytes; at most {LARGEST} are allowed for such an object")
        try:
            content: bytes = self._request(name, lambda system, path: system.cat_file(path))
        except FileNotFoundError:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Write a small object in one request: it is replaced completely or not at all."""
        self._request(
            name, lambda system, path: _write_with_folder(system, path, lambda: system.pipe_file(path, content)), "w"
        )

    def create(self, name: str, content: bytes) -> bool:
        """Write a small object unless it exists; returns False if it does. Some stores cannot check this."""

        def write(system: Any, path: str) -> bool:
            try:
                _write_with_folder(system, path, lambda: system.pipe_file(path, content, mode="create"))
            except FileExistsError:
                return False
            except OSError as error:
                if "precondition" in str(error).lower().replace("-", ""):  # S3's error
                    return False
                raise
            return True

        return self._request(name, write, "w")

    def size(self, name: str) -> int | None:
        """Size of an object in bytes, or None if it does not exist."""

        def ask(system: Any, path: str) -> int:
            system.invalidate_cache()  # an earlier listing may be outdated
            return int(system.info(path)["size"])

        try:
            return self._request(name, ask)
        except FileNotFoundError:
            return None

    def read(self, name: str, first: int, last: int) -> bytes:
        """Bytes `first..last-1` of an object."""
        content: bytes = self._request(name, lambda system, path: system.cat_file(path, start=first, end=last))
        return content

    def sha256(self, name: str, size: int, to: Callable[[bytes], Any] | None = None) -> str | None:
        """The hash of an object's content, read in pieces; None if it is missing or has another size.

        Args:
            name: of the object.
            size: expected size in bytes.
            to: called with every piece.
        """
        if self.size(name) != size:
            return None
        digest = hashlib.sha256()
        for first in range(0, size, PIECE_BYTES):
            try:
                content = self.read(name, first, min(first + PIECE_BYTES, size))
            except (FileNotFoundError, ObjectError):  # removed in the meantime, or found to be damaged on the way
                return None
            digest.update(content)
            if to is not None:
                to(content)
        return digest.hexdigest()

    def send(self, name: str, file: Path, sent: Callable[[int], None] = lambda _: None) -> None:
        """Write a file of any size, a large one in parts; a failure leaves no object and no parts.

        Args:
            name: of the object.
            file: its content.
            sent: called with the number of bytes of every part.
        """
        block = max(PIECE_BYTES, -(-file.stat().st_size // _MAX_PARTS))

        def begin(system: Any, path: str) -> Any:
            return _write_with_folder(system, path, lambda: system.open(path, "wb", block_size=block))

        def write(content: bytes) -> None:
            self._request(name, lambda *_: stream.write(content), "w")

        stream = self._request(name, begin, "w")
        try:
            with safe_paths.open_regular(file) as source:
                while content := source.read(block):
                    write(content)
                    sent(len(content))
            self._request(name, lambda *_: stream.close(), "w")
        except BaseException:
            with contextlib.suppress(Exception):  # the original error matters more; leftover parts are aborted later
                self._request(name, lambda *_: stream.discard(), "w")
            stream.closed = True  # otherwise garbage collection would complete the upload
            raise

    def fetch(self, name: str, file: Path, size: int, sha256: str) -> None:
        """Download an object to a file, unless the file already has the right content.

        Raises:
            ObjectError: if it is missing or damaged.
        """
        if file.is_file() and file.stat().st_size == size and file_hash(file) == sha256:
            return
        with safe_writing.open_to_change(file.parent, file.name) as target:
            target.truncate()
            found = self.sha256(name, size, target.write)
        if found != sha256:
            file.unlink()
            raise ObjectError(f"{self.url_of(name)} {self.describe_fault(name, size)}")
        fsync_path(file)

    def describe_fault(self, name: str, size: int) -> str:
        """What is wrong with a damaged object."""
        found = self.size(name)
        if found is None:
            return "is missing"
        if found != size:
            return f"is damaged: it has {found} bytes instead of {size}"
        return "is damaged: its content is not what was written"

    def names(self, folder: str) -> list[str]:
        """The store's listing of a folder, as last parts of names; it may be outdated or empty."""

        def ask(system: Any, path: str) -> list[str]:
            system.invalidate_cache()
            found: list[str] = system.ls(path, detail=False)
            return found

        try:
            return sorted({path.rstrip("/").rpartition("/")[2] for path in self._request(folder, ask)} - {""})
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """Remove an object if it exists, and its folder if that is empty and the store has folders."""

        def ask(system: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(path)
            if not _is_flat(system):
                with contextlib.suppress(OSError):
                    system.rmdir(path.rpartition("/")[0])

        self._request(name, ask, "removed")

    def abort_parts(self) -> int:
        """Abort multipart uploads that this run left behind; S3 keeps (and bills) their parts."""

        def ask(system: Any, path: str) -> int:
            if not hasattr(system, "abort_mpu"):
                return 0
            bucket, key, _ = system.split_path(path)
            left = system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/").get("Uploads", [])
            for each in left:
                system.abort_mpu(bucket, each["Key"], each["UploadId"])
            return len(left)

        return ask_remote(self.url, self.where, ask, "written")

    def _request(self, name: str, ask: Callable[[Any, str], T], done: str = "read") -> T:
        def ask_safely(system: Any, path: str) -> T:
            _refuse_links(system, path, name)
            return ask(system, path)

        try:
            return ask_remote(self.url_of(name), self.where, ask_safely, "written" if done == "w" else done)
        except DataError as error:
            if type(error.__cause__).__name__ != "FlexibleChecksumError":  # S3's own, which botocore compares
                raise
            raise ObjectError(f"{self.url_of(name)} is damaged: its content is not what was written") from error


def _refuse_links(system: Any, path: str, name: str) -> None:
    """Refuse an object that is, or lies behind, a link or a pipe, in a store that is a folder which others may write.

    Raises:
        DataError: Naming it.
    """
    if "file" not in _protocols(system):
        return
    for place in (Path(path), *list(Path(path).parents)[: len(name.split("/"))]):  # up to the run's own folder
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            mode = place.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise DataError(
                    f"{place} is {safe_paths.describe_kind(mode)}, and a store's objects are files in its own folder. "
                    "It was neither read nor written; move it away, or choose another checkpoint.upload.url"
                )


def _write_with_folder(system: Any, path: str, write: Callable[[], T]) -> T:
    """Write; create the folder first if it is missing and the store has folders."""
    try:
        return write()
    except FileNotFoundError:
        if _is_flat(system):
            raise
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        return write()


def _is_flat(system: Any) -> bool:
    return bool(_protocols(system) & _FLAT_PROTOCOLS)


def _protocols(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}
