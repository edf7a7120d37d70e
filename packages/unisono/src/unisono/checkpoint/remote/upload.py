"""Uploads finished checkpoints to a store during training: rank 0's part.

It starts the upload process (`unisono.checkpoint.remote.upload_process`), passes every finished checkpoint to it, and
reports the outcome. A checkpoint's files are hard-linked until they are uploaded, so that retention never waits for the
store. Rank 0 uploads the files of all ranks, which share one folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import commit, placement
from unisono.checkpoint.core.manifest import NAME as MANIFEST
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.remote import description, store_lock
from unisono.checkpoint.remote.object_store import ObjectStore
from unisono.config.schema.run import Checkpoint, RunConfig
from unisono.runtime.errors import CheckpointError, ConfigError, DataError, UploadError
from unisono.runtime.files import remove_folder
from unisono.runtime.untrusted import safe_writing

PENDING_FOLDER = "uploading"  # beside the checkpoints: files that an upload still needs
_GRACE = 5.0  # seconds to wait for an idle process to exit
SayLine = Callable[[str], None]
RecordEvent = Callable[[int, dict[str, Any]], None]


def open_store(config: RunConfig) -> ObjectStore | None:
    """The store of a run; None if it has none."""
    given, name = config.checkpoint.upload, config.run.name
    if given.url is None:
        return None
    assert name is not None
    return ObjectStore.for_run(given.url, name, given.options, given.deadline)


def check_store(store: ObjectStore) -> None:
    """Check with a small object that a store can be reached, written, read and cleaned up.

    Raises:
        ConfigError: with the reason; each of four requests has a deadline.
    """
    name, content = f".unisono-{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        store.put(name, content)
        found = store.get(name)
        store.remove(name)
        store.get(name)  # S3 forbids this without list permission, and then missing objects cannot be detected
    except FileNotFoundError as error:
        raise ConfigError(
            f"checkpoint.upload.url: {store.url} does not exist ({error}); create the bucket first"
        ) from error
    except DataError as error:
        raise ConfigError(
            f"checkpoint.upload.url: {error}. Nothing was started; correct the URL, or set checkpoint.upload.url=null"
        ) from error
    if found != content:
        raise ConfigError(f"checkpoint.upload.url: {store.url_of(name)} was read back with different content")


class Uploads:
    """The uploads of a run, on rank 0; on other ranks, and without `checkpoint.upload.url`, every method does nothing.

    Args:
        config: of the run.
        folder: of the run, after `unisono.checkpoint.remote.store_lock.claim` has recorded this start in it.
        writing: whether this process uploads.
        say: shows a line on the console.
        note: records an event of a step, for `events.jsonl`.
    """

    def __init__(self, config: RunConfig, folder: Path, writing: bool, say: SayLine, note: RecordEvent) -> None:
        self._folder, self._say, self._note = folder, say, note
        # On the disk of the checkpoints: across disks they would be copied, onto one that may be small.
        self._pending = (placement.find_target(config) or folder) / PENDING_FOLDER
        self._given: Checkpoint = config.checkpoint
        self._is_shared = config.launch.shared_folder
        self._store = open_store(config) if writing else None
        self._start_id: str | None = store_lock.read_local(folder).get("start")
        self._process: subprocess.Popen[str] | None = None
        self._reports: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # checkpoints are finished by another thread
        self._waiting: set[str] = set()
        self._stopped = self._ending = self._said = False
        self._last = math.inf
        self.uploaded: int | None = None  # step of the newest uploaded checkpoint
        self._newest = self._missed = -1
        if self._store is not None:
            if left := description.find_skipped_assets(folder):
                say(
                    f"WARNING: {', '.join(left[:4])}{', …' if len(left) > 4 else ''}: not uploaded, since only assets "
                    "with a data file's extension are restored"
                )
            if self._is_shared:
                self._resume_pending()
            else:  # a save sends what it has written, and is not finished before; this process shows that the run lives
                self._send_order({})

    def enqueue(self, path: Path) -> None:
        """Queue a finished checkpoint; returns at once, and `path` may be removed then.

        If a system error occurs here, the checkpoint is not uploaded, but the run continues.
        """
        if self._store is None or self._stopped:
            return
        if not self._is_shared:  # it is in the store; the process that shows that the run lives may have died meanwhile
            with self._lock:
                if not self._ending:
                    self._send_order({})
            return
        checkpoint = commit.read_manifest(path)
        with self._lock:
            self._waiting.add(path.name)
            self._newest = max(self._newest, checkpoint.step)
            order = {"held": True, "name": path.name, "step": checkpoint.step}
            metric = dict(checkpoint.metric) if checkpoint.metric else None
            try:
                held = self._link_files(path)
                self._send_order({**order, "path": str(held.resolve()), "files": checkpoint.files, "metric": metric})
            except OSError as error:
                self._waiting.discard(path.name)
                self._missed = checkpoint.step
                self._reports.put({"failed": path.name, "step": checkpoint.step, "why": str(error)})

    def check(self) -> None:
        """Report uploads finished or failed since the last call; never waits."""
        while not self._reports.empty():
            self._handle_report(self._reports.get())

    def wait(self, seconds: float = 1.0) -> bool:
        """Wait for the last upload at most this long; returns whether to keep waiting.

        The total is limited to `checkpoint.upload.timeout` seconds after the first call, which also closes the queue.
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
                self._handle_report(self._reports.get(timeout=left))
        waits = bool(self._waiting) and not self._stopped and time.monotonic() < self._last
        if waits and not self._said:
            self._say(f"waiting for the upload of step {self._newest} to {self._store.url}")
            self._said = True
        return waits

    def finish(self, required: bool = True) -> None:
        """Stop the upload process, and report if the last checkpoint is not uploaded; call `wait` before.

        Args:
            required: whether a missing upload may be an error; not for a preempted run.

        Raises:
            UploadError: if it is not uploaded, and `checkpoint.upload.required`.
        """
        if self._store is None:
            return
        self.check()
        late = bool(self._waiting) or self._missed == self._newest >= 0
        self.close(0.0 if late else _GRACE)
        if late or (self._stopped and self._newest >= 0 and self.uploaded != self._newest):
            text = (
                f"the checkpoint of step {self._newest} is not in {self._store.url} ({self._format_lag()}); it is "
                f"complete in {self._folder / placement.NAME}. Start the run again to upload it"
            )
            self._note(self._newest, {"upload": "missing"})
            if required and self._given.upload.required:
                raise UploadError(f"{text}, or set checkpoint.upload.required=false")
            self._say(f"WARNING: {text}")

    def close(self, grace: float = 0.0) -> None:
        """Stop the upload process; the next start resumes unfinished uploads."""
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
        """Tell the process that no more checkpoints will follow."""
        with self._lock, contextlib.suppress(OSError):
            self._ending = True
            if self._process is not None:
                write_line(self._process, {"end": True})

    def _resume_pending(self) -> None:
        """Hand over the newest checkpoint of earlier starts, to resume interrupted uploads."""
        left = sorted(self._pending.glob("step-*"), key=lambda path: path.name)
        for path in left:
            if not _is_complete(path):  # interrupted while its files were linked
                shutil.rmtree(path, ignore_errors=True)
        here = reversed(commit.find_checkpoints(self._folder / placement.NAME))
        found = [path for path in left if _is_complete(path)] + list(islice(filter(_is_complete, here), 1))
        if not found:
            self._send_order({})
            return
        newest = max(found, key=lambda path: commit.read_manifest(path).step)
        for path in left:
            if path != newest and path.name != newest.name:
                shutil.rmtree(path, ignore_errors=True)
        self.enqueue(newest)

    def _link_files(self, path: Path) -> Path:
        """Hard-link the files of a checkpoint; only the upload process removes the links."""
        held = self._pending / path.name
        if held == path:
            return held
        remove_folder(held)
        safe_writing.make_folder(self._pending.parent, PENDING_FOLDER)
        held.mkdir()
        for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):  # the manifest last
            safe_writing.link_inside(path, file.name, held / file.name)
        return held

    def _send_order(self, order: dict[str, Any]) -> None:
        """Send an order to the process, starting it if needed; an empty order only starts it."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        if order:
            try:
                write_line(self._process, order)
            except OSError as error:  # it has just exited; the next checkpoint starts another
                self._reports.put({"failed": order["name"], "step": order["step"], "why": str(error), "again": None})

    def _start(self) -> None:
        assert self._store is not None
        process = start_process(self._given, self._store, self._folder, self._start_id)
        threading.Thread(target=self._listen, args=(process,), name="unisono-uploads", daemon=True).start()
        self._process = process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Receive reports until the process ends (in its own thread, which touches only the queue)."""
        assert process.stdout is not None
        ended = False
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                report = json.loads(line)
                ended |= "ended" in report
                self._reports.put(report)
        if not ended:
            self._reports.put({"died": process.wait()})

    def _handle_report(self, report: dict[str, Any]) -> None:
        step, url, lag = report.get("step", self._newest), self._store.url if self._store else "", self._format_lag()
        why = report.get("why")
        if name := report.get("uploaded"):
            self._waiting.discard(name)
            self.uploaded = max(step, self.uploaded if self.uploaded is not None else -1)
            size, seconds = report["sent"], report["seconds"]
            self._say(f"uploaded step {step} to {url} ({size / 1e6:.1f} MB sent, {seconds:.1f} s)")
            self._note(step, {"upload": "there", "upload_bytes": size, "upload_seconds": seconds})
        elif report.get("failed"):
            again = f"; retrying in {report['again']:g} s" if report.get("again") else ""
            self._warn(step, "failed", f"upload of step {step} failed: {why} ({lag}){again}", why)
        elif name := report.get("left"):
            self._waiting.discard(name)
            self._warn(step, "left", f"step {step} was not uploaded to {url}, since a newer one is waiting ({lag})")
        elif report.get("stopped"):
            self._stopped = True
            text = f"uploads to {url} stopped, since this run was continued elsewhere: {why}. Stop one of the two"
            self._warn(step, "stopped", text, why)
        elif "died" in report and self._waiting and self._process is not None:
            why = f"the upload process exited with code {report['died']}; see {self._folder / 'logs' / 'upload.log'}"
            self._warn(step, "failed", f"upload of step {step} failed: {why} ({lag})", why)
            self._process = None  # the next checkpoint, or the next start, starts another
            self._waiting.clear()
            self._missed = self._newest

    def _warn(self, step: int, state: str, text: str, why: str | None = None) -> None:
        self._say(f"WARNING: {text}")
        self._note(step, {"upload": state, "upload_error": why} if why else {"upload": state})

    def _format_lag(self) -> str:
        return (
            "nothing uploaded since the start" if self.uploaded is None else f"not uploaded since step {self.uploaded}"
        )


def start_process(
    given: Checkpoint, store: ObjectStore, folder: Path, start: str | None, *, beats: bool = True
) -> subprocess.Popen[str]:
    """Start an upload process, which then waits for orders.

    Args:
        given: settings of the run.
        store: of the run.
        folder: of the run.
        start: of the run; it stops once another one owns the store.
        beats: whether it writes the run's heartbeat in the store.
    """
    kept = Retention.from_settings(given)
    settings = {
        "url": store.url,
        "options": dict(store.where.options),
        "deadline": store.where.deadline,
        "folder": str(folder.resolve()),
        "start": start,
        "retention": asdict(replace(kept, newest=given.upload.keep or kept.newest)),
        "beats": beats,
    }
    with safe_writing.open_to_append(folder, "logs/upload.log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "unisono.checkpoint.remote.upload_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8",
        )  # fmt: skip
    write_line(process, settings)
    return process


def write_line(process: subprocess.Popen[str], content: dict[str, Any]) -> None:
    """Send an order to an upload process."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(content) + "\n")
    process.stdin.flush()


def _is_complete(path: Path) -> bool:
    try:
        commit.read_manifest(path)
        return True
    except CheckpointError:
        return False
