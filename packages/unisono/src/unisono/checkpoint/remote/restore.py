"""Restores a run from its store: at a start, downloads the newest intact checkpoint into the run's folder.

It has two parts. First the run's description and the manifest are downloaded, so that a configuration of another run is
rejected before anything large is transferred; then the files, in parallel, each verified by its hash, followed by a
rename. After an interruption, complete files are not downloaded again. A damaged checkpoint is skipped with a warning;
if none is intact, the start fails, since a run that has checkpoints must not silently start over.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import NAME as MANIFEST
from unisono.checkpoint.core.manifest import Checkpoint, parse_step
from unisono.checkpoint.remote import description, store_lock, upload
from unisono.checkpoint.remote.object_store import ObjectError, ObjectStore
from unisono.checkpoint.remote.upload_process import (
    CHECKPOINTS,
    DESCRIPTION_FILE,
    description_object,
    list_checkpoints,
)
from unisono.config import CONFIG_FILE
from unisono.config.schema.run import RunConfig
from unisono.observe import events
from unisono.runtime.console import say
from unisono.runtime.errors import CheckpointError, DataError, RunError
from unisono.runtime.files import atomic_file, file_hash, fsync_path, remove_folder
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths, safe_writing
from unisono.runtime.untrusted.shapes import HashedFile

_PARALLEL_FILES = 8


def find_newest(store: ObjectStore, folder: Path, beyond: int, passed: dict[str, str]) -> Checkpoint | None:
    """The newest checkpoint of a store with an intact manifest and all its files, or None if there is none.

    Listings are never trusted: names come from the index and the store's listing, but a checkpoint exists only if its
    manifest does.

    Args:
        store: of the run.
        folder: the folder of checkpoints, in which a temporary folder with the manifest is created.
        beyond: the checkpoint must be newer than this step.
        passed: filled with names of skipped checkpoints and reasons; names already in it are skipped, too.

    Raises:
        DataError: if the store does not answer.
    """
    for name in reversed(list_checkpoints(store)):
        if parse_step(name) <= beyond or name in passed:
            continue
        found = _fetch_manifest(store, folder, name)
        if isinstance(found, Checkpoint):
            return found
        if found is not None:
            passed[name] = found
    return None


def _fetch_files(store: ObjectStore, begun: Checkpoint) -> None:
    """Download the files of a checkpoint found by `find_newest`, and give its folder its final name."""
    name = begun.path.name.removeprefix(commit.PARTIAL)

    def bring(file: str) -> None:
        written = begun.files[file]
        store.fetch(f"{CHECKPOINTS}/{name}/{file}", begun.path / file, written["size"], written["sha256"])

    with ThreadPoolExecutor(_PARALLEL_FILES, "unisono-fetch") as pool:
        list(pool.map(bring, begun.files))
    for path in begun.path.iterdir():
        if path.name not in {*begun.files, MANIFEST}:
            remove_folder(path)
    fsync_path(begun.path / MANIFEST)
    fsync_path(begun.path)
    final = begun.path.parent / name
    if os.path.lexists(final):  # a damaged checkpoint, or a folder without a manifest; kept under another name
        final.rename(commit.free_damaged_path(final))
    begun.path.rename(final)
    fsync_path(final.parent)


def refetch(store: ObjectStore, path: Path) -> tuple[Path | None, str]:
    """Download a locally damaged checkpoint again and replace it; intact local files are kept.

    Returns:
        Where the damaged copy is kept now, or None with the reason why the store could not help.
    """
    name = path.name
    try:
        here = commit.read_manifest(path).sha256
    except CheckpointError:
        here = None
    try:
        found = _fetch_manifest(store, path.parent, name)
        if not isinstance(found, Checkpoint):
            return None, found or f"{store.url} has no checkpoint {name}"
        if here not in (None, found.sha256):
            remove_folder(found.path)
            return None, f"{store.url_of(f'{CHECKPOINTS}/{name}')} belongs to another history of this run"
        for file, written in found.files.items():
            _link_file(path / file, found.path / file, written["size"], written["sha256"])
        kept = commit.free_damaged_path(path)
        try:
            _fetch_files(store, found)
        except ObjectError:
            remove_folder(found.path)
            raise
    except (DataError, OSError) as error:
        return None, str(error)
    return kept, ""


@dataclass
class Restore:
    """The restore of one start; see the module. Without `checkpoint.upload.url` it does nothing.

    Attributes:
        store: of the run, or None.
        folder: of the run.
        exact: whether a damaged checkpoint is an error instead of being skipped.
        partial: the checkpoint being downloaded.
        skipped: checkpoints that are damaged in the store, and why.
    """

    store: ObjectStore | None
    folder: Path
    exact: bool = False
    partial: Checkpoint | None = None
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: RunConfig, folder: Path) -> Restore:
        """The restore of a run that has a name."""
        return cls(upload.open_store(config), folder, str(config.run.resume) == "exact")

    def begin(self, new: bool, hold: Callable[[], Any]) -> None:
        """Check the store, and download the description of its run if it is ahead of the folder.

        Args:
            new: whether the run has a new name.
            hold: a context that creates and locks the folder.

        Raises:
            ConfigError: if the store cannot be reached or written.
            RunError: if it belongs to another run.
            CheckpointError: if it has checkpoints and none is intact.
        """
        store, folder = self.store, self.folder
        if store is None:
            return
        upload.check_store(store)
        if new:
            if (there := store_lock.read_owner(store)) is not None:
                store_lock.check_owner(store, folder, fresh=False)
                raise RunError(f"{store.url} already holds a run from {there['host']}; choose another run.name")
            return
        if not folder.exists() and store_lock.read_owner(store) is None:
            return
        with hold():
            fresh = not (folder / CONFIG_FILE).is_file()
            if (there := store_lock.check_owner(store, folder, fresh)) is None:
                return
            if not store_lock.read_local(folder):
                store_lock.adopt(folder, there)
            self._find_checkpoint()
            if self.partial is not None:
                _fetch_description(store, folder, self.partial.assets)

    def finish(self) -> None:
        """Download the files of the checkpoint; the folder is locked.

        Raises:
            CheckpointError: if the store has checkpoints and none is intact.
        """
        if self.store is None:
            return
        brought = None
        while self.partial is not None:
            name = self.partial.path.name.removeprefix(commit.PARTIAL)
            try:
                _fetch_files(self.store, self.partial)
            except ObjectError as error:
                self.skipped[name] = str(error)
                remove_folder(self.partial.path)
                self._find_checkpoint()
            else:
                brought, self.partial = name, None
        self._record_restore(brought)

    def claim(self) -> None:
        """Claim the store for this run and this start."""
        if self.store is not None:
            store_lock.claim(self.store, self.folder)

    def _find_checkpoint(self) -> None:
        """Find the newest intact checkpoint of the store that is newer than those of the folder."""
        store, at = self.store, self.folder / placement.NAME
        assert store is not None
        here = max((parse_step(path.name) for path in commit.find_checkpoints(at)), default=-1)
        self.partial = find_newest(store, at, here, self.skipped)
        for left in at.glob(f"{commit.PARTIAL}*"):  # of an earlier attempt, at another checkpoint
            if self.partial is None or left != self.partial.path:
                remove_folder(left)
        listed = "; ".join(f"{name}: {why}" for name, why in self.skipped.items())
        if self.skipped and self.exact:
            raise CheckpointError(f"{store.url}: {listed}. run.resume=exact skips no checkpoint; run.resume=auto does")
        if self.skipped and self.partial is None and here < 0:
            raise CheckpointError(
                f"{store.url} has checkpoints, but none is intact: {listed}. Choose another run.name to start over"
            )

    def _record_restore(self, name: str | None) -> None:
        """Report what was restored and skipped, on the console and in `events.jsonl`."""
        assert self.store is not None
        if name is None and not self.skipped:
            return
        for other, why in self.skipped.items():
            _warn(f"{other} was skipped: {why}")
        if name is not None:
            say(f"restored {name} from {self.store.url}")
        event = {"step": parse_step(name or ""), "restored": name, "from": self.store.url, "passed_over": self.skipped}
        events.append_event(self.folder / "events.jsonl", event)


def _warn(text: str) -> None:
    say(f"unisono: WARNING: {text}", error=True)


def find_partial(folder: Path) -> list[Path]:
    """The partly downloaded checkpoint of a run's folder, if any: it has its manifest, but no final name yet."""
    return sorted((folder / placement.NAME).glob(f"{commit.PARTIAL}*"))


