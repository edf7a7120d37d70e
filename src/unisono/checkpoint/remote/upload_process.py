"""The process that uploads: it takes finished checkpoints, one after the other, and reports in JSON lines.

A process of its own, and a nice one, since a thread of rank 0 would hold its GIL while it hashes and encrypts, and a
step is as slow as its slowest rank. It ends with the process that started it: its standard input is closed then.

What it is told: its settings, an order for every checkpoint (`unisono.checkpoint.remote.upload` makes them), `{"end": true}`.
What it reports: `uploaded`, `failed` (and tried again), `left` (a newer one waits, or a file of it is damaged), and
`stopped` (the run went on elsewhere).

<upload>/<run.name>/
  owner.json  alive.json         whose it is, and whether it lives
  run.json                       files of the run, by hash: description/<hash>/config.yaml …
  checkpoints.json               which checkpoints there may be, and the metric of each
  checkpoints/step-00001000/     as on the disk; the manifest is written last and removed first
"""

from __future__ import annotations

import contextlib
import hashlib
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

from unisono.checkpoint.core.retention import Known, Retention
from unisono.checkpoint.remote import description, store_lock
from unisono.checkpoint.remote.object_store import Store
from unisono.config import secrets
from unisono.data.sources.storage import Where, options
from unisono.runtime.errors import DataError, RunError

CHECKPOINTS, MANIFEST, INDEX = "checkpoints", "manifest.json", "checkpoints.json"
DESCRIBED = "run.json"  # size and hash of every file of the description
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds between attempts


class TakenOverError(Exception):
    """Another start of the run writes to the store now."""


class DamagedError(Exception):
    """A checkpoint's file on this side is not what its manifest says."""


