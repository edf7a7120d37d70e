"""The upload process: uploads finished checkpoints one after the other, and reports in JSON lines.

It is a separate low-priority process, since a thread of rank 0 would hold the GIL while hashing and encrypting, and a
step is as slow as its slowest rank. It ends with its parent, which closes its standard input.

It reads its settings, an order for every checkpoint (sent by `unisono.checkpoint.remote.upload`), or for a node's part
of one (`unisono.checkpoint.remote.node_parts`), and `{"end": true}`.
It reports `uploaded`, `failed` (to be retried), `left` (a newer one is waiting, or a file of it is damaged), and
`stopped` (the run continued elsewhere).

<upload>/<run.name>/
  owner.json  alive.json         the owner, and its heartbeat
  run.json                       files of the run, by hash: description/<hash>/config.yaml …
  checkpoints.json               index of possible checkpoints, with the metric of each
  checkpoints/step-00001000/     as on disk; the manifest is written last and removed first
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from unisono.checkpoint.core.manifest import LARGEST, parse_step
from unisono.checkpoint.core.manifest import NAME as MANIFEST
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import description, store_lock
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.runtime import secrets
from unisono.runtime.errors import DataError, RunError
from unisono.runtime.files import file_hash
from unisono.runtime.remote import remote_options
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import HashedFile

CHECKPOINTS, INDEX = "checkpoints", "checkpoints.json"
DESCRIPTION_FILE = "run.json"  # size and hash of every file of the description
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts


class TakenOverError(Exception):
    """Another start of the run has taken over the store."""


class DamagedError(Exception):
    """A local checkpoint file does not match its manifest."""


class CheckpointUploader:
    """Uploads checkpoints of one run to its store.

    Args:
        store: of the run.
        folder: of the run.
        start: must still be the owner of the store; None to skip the check.
        retention: which checkpoints to keep in the store.
    """

    def __init__(self, store: ObjectStore, folder: Path, start: str | None, retention: Retention) -> None:
        self._store, self._folder, self._start, self._retention = store, folder, start, retention
        self._verified_objects: dict[str, str] = {}  # hashes of what this process has seen whole in the store, by name
        self.sent = 0  # bytes uploaded

    def commit(self, path: Path, name: str, files: dict[str, Any], metric: dict[str, float] | None = None) -> None:
        """Upload one checkpoint: its files, each verified, and its manifest last.

        Existing objects are read back instead of being sent; if the manifest exists, the checkpoint is complete.

        Args:
            path: the folder with its files.
            name: of the checkpoint.
            files: size and hash of each, from the manifest.
            metric: for retention, from the manifest.

        Raises:
            DataError: if the store rejects it, or stores something else.
            DamagedError: if a file does not match the manifest.
            TakenOverError: if the run continued elsewhere.
        """
        store, at = self._store, f"{CHECKPOINTS}/{name}"
        manifest = safe_paths.read_bytes(path, MANIFEST, LARGEST)
        there = store.get(f"{at}/{MANIFEST}")
        if there not in (None, manifest):  # from another history of this run; its files will be replaced
            self._check_owner()
            store.remove(f"{at}/{MANIFEST}")
        self._describe()
        for file, written in files.items():
            if there != manifest or store.size(f"{at}/{file}") != written["size"]:
                self._upload_file(f"{at}/{file}", path / file, written["size"], written["sha256"])
        self._check_owner()
        if there != manifest:
            store.put(f"{at}/{MANIFEST}", manifest)
        if store.get(f"{at}/{MANIFEST}") != manifest:
            raise DataError(f"{store.url_of(at)}/{MANIFEST} was not stored as it was sent")
        self._retain(name, metric)

    def send(self, path: Path, name: str, files: dict[str, Any]) -> None:
        """Upload files of a checkpoint without its manifest; see `commit`. An old manifest is removed first."""
        manifest = f"{CHECKPOINTS}/{name}/{MANIFEST}"
        if self._store.get(manifest) is not None:  # from another history of this run; its files will be replaced
            self._check_owner()
            self._store.remove(manifest)
        for file, written in files.items():
            self._upload_file(f"{CHECKPOINTS}/{name}/{file}", path / file, written["size"], written["sha256"])

    def check_sent(self, name: str, files: dict[str, Any]) -> None:
        """Check that files of a checkpoint, which nodes have sent and read back, are where this process sees them.

        Raises:
            DataError: naming one that is not.
        """
        for file, written in files.items():
            at = f"{CHECKPOINTS}/{name}/{file}"
            if self._store.size(at) != written["size"]:
                raise DataError(f"{self._store.url_of(at)} {self._store.describe_fault(at, written['size'])}")

    def _describe(self) -> None:
        """Upload the run's description, as far as it has changed."""
        store = self._store
        found = description.files(self._folder)
        described: dict[str, Any] = {
            name: {"size": path.stat().st_size, "sha256": file_hash(path)} for name, path in found.items()
        }
        objects = {name: description_object(name, written["sha256"]) for name, written in described.items()}
        for name, written in described.items():
            self._upload_file(objects[name], found[name], written["size"], written["sha256"])
        content, before = json.dumps(described, indent=1).encode(), store.get(DESCRIPTION_FILE)
        if before != content:  # a single object, so that the files it names are consistent
            store.put(DESCRIPTION_FILE, content)
            with contextlib.suppress(ValueError):
                known = safe_paths.parse_json(before or b"{}", dict[str, HashedFile])
                old = {description_object(name, each["sha256"]) for name, each in known.items()}
                for name in old - {*objects.values()}:
                    store.remove(name)

    def _upload_file(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Upload a file; an existing object is trusted only after it was read back."""
        if self._verified_objects.get(name) == sha256:
            return

        def count(part: int) -> None:
            self.sent += part

        if self._store.sha256(name, size) != sha256:
            self._check_owner()
            self._store.send(name, path, count)
            if self._store.sha256(name, size) != sha256:
                if file_hash(path) != sha256:
                    raise DamagedError(f"{path} is damaged: its content is not what was written")
                raise DataError(f"{self._store.url_of(name)} {self._store.describe_fault(name, size)}")
        self._verified_objects[name] = sha256

    def _check_owner(self) -> None:
        if self._start is not None and (other := store_lock.find_new_owner(self._store, self._start)):
            raise TakenOverError(other)

    def _retain(self, newest: str, metric: dict[str, float] | None) -> None:
        """Remove older checkpoints: first from the index, then their manifests, then the other files."""
        store, indexed = self._store, read_index(self._store)
        metrics = {name: indexed[name] if name in indexed else self._metric(name) for name in list_checkpoints(store)}
        metrics[newest] = metric
        names = {parse_step(name): name for name in metrics}
        going = self._retention.find_removable(parse_step(newest), {s: metrics[name] for s, name in names.items()})
        gone = [names[step] for step in going]
        store.put(INDEX, json.dumps({name: metrics[name] for name in metrics.keys() - {*gone}}, indent=1).encode())
        for name in gone:
            at = f"{CHECKPOINTS}/{name}"
            files = [file for file in store.names(at) if file != MANIFEST]
            for file in (MANIFEST, *files):
                store.remove(f"{at}/{file}")
                self._verified_objects.pop(f"{at}/{file}", None)

    def _metric(self, name: str) -> dict[str, float] | None:
        with contextlib.suppress(ValueError):
            content = self._store.get(f"{CHECKPOINTS}/{name}/{MANIFEST}") or b""
            metric: dict[str, float] | None = safe_paths.parse_json(content, _Measured)["metric"]
            return metric
        return None


class _Measured(TypedDict):
    metric: dict[str, float] | None


def read_index(store: ObjectStore) -> dict[str, dict[str, float] | None]:
    """A store's index: checkpoints and their metrics. It may be outdated; a damaged one counts as empty."""
    try:
        found = safe_paths.parse_json(store.get(INDEX) or b"{}", dict[str, dict[str, float] | None])
        return {name: each for name, each in found.items() if parse_step(name) >= 0}
    except ValueError:
        return {}


def description_object(name: str, sha256: str) -> str:
    """The name of the object for a file of the description."""
    return f"description/{sha256[:16]}/{name}"


def list_checkpoints(store: ObjectStore) -> list[str]:
    """Names of checkpoints that may be in a store, oldest first, from its index and its listing.

    Either may be outdated, so a name proves nothing: a checkpoint exists if its manifest does.
    """
    listed = (name for name in store.names(CHECKPOINTS) if parse_step(name) >= 0)
    return sorted({*read_index(store), *listed}, key=parse_step)


class UploadWorker:
    """The loop of the process: uploads the newest waiting checkpoint until it succeeds.

    Args:
        upload: uploads one checkpoint.
        store: of the run, to clean up after interrupted uploads.
        report: sends one to the run.
        pause: seconds from the first failure to the next attempt; doubled after each, up to a minute.
    """

    def __init__(
        self, upload: CheckpointUploader, store: ObjectStore, report: Callable[[dict[str, Any]], None], pause: float
    ) -> None:
        self._upload, self._store, self._report, self._pause = upload, store, report, pause
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._next: dict[str, Any] | None = None
        self._ending = False

    def order(self, order: dict[str, Any]) -> None:
        """Queue a checkpoint, or the end."""
        self._orders.put(order)

    def run(self) -> None:
        """Upload until the end is queued and nothing is waiting."""
        while True:
            self._take_orders(None)
            if self._next is None:
                return
            order, self._next = self._next, None
            try:
                self._upload_with_retries(order)
            except TakenOverError as error:
                self._report({"stopped": order["name"], "step": order["step"], "why": str(error)})
                return

    def _upload_with_retries(self, order: dict[str, Any]) -> None:
        name, step, pause = order["name"], order["step"], self._pause
        began, before = time.monotonic(), self._upload.sent
        while True:
            try:
                if order.get("part"):  # other nodes send theirs at the same time
                    self._upload.send(Path(order["path"]), name, order["files"])
                else:
                    with contextlib.suppress(DataError):  # listing parts may be forbidden even if uploading is allowed
                        self._store.abort_parts()
                    self._upload.check_sent(name, order.get("sent", {}))
                    self._upload.commit(Path(order["path"]), name, order.get("files", {}), order["metric"])
            except DamagedError as error:
                self._report({"failed": name, "step": step, "why": str(error), "again": None})
                self._drop(order)
                return
            except (DataError, RunError, OSError) as error:
                why = secrets.mask(str(error) or type(error).__name__)
                self._report({"failed": name, "step": step, "why": why, "again": pause})
                self._take_orders(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._next is not None:
                    self._drop(order)
                    return
            else:
                sent, seconds = self._upload.sent - before, time.monotonic() - began
                self._report({"uploaded": name, "step": step, "seconds": seconds, "sent": sent})
                _remove_links(order)
                return

    def _drop(self, order: dict[str, Any]) -> None:
        self._report({"left": order["name"], "step": order["step"]})
        _remove_links(order)

    def _take_orders(self, seconds: float | None) -> None:
        """Wait for orders, up to a time or for the first; the newest checkpoint is next, older ones are dropped."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            waits = self._next is None and not self._ending if left is None else left > 0
            try:
                order = self._orders.get(block=waits, timeout=left if waits else None)
            except queue.Empty:
                return
            if "end" in order:
                self._ending = True
                return
            if self._next is not None:
                self._drop(self._next)
            self._next = order


def _remove_links(order: dict[str, Any]) -> None:
    """Remove the links that kept a checkpoint's files for the upload."""
    if order.get("held"):
        shutil.rmtree(order["path"], ignore_errors=True)


def main() -> None:
    """Entry point of the process."""
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal sends them to all; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    settings = json.loads(sys.stdin.readline())
    where = remote_options(settings["options"], settings["deadline"])
    store, start = ObjectStore(settings["url"], where), settings["start"]

    def send(report: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()

    upload = CheckpointUploader(store, Path(settings["folder"]), start, Retention(**settings["retention"]))
    worker = UploadWorker(upload, store, send, _FIRST_PAUSE)

    def listen() -> None:
        for line in sys.stdin:
            worker.order(json.loads(line))
        os._exit(1)  # the parent has exited; the next start resumes the upload

    threading.Thread(target=listen, daemon=True).start()
    ended = threading.Event()

    def beat() -> None:
        for number in itertools.count(1):
            with contextlib.suppress(Exception):  # if the store is unreachable, uploads report it
                store_lock.write_heartbeat(store, start, number)
            if ended.wait(store_lock.HEARTBEAT_SECONDS):
                return

    beats = threading.Thread(target=beat, daemon=True)
    if settings["beats"]:
        beats.start()
    worker.run()
    ended.set()
    if settings["beats"]:
        beats.join(where.deadline)
        with contextlib.suppress(Exception):
            if store_lock.find_new_owner(store, start) is None:
                store_lock.write_heartbeat(store, start, None)
    send({"ended": True})
    os._exit(0)  # do not wait for threads of unanswered requests


if __name__ == "__main__":
    main()