def _fetch_manifest(store: ObjectStore, folder: Path, name: str) -> Checkpoint | str | None:
    """Download a checkpoint's manifest; returns the checkpoint, or what is wrong with it, or None if it has none."""
    try:
        content = store.get(f"{CHECKPOINTS}/{name}/{MANIFEST}")
    except ObjectError as error:
        return str(error)
    if content is None:
        return None
    at = folder / f"{commit.PARTIAL}{name}"
    if at.is_symlink():
        at.unlink()
    at.mkdir(parents=True, exist_ok=True)
    with atomic_file(at / MANIFEST) as temporary:
        temporary.write_bytes(content)
    try:
        checkpoint = commit.read_manifest(at)
    except CheckpointError as error:
        fault: str | None = str(error).partition(". Delete")[0].replace(str(at), store.url_of(f"{CHECKPOINTS}/{name}"))
    else:
        fault = _find_fault(store, name, checkpoint)
        if fault is None and checkpoint.step == parse_step(name):
            return checkpoint
    remove_folder(at)
    return fault or "its manifest belongs to another checkpoint"


def _link_file(file: Path, to: Path, size: int, sha256: str) -> None:
    """Hard-link a file if it is intact and the system allows it; otherwise it will be downloaded."""
    with suppress(OSError):
        if file.is_symlink() or file.stat().st_size != size:
            return
        if file_hash(file) == sha256:
            to.unlink(missing_ok=True)  # of an earlier attempt
            os.link(file, to)