class Upload:
    """Checkpoints of one run on their way into its store.

    Args:
        store: of the run.
        folder: of the run.
        start: which the store must still name as its owner; None to not ask.
        retention: which of them remain in the store.
    """

    def __init__(self, store: Store, folder: Path, start: str | None, retention: Retention) -> None:
        self._store, self._folder, self._start, self._retention = store, folder, start, retention
        self._there: set[tuple[str, str]] = set()  # name and hash of what this process has seen whole in the store
        self.sent = 0  # bytes that went over the line

    def commit(self, path: Path, name: str, files: dict[str, Any], metric: dict[str, float] | None = None) -> None:
        """Bring one checkpoint into the store: its files, each verified, and its manifest last.

        Whatever of it is there already is read back instead of sent, and where its manifest is there, all of it is.

        Args:
            path: where its files lie.
            name: of it.
            files: size and hash of each, from the manifest.
            metric: by which it may be the best, from the manifest.

        Raises:
            DataError: if the store cannot take it, or has taken something else.
            DamagedError: if a file is not what the manifest says.
            TakenOverError: if the run went on elsewhere.
        """
        store, at = self._store, f"{CHECKPOINTS}/{name}"
        manifest = (path / MANIFEST).read_bytes()
        there = store.get(f"{at}/{MANIFEST}")
        if there not in (None, manifest):  # of another past of this run; its files are about to change under it
            self._still_mine()
            store.remove(f"{at}/{MANIFEST}")
        self._describe()
        for file, written in files.items():
            if there != manifest or store.size(f"{at}/{file}") != written["size"]:
                self._bring(f"{at}/{file}", path / file, written["size"], written["sha256"])
        self._still_mine()
        if there != manifest:
            store.put(f"{at}/{MANIFEST}", manifest)
        if store.get(f"{at}/{MANIFEST}") != manifest:
            raise DataError(f"{store.at(at)}/{MANIFEST} did not arrive as it was sent")
        self._retain(name, metric)

    def _describe(self) -> None:
        """Bring what says which run it is, as far as it has changed."""
        store = self._store
        found = description.files(self._folder)
        described: dict[str, Any] = {
            name: {"size": path.stat().st_size, "sha256": _sha256(path)} for name, path in found.items()
        }
        for name, written in described.items():
            self._bring(described_as(name, written["sha256"]), found[name], written["size"], written["sha256"])
        content, before = json.dumps(described, indent=1).encode(), store.get(DESCRIBED)
        if before != content:  # by one object, so that what it names belongs together
            store.put(DESCRIBED, content)
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                old = {described_as(name, each["sha256"]) for name, each in json.loads(before or b"{}").items()}
                for name in old - {described_as(name, each["sha256"]) for name, each in described.items()}:
                    store.remove(name)

    def _bring(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Have a file in the store, whole; what is there is believed only when it was read back."""
        if (name, sha256) in self._there:
            return
        if self._store.sha256(name, size) != sha256:
            self._still_mine()
            self._store.send(name, path, self._count)
            if self._store.sha256(name, size) != sha256:
                if _sha256(path) != sha256:
                    raise DamagedError(f"{path} is damaged: its content is not what was written")
                raise DataError(f"{self._store.at(name)} {self._store.fault(name, size)}")
        self._there = {(n, h) for n, h in self._there if n != name} | {(name, sha256)}

    def _count(self, size: int) -> None:
        self.sent += size

    def _still_mine(self) -> None:
        if self._start is not None and (other := store_lock.taken_over(self._store, self._start)):
            raise TakenOverError(other)

    def _retain(self, newest: str, metric: dict[str, float] | None) -> None:
        """Let older checkpoints go as here: out of the index first, then their manifests, then the rest."""
        store, indexed = self._store, index(self._store)
        metrics = {name: indexed[name] if name in indexed else self._metric(name) for name in known(store)}
        metrics[newest] = metric
        names = {step_of(name): name for name in metrics}
        going = self._retention.going(step_of(newest), [Known(step, metrics[name]) for step, name in names.items()])
        gone = [names[step] for step in going]
        store.put(INDEX, json.dumps({name: metrics[name] for name in metrics.keys() - {*gone}}, indent=1).encode())
        for name in gone:
            at = f"{CHECKPOINTS}/{name}"
            files = [file for file in store.names(at) if file != MANIFEST]
            for file in (MANIFEST, *files):
                store.remove(f"{at}/{file}")
                self._there = {(n, h) for n, h in self._there if n != f"{at}/{file}"}

    def _metric(self, name: str) -> dict[str, float] | None:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found = json.loads(self._store.get(f"{CHECKPOINTS}/{name}/{MANIFEST}") or b"")["metric"]
            return found if isinstance(found, dict) else None
        return None


def index(store: Store) -> dict[str, dict[str, float] | None]:
    """What a store's index says: checkpoints and their metrics. It may be late, or damaged and then empty."""
    try:
        found = json.loads(store.get(INDEX) or b"{}")
        return {name: each if isinstance(each, dict) else None for name, each in found.items() if step_of(name) >= 0}
    except (ValueError, AttributeError):
        return {}


def described_as(name: str, sha256: str) -> str:
    """The object of a file of the description."""
    return f"description/{sha256[:16]}/{name}"


def known(store: Store) -> list[str]:
    """Names of checkpoints that may be in a store, the oldest first: of its index and of what it lists.

    Either may be late, so that a name proves nothing: a checkpoint is there if its manifest is.
    """
    listed = (name for name in store.names(CHECKPOINTS) if step_of(name) >= 0)
    return sorted({*index(store), *listed}, key=step_of)


def step_of(name: str) -> int:
    """The step in a checkpoint's name; -1 for what is no such name.

    >>> step_of("step-00001000"), step_of("step-x"), step_of(".fetching-step-00001000")
    (1000, -1, -1)
    """
    number = name.removeprefix("step-")
    return int(number) if name.startswith("step-") and number.isdecimal() and len(number) >= 8 else -1


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Worker:
    """The loop of the process: the newest checkpoint that waits, until it is there.

    Args:
        upload: what brings one.
        store: of the run, for what an interrupted upload left.
        tell: takes every report.
        pause: seconds from the first failure to the next attempt; twice as many after each, up to a minute.
    """

    def __init__(self, upload: Upload, store: Store, tell: Callable[[dict[str, Any]], None], pause: float) -> None:
        self._upload, self._store, self._tell, self._pause = upload, store, tell, pause
        self._orders: queue.Queue[dict[str, Any]] = queue.Queue()
        self._next: dict[str, Any] | None = None
        self._ending = False

    def order(self, order: dict[str, Any]) -> None:
        """Hand it a checkpoint, or the end."""
        self._orders.put(order)

    def run(self) -> None:
        """Upload until the end is ordered and nothing waits."""
        while True:
            self._take(None)
            if self._next is None:
                return
            order, self._next = self._next, None
            try:
                self._until_there(order)
            except TakenOverError as error:
                self._tell({"stopped": order["name"], "step": order["step"], "why": str(error)})
                return

    def _until_there(self, order: dict[str, Any]) -> None:
        pause = self._pause
        began, before = time.monotonic(), self._upload.sent
        while True:
            try:
                with contextlib.suppress(DataError):  # whoever may not list parts can upload all the same
                    self._store.abort_parts()
                self._upload.commit(Path(order["path"]), order["name"], order["files"], order["metric"])
            except (DataError, RunError, OSError) as error:
                why = secrets.mask(str(error) or type(error).__name__)
                told = {"step": order["step"], "why": why, "again": pause}
                self._tell({"failed": order["name"], **told})
                self._take(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if self._next is not None:
                    self._tell({"left": order["name"], "step": order["step"]})
                    _release(order)
                    return
            except DamagedError as error:
                self._tell({"failed": order["name"], "step": order["step"], "why": str(error), "again": None})
                self._tell({"left": order["name"], "step": order["step"]})
                _release(order)
                return
            else:
                told = {"step": order["step"], "seconds": time.monotonic() - began}
                self._tell({"uploaded": order["name"], **told, "sent": self._upload.sent - before})
                _release(order)
                return

    def _take(self, seconds: float | None) -> None:
        """Wait for orders so long, or for one of them; the newest checkpoint is the next, those before it are left."""
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
                self._tell({"left": self._next["name"], "step": self._next["step"]})
                _release(self._next)
            self._next = order


def _release(order: dict[str, Any]) -> None:
    """Remove the links that kept a checkpoint's files for the upload."""
    if order.get("held"):
        shutil.rmtree(order["path"], ignore_errors=True)


def _beats(store: Store, start: str, every: float, ended: threading.Event) -> None:
    number = 0
    while not ended.is_set():
        number += 1
        with contextlib.suppress(Exception):  # the store is away: uploads tell it
            store_lock.beat(store, start, number)
        ended.wait(every)


def main() -> None:
    """Entry of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; who started this process decides
    os.nice(10)
    settings = json.loads(sys.stdin.readline())
    where = Where(options(settings["options"]), settings["deadline"])
    store, start = Store(settings["url"], where), settings["start"]

    def tell(report: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()

    upload = Upload(store, Path(settings["folder"]), start, Retention(**settings["retention"]))
    worker = Worker(upload, store, tell, settings.get("pause", _FIRST_PAUSE))

    def listen() -> None:
        for line in sys.stdin:
            worker.order(json.loads(line))
        os._exit(1)  # whoever started it is gone; what was begun is taken up by the next start

    threading.Thread(target=listen, daemon=True).start()
    ended = threading.Event()
    beats = threading.Thread(
        target=_beats, args=(store, start, settings.get("beat", store_lock.BEAT), ended), daemon=True
    )
    beats.start()
    worker.run()
    ended.set()
    beats.join(where.deadline)
    with contextlib.suppress(Exception):
        if store_lock.taken_over(store, start) is None:
            store_lock.beat(store, start, None)
    tell({"ended": True})
    os._exit(0)  # threads of answers that never came hold up nothing


if __name__ == "__main__":
    main()
