"""A run back from its store: the newest checkpoint that is whole there, brought into the run's folder at a start.

It comes in two parts. First what says which run it is, and the manifest, so that a configuration of another run is
refused before anything large moves; then the files, in parallel, each held against its hash, and one rename. What was
brought before an interruption is not brought again. A damaged checkpoint is passed over, loudly, for the one before;
where none is whole the start is refused, since a run that has checkpoints must not begin anew in silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.remote import description, store_lock, upload
from unisono.checkpoint.remote.object_store import ObjectError, Store
from unisono.checkpoint.remote.upload_process import CHECKPOINTS, DESCRIBED, MANIFEST, described_as, known, step_of
from unisono.config.schema.run import RunConfig
from unisono.runtime import safe_paths
from unisono.runtime.errors import CheckpointError, DataError, RunError
from unisono.runtime.files import remove_folder, sync, whole
from unisono.runtime.text import one_line

_TEMPORARY = ".fetching-"  # in the folder of checkpoints
_TOGETHER = 8  # files at a time


def newest(store: Store, folder: Path, beyond: int = -1, passed: dict[str, str] | None = None) -> Checkpoint | None:
    """The newest checkpoint of a store whose manifest is whole and whose files are there, or None if there is none.

    Nothing is decided by a listing: names come from the index and from what the store lists, and a checkpoint is there
    if its manifest is, and says so itself.

    Args:
        store: of the run.
        folder: an empty or missing one, in which its manifest is put, in a folder of the checkpoint's name.
        beyond: the step that it must be newer than.
        passed: is filled with the names that were passed over, and why; a name that is in it already is passed, too.

    Raises:
        DataError: if the store does not answer.
    """
    passed = {} if passed is None else passed
    for name in reversed(known(store)):
        if step_of(name) <= beyond or name in passed:
            continue
        found = _begin(store, folder, name)
        if isinstance(found, Checkpoint):
            return found
        if found is not None:
            passed[name] = found
    return None


def fetch(store: Store, begun: Checkpoint) -> Path:
    """Bring the files of a checkpoint that `newest` has found, and give its folder its name.

    Args:
        store: of the run.
        begun: as it came from `newest`.

    Returns:
        The folder of the finished checkpoint.

    Raises:
        ObjectError: naming the object that is missing or damaged.
        DataError: if the store does not answer.
    """
    name = begun.path.name.removeprefix(_TEMPORARY)

    def bring(file: str) -> None:
        written = begun.files[file]
        store.fetch(f"{CHECKPOINTS}/{name}/{file}", begun.path / file, written["size"], written["sha256"])

    with ThreadPoolExecutor(_TOGETHER, "unisono-fetch") as pool:
        list(pool.map(bring, begun.files))
    for path in begun.path.iterdir():
        if path.name not in {*begun.files, MANIFEST}:
            path.unlink()
    sync(begun.path / MANIFEST)
    sync(begun.path)
    final = begun.path.parent / name
    if final.exists():  # a checkpoint that is damaged, or a folder without a manifest; none is lost
        final.rename(commit.aside(final))
    begun.path.rename(final)
    sync(final.parent)
    return final


def again(store: Store, path: Path) -> tuple[Path | None, str]:
    """Bring a checkpoint that is damaged here once more, in the place of the damaged one; what is whole here is kept.

    Args:
        store: of the run.
        path: its folder.

    Returns:
        Where the damaged one is kept now, or None with the reason why the store could not help.
    """
    name = path.name
    try:
        here = commit.read(path).sha256
    except CheckpointError:
        here = None
    try:
        found = _begin(store, path.parent, name)
        if not isinstance(found, Checkpoint):
            return None, found or f"{store.url} has no checkpoint {name}"
        if here not in (None, found.sha256):
            remove_folder(found.path)
            return None, f"{store.at(f'{CHECKPOINTS}/{name}')} is of another past of this run"
        for file, written in found.files.items():
            _link(path / file, found.path / file, written["size"], written["sha256"])
        kept = commit.aside(path)
        try:
            fetch(store, found)
        except ObjectError:
            remove_folder(found.path)
            raise
    except (DataError, OSError) as error:
        return None, str(error)
    return kept, ""


@dataclass
class Restore:
    """What a start does with the store of its run; see the module. Without `checkpoint.upload.url` it does nothing.

    Attributes:
        store: of the run, or None.
        folder: of the run.
        exact: whether a damaged checkpoint is refused instead of passed over.
        begun: the checkpoint that is being brought.
        passed: checkpoints that are damaged in the store, and why.
    """

    store: Store | None
    folder: Path
    exact: bool = False
    begun: Checkpoint | None = None
    passed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig, folder: Path) -> Restore:
        """The restore of a run that has a name."""
        return cls(upload.store_of(config), folder, str(config.run.resume) == "exact")

    def begin(self, new: bool, hold: Callable[[], Any]) -> None:
        """Refuse a store that cannot be used, and bring what says which run it holds, if the folder has not got as far.

        Args:
            new: whether the run has no past by its name.
            hold: makes the folder and holds it, as a context.

        Raises:
            ConfigError: for a store that cannot be reached or written.
            RunError: for one of another run.
            CheckpointError: if it has checkpoints and none is whole.
        """
        store, folder = self.store, self.folder
        if store is None:
            return
        upload.check(store)
        if new:
            if (there := store_lock.read(store)) is not None:
                store_lock.refuse(store, folder, fresh=False)
                raise RunError(f"{store.url} holds a run already, of {there['host']}; choose another run.name")
            return
        if not folder.exists() and store_lock.read(store) is None:
            return
        with hold():
            fresh = not (folder / "config.yaml").is_file()
            if (there := store_lock.refuse(store, folder, fresh)) is None:
                return
            if not store_lock.kept(folder):
                store_lock.adopt(folder, there)
            self._find()
            if self.begun is not None:
                _describe(store, folder)

    def finish(self) -> None:
        """Bring the files of the checkpoint; the folder is held.

        Raises:
            CheckpointError: if the store has checkpoints and none is whole.
        """
        if self.store is None:
            return
        brought = None
        while self.begun is not None:
            name = self.begun.path.name.removeprefix(_TEMPORARY)
            try:
                fetch(self.store, self.begun)
            except ObjectError as error:
                self.passed[name] = str(error)
                remove_folder(self.begun.path)
                self._find()
            else:
                brought, self.begun = name, None
        self._record(brought)

    def claim(self) -> None:
        """Make the place in the store this run's and this start's."""
        if self.store is not None:
            store_lock.claim(self.store, self.folder)

    def _find(self) -> None:
        """The newest checkpoint of the store that is whole and newer than those of the folder."""
        store, at = self.store, self.folder / CHECKPOINTS
        assert store is not None
        here = max((step_of(path.name) for path in commit.find(at)), default=-1)
        self.begun = newest(store, at, here, self.passed)
        for left in at.glob(f"{_TEMPORARY}*"):  # of an earlier attempt, at another checkpoint
            if self.begun is None or left != self.begun.path:
                remove_folder(left)
        listed = "; ".join(f"{name}: {why}" for name, why in self.passed.items())
        if self.passed and self.exact:
            raise CheckpointError(f"{store.url}: {listed}. run.resume=exact passes over none; run.resume=auto does")
        if self.passed and self.begun is None and here < 0:
            raise CheckpointError(
                f"{store.url} has checkpoints, and none is whole: {listed}. Choose another run.name to start anew"
            )

    def _record(self, name: str | None) -> None:
        """Say what was brought, and passed over, on the console and in `events.jsonl`."""
        assert self.store is not None
        if name is None and not self.passed:
            return
        for other, why in self.passed.items():
            _warn(f"{other} is passed over: {why}")
        if name is not None:
            print(f"restored {name} from {self.store.url}", flush=True)  # noqa: T201
        event = {"step": step_of(name or ""), "restored": name, "from": self.store.url, "passed_over": self.passed}
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(event)}\n")  # a line of its own, whatever was cut off before


def _warn(text: str) -> None:
    print(f"unisono: WARNING: {text}", file=sys.stderr)  # noqa: T201 - before there is a log


def begun(folder: Path) -> list[Path]:
    """The checkpoint that is being brought into a run's folder, if one is: it has its manifest, and no name yet."""
    return sorted((folder / CHECKPOINTS).glob(f"{_TEMPORARY}*"))