def _find_fault(store: ObjectStore, name: str, checkpoint: Checkpoint) -> str | None:
    """What is wrong with the names and sizes of a checkpoint's objects; None if nothing is."""
    for file in checkpoint.files:
        if Path(file).name != file or file == MANIFEST:  # would be written outside of the folder
            return f"{store.url_of(CHECKPOINTS)}/{name}/{MANIFEST} lists '{file}', which is not a valid file name"

    def look(file: str) -> str | None:
        at, size = f"{CHECKPOINTS}/{name}/{file}", checkpoint.files[file]["size"]
        return None if store.size(at) == size else f"{store.url_of(at)} {store.describe_fault(at, size)}"

    with ThreadPoolExecutor(_PARALLEL_FILES, "unisono-fetch") as pool:
        return next((fault for fault in pool.map(look, checkpoint.files) if fault), None)


def _fetch_description(store: ObjectStore, folder: Path, assets: Mapping[str, str] | None) -> None:
    """Download the missing files of the run's description: the configuration first, since it marks a run directory."""
    try:
        described = safe_paths.parse_json(store.get(DESCRIPTION_FILE) or b"", dict[str, HashedFile])
    except ValueError as error:
        raise ObjectError(f"{store.url_of(DESCRIPTION_FILE)} is missing or damaged ({one_line(error)})") from error
    files = {name: (each["size"], each["sha256"]) for name, each in described.items()}
    if elsewhere := next(filter(description.is_elsewhere, files), None):
        raise ObjectError(
            f"{store.url_of(DESCRIPTION_FILE)} names '{one_line(elsewhere)}', which lies outside a run's folder. "
            "Nothing of it was downloaded: do not use this store"
        )
    for name, (size, sha256) in sorted(files.items(), key=lambda file: (file[0] != CONFIG_FILE, file[0])):
        if not description.is_known(name):
            _warn(
                f"{store.url_of(DESCRIPTION_FILE)} names '{one_line(name)}', which is neither a run record nor a data "
                "file by its extension; it was skipped"
            )
            continue
        if assets is not None and name.startswith("assets/") and assets.get(name[7:]) != sha256:
            _warn(
                f"{store.url_of(DESCRIPTION_FILE)} names '{one_line(name)}', which is not the file with which the "
                "checkpoint was written; it was skipped"
            )
            continue
        path = safe_writing.destination(folder, name)
        if not path.exists():
            with atomic_file(path) as temporary:
                store.fetch(description_object(name, sha256), temporary, size, sha256)
