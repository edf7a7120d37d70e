"""Finished checkpoints on their way to a store, beside the training: what rank 0 has of it.

It starts the process that uploads (`unisono.checkpoint.remote.upload_process`), hands it every finished checkpoint, and says what
became of it. A checkpoint's files get second names (hard links) until they are uploaded, so that retention here never
waits for the store. Rank 0 uploads the files of all ranks: they lie in the one folder that all ranks share.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import description, store_lock
from unisono.checkpoint.remote.object_store import Store
from unisono.checkpoint.remote.upload_process import CHECKPOINTS, MANIFEST
from unisono.config.schema.run import Checkpoint, RunConfig
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, UploadError
from unisono.runtime.files import remove_folder

HELD = "uploading"  # in the run's folder: files that an upload still needs
_GRACE = 5.0  # seconds for a process that has nothing left to do
Say = Callable[[str], None]
Note = Callable[[int, dict[str, Any]], None]


def store_of(config: RunConfig) -> Store | None:
    """The place of a run in its store, if it has one."""
    given, name = config.checkpoint.upload, config.run.name
    if given.url is None:
        return None
    assert name is not None
    return Store.of(given.url, name, given.options, given.deadline)


def check(store: Store) -> None:
    """Refuse a store that cannot be reached, written, read and cleared; tried with a small object.

    Raises:
        ConfigError: with the reason, within the deadline of each of four answers.
    """
    name, content = f".unisono-{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        store.put(name, content)
        found = store.get(name)
        store.remove(name)
        store.get(name)  # S3 forbids it to those who may not list, and then nobody can say what is missing
    except FileNotFoundError as error:
        raise ConfigError(
            f"checkpoint.upload.url: {store.url} does not exist ({error}); make the bucket first"
        ) from error
    except DataError as error:
        raise ConfigError(
            f"checkpoint.upload.url: {error}. Nothing was started; correct it, or set checkpoint.upload.url=null"
        ) from error
    if found != content:
        raise ConfigError(f"checkpoint.upload.url: {store.at(name)} did not come back as it was written")


class Uploads:
    """The uploads of a run, on rank 0; elsewhere, and without `checkpoint.upload.url`, every method does nothing.

    Args:
        config: of the run.
        folder: of the run; `unisono.checkpoint.remote.store_lock.claim` has written into it which start this is.
        writing: whether this process is the one that uploads.
        say: takes lines for the console.
        note: takes a step and what happened, for `events.jsonl`.
    """

    def __init__(self, config: RunConfig, folder: Path, writing: bool, say: Say, note: Note) -> None:
        self._folder, self._say, self._note = folder, say, note
        self._given: Checkpoint = config.checkpoint
        self._store = store_of(config) if writing else None
        self._process: subprocess.Popen[str] | None = None
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a checkpoint may be finished by another thread
        self._waiting: set[str] = set()
        self._stopped = self._ending = self._said = False
        self._last = math.inf
        self.uploaded: int | None = None  # step of the newest checkpoint that is there
        self._newest = self._revived = self._missed = -1
        if self._store is not None:
            if left := description.left_out(folder):
                say(
                    f"WARNING: {', '.join(left[:4])}{', …' if len(left) > 4 else ''}: not uploaded, since a run is "
                    "restored with assets that are data by their ending, and with no others"
                )
            self._take_up()

    def finished(self, path: Path) -> None:
        """Hand over a finished checkpoint; returns at once, and `path` may go then.

        What the disk or the system refuses here is a checkpoint that is not uploaded, and ends nothing.
        """
        if self._store is None or self._stopped:
            return
        checkpoint = commit.read(path)
        with self._lock:
            self._waiting.add(path.name)
            self._newest = max(self._newest, checkpoint.step)
            order = {"held": True, "name": path.name, "step": checkpoint.step}
            metric = dict(checkpoint.metric) if checkpoint.metric else None
            try:
                held = self._hold(path)
                self._tell({**order, "path": str(held.resolve()), "files": checkpoint.files, "metric": metric})
            except OSError as error:
                self._waiting.discard(path.name)
                self._missed = checkpoint.step
                self._reports.put({"failed": path.name, "step": checkpoint.step, "why": str(error)})

    def check(self) -> None:
        """Say what became of uploads since the last call; never waits."""
        while not self._reports.empty():
            self._told(self._reports.get())

    def waits(self, seconds: float = 1.0) -> bool:
        """Wait for the last checkpoint to be there, so long at most, and say whether it is worth to wait on.

        It is for `checkpoint.upload.timeout` seconds from the first call on, which tells that no other will come.
        """
        if self._store is None:
            return False
        self.check()
        if not self._ending:
            self._last = time.monotonic() + self._given.upload.timeout
            self._end()
        end = min(self._last, time.monotonic() + seconds)
        while self._waiting and not self._stopped and (left := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._told(self._reports.get(timeout=left))
        waits = bool(self._waiting) and not self._stopped and time.monotonic() < self._last
        if waits and not self._said:
            self._say(f"waiting for the upload of step {self._newest} to {self._store.url}")
            self._said = True
        return waits

    def finish(self, required: bool = True) -> None:
        """End the process that uploads, and say if the last checkpoint is not there; `waits` comes before.

        Args:
            required: whether it may be an error; it is none of a run that had to go.

        Raises:
            UploadError: if it is not there, and `checkpoint.upload.required`.
        """
        if self._store is None:
            return
        self.check()
        late = bool(self._waiting) or self._missed == self._newest >= 0
        self.close(0.0 if late else _GRACE)
        if late or (self._stopped and self._newest >= 0 and self.uploaded != self._newest):
            text = (
                f"the checkpoint of step {self._newest} is not in {self._store.url} ({self._since()}); it is whole in "
                f"{self._folder / CHECKPOINTS}. Start the run again to have it uploaded"
            )
            self._note(self._newest, {"upload": "missing"})
            if required and self._given.upload.required:
                raise UploadError(f"{text}, or set checkpoint.upload.required=false")
            self._say(f"WARNING: {text}")

    def close(self, grace: float = 0.0) -> None:
        """End the process that uploads; what it had begun is taken up by the next start."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        with contextlib.suppress(OSError):
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _end(self) -> None:
        """Tell the process that no other checkpoint will come."""
        with self._lock, contextlib.suppress(OSError):
            self._ending = True
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(json.dumps({"end": True}) + "\n")
                self._process.stdin.flush()

    def _take_up(self) -> None:
        """Hand over the newest checkpoint of earlier starts: what was interrupted goes on."""
        left = sorted((self._folder / HELD).glob("step-*"), key=lambda path: path.name)
        for path in left:
            if not _whole(path):  # interrupted while its files got their second names
                shutil.rmtree(path, ignore_errors=True)
        found = [*left, *commit.find(self._folder / CHECKPOINTS)]
        found = [path for path in found if _whole(path)]
        if not found:
            self._tell({})
            return
        newest = max(found, key=lambda path: commit.read(path).step)
        for path in left:
            if path != newest and path.name != newest.name:
                shutil.rmtree(path, ignore_errors=True)
        self.finished(newest)

    def _hold(self, path: Path) -> Path:
        """The files of a checkpoint under second names, which nobody removes but the upload."""
        held = self._folder / HELD / path.name
        if held == path:
            return held
        remove_folder(held)
        held.mkdir(parents=True)
        for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):  # the manifest last
            try:
                os.link(file, held / file.name)
            except OSError:  # a file system without hard links
                shutil.copyfile(file, held / file.name)
        return held

    def _tell(self, order: dict[str, Any]) -> None:
        """Send an order to the process, which is started if there is none; an empty order starts it alone."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        if order:
            try:
                self._process.stdin.write(json.dumps(order) + "\n")
                self._process.stdin.flush()
            except OSError as error:  # it has just ended; the next checkpoint starts another
                self._reports.put({"failed": order["name"], "step": order["step"], "why": str(error), "again": None})

    def _start(self) -> None:
        store, kept = self._store, Retention.of(self._given)
        assert store is not None
        settings = {
            "url": store.url,
            "options": dict(store.where.options),
            "deadline": store.where.deadline,
            "folder": str(self._folder.resolve()),
            "start": store_lock.kept(self._folder).get("start"),
            "retention": asdict(replace(kept, newest=self._given.upload.keep or kept.newest)),
        }
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        with (self._folder / "logs" / "upload.log").open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "unisono.checkpoint.remote.upload_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
            )
        assert process.stdin is not None
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        threading.Thread(target=self._listen, args=(process,), name="unisono-uploads", daemon=True).start()
        self._process = process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Take reports until the process ends (in a thread of its own, which touches nothing but the queue)."""
        assert process.stdout is not None
        ended = False
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                ended |= "ended" in report
                self._reports.put(report)
        if not ended:
            self._reports.put({"died": process.wait()})

    def _told(self, report: dict[str, Any]) -> None:
        step, url = report.get("step", self._newest), self._store.url if self._store else ""
        if name := report.get("uploaded"):
            self._waiting.discard(name)
            self.uploaded = max(step, self.uploaded if self.uploaded is not None else -1)
            megabytes, seconds = report["sent"] / 1e6, report["seconds"]
            self._say(f"step {step} is in {url} ({megabytes:.1f} MB sent, {seconds:.1f} s)")
            self._note(step, {"upload": "there", "upload_bytes": report["sent"], "upload_seconds": seconds})
        elif name := report.get("failed"):
            again = f"; tried again in {report['again']:g} s" if report.get("again") else ""
            self._say(f"WARNING: step {step} is not uploaded: {report['why']} ({self._since()}){again}")
            self._note(step, {"upload": "failed", "upload_error": report["why"]})
        elif name := report.get("left"):
            self._waiting.discard(name)
            self._say(f"WARNING: step {step} is left out of {url} ({self._since()})")
            self._note(step, {"upload": "left"})
        elif report.get("stopped"):
            self._stopped = True
            self._say(
                f"WARNING: {url} is not written any more, since this run was continued elsewhere: {report['why']}. "
                "End one of the two"
            )
            self._note(step, {"upload": "stopped", "upload_error": report["why"]})
        elif "died" in report and self._waiting and self._process is not None:
            log = self._folder / "logs" / "upload.log"
            why = f"the process that uploads has ended with code {report['died']}; see {log}"
            self._say(f"WARNING: step {step} is not uploaded: {why} ({self._since()})")
            self._note(step, {"upload": "failed", "upload_error": why})
            self._process = None
            self._waiting.clear()
            if self._ending or self._revived == self._newest:
                self._stopped |= self._ending
            else:  # once for each checkpoint
                self._revived = self._newest
                self._take_up()

    def _since(self) -> str:
        return (
            "nothing uploaded since the start" if self.uploaded is None else f"not uploaded since step {self.uploaded}"
        )


def _whole(path: Path) -> bool:
    try:
        commit.read(path)
        return True
    except CheckpointError:
        return False