def _begin(store: Store, folder: Path, name: str) -> Checkpoint | str | None:
    """A checkpoint with its manifest here, if it is in the store; else what is wrong with it, or None: it is not there.

    One without a manifest is on its way, or on its way out.
    """
    content = store.get(f"{CHECKPOINTS}/{name}/{MANIFEST}")
    if content is None:
        return None
    at = folder / f"{_TEMPORARY}{name}"
    if at.is_symlink():
        at.unlink()
    at.mkdir(parents=True, exist_ok=True)
    with whole(at / MANIFEST) as temporary:
        temporary.write_bytes(content)
    try:
        checkpoint = commit.read(at)
    except CheckpointError as error:
        fault: str | None = str(error).partition(". Delete")[0].replace(str(at), store.at(f"{CHECKPOINTS}/{name}"))
    else:
        fault = _missing(store, name, checkpoint)
        if fault is None and checkpoint.step == step_of(name):
            return checkpoint
    remove_folder(at)
    return fault or "its manifest is of another checkpoint"


def _link(file: Path, to: Path, size: int, sha256: str) -> None:
    """Give a file that is whole a second name, if there can be one; it is fetched otherwise."""
    with suppress(OSError):
        if file.is_symlink() or file.stat().st_size != size:
            return
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found == sha256:
            to.unlink(missing_ok=True)  # of an earlier attempt
            os.link(file, to)


def _missing(store: Store, name: str, checkpoint: Checkpoint) -> str | None:
    """What is wrong with the names and sizes of a checkpoint's objects, if anything is."""
    for file in checkpoint.files:
        if Path(file).name != file or file == MANIFEST:  # it would be written elsewhere
            return f"{store.at(CHECKPOINTS)}/{name}/{MANIFEST} has a file {file!r}, which is no name of a file"

    def look(file: str) -> str | None:
        at, size = f"{CHECKPOINTS}/{name}/{file}", checkpoint.files[file]["size"]
        return None if store.size(at) == size else f"{store.at(at)} {store.fault(at, size)}"

    with ThreadPoolExecutor(_TOGETHER, "unisono-fetch") as pool:
        return next((fault for fault in pool.map(look, checkpoint.files) if fault), None)


def _describe(store: Store, folder: Path) -> None:
    """Bring what says which run it is, as far as the folder has it not: its configuration first, as it makes it a run.

    Raises:
        ObjectError: naming what is missing or damaged.
    """
    try:
        described = json.loads(store.get(DESCRIBED) or b"")
        files = {str(name): (int(each["size"]), str(each["sha256"])) for name, each in described.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObjectError(f"{store.at(DESCRIBED)} is missing or damaged ({error})") from error
    if elsewhere := next(filter(description.is_elsewhere, files), None):
        raise ObjectError(
            f"{store.at(DESCRIBED)} names '{one_line(elsewhere)}', which lies outside of a run's folder. Nothing of it "
            "was brought: do not use what comes from there"
        )
    for name, (size, sha256) in sorted(files.items(), key=lambda file: (file[0] != "config.yaml", file[0])):
        if not description.is_known(name):
            _warn(
                f"{store.at(DESCRIBED)} names '{one_line(name)}', which is neither a record of a run nor data by its "
                "ending; it was left out"
            )
            continue
        path = safe_paths.destination(folder, name)
        if not path.exists():
            with whole(path) as temporary:
                store.fetch(described_as(name, sha256), temporary, size, sha256)
