"""Saves in the background: copies the state, writes it during the next steps, and reports on all ranks together.

At most one save is in flight; the next one waits for it. A thread writes it and communicates with the other ranks
through its own group. While a save is in flight, all ranks exchange a small message after every step, so that all learn
of its end at the same step. A failure ends the run at that step or, depending on the settings, is reported until a
later save succeeds, so that a run without checkpoints never ends successfully. Temporary failures, such as an
unreachable file server, are retried first, from the copies.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import NodeParts, Snapshot
from unisono.checkpoint.core.manifest import folder_name
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.core.staging import Staging
from unisono.config.schema.run import Checkpoint as Settings
from unisono.engines.state import ArrayShard
from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.errors import NonFiniteError, SaveError, UnisonoError

log = logging.getLogger(__name__)

_EXIT_WAIT = 10.0  # seconds that a failing run waits for the save in flight
_FIRST_PAUSE, _PAUSE = 1.0, 10.0  # seconds before a save is tried again; each time twice as long


@dataclass
class _PendingSave:
    """A save in flight, or its outcome."""

    step: int
    started: float = field(default_factory=time.monotonic)
    last_attempt: float = field(default_factory=time.monotonic)  # of the latest attempt
    thread: threading.Thread | None = None
    path: Path | None = None
    error: BaseException | None = None
    overdue: bool = False

    @property
    def is_over(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Saver:
    """Saves the checkpoints of one start of a run. Every method is collective. As a context it ends with `finish`.

    Args:
        folder: `checkpoints` of the run.
        group: all ranks.
        settings: the `checkpoint` group of the configuration.
        first: updates made in the checkpoint that the run resumes from; 0 if there is none.
        finished: called on every rank with the folder of every finished checkpoint.
        say: called on every rank with a line about a failed save, if the run continues.
        deadline: seconds after which a save that is not done on all ranks counts as failed.
        allowed: see `commit.save_checkpoint`.
        parts: the same.

    Attributes:
        saved: updates made in the newest checkpoint; 0 if there is none.
        seconds: duration of the last save, from its last attempt until all ranks knew of its end; 0 if there was
            none.
    """

    def __init__(
        self,
        folder: Path,
        group: Communicator,
        settings: Settings,
        *,
        first: int = 0,
        finished: Callable[[Path], None] | None = None,
        say: Callable[[str], None] | None = None,
        allowed: Callable[[], None] | None = None,
        deadline: float = math.inf,
        parts: NodeParts | None = None,
    ) -> None:
        self._parts = parts
        self._folder, self._group, self._settings, self._deadline = folder, group, settings, deadline
        self._retention = Retention.from_settings(settings)
        self._save_group = group.duplicate() if settings.background else group
        self._staging = Staging()
        self._pending: _PendingSave | None = None
        self.saved = first
        self.seconds = 0.0
        self._failed: SaveError | None = None
        self._finished, self._say, self._allowed = finished, say, allowed
        self._no_retries = threading.Event()

    @property
    def unsaved_since(self) -> int | None:
        """The step of the last checkpoint, if a later save has failed and none has succeeded since; else None."""
        return self.saved if self._failed is not None else None

    def prepare(self, shards: Sequence[ArrayShard]) -> None:
        """Allocate the memory for copies in the background, so that no save has to wait for it."""
        if self._settings.background:
            self._staging.prepare(shards)

    def save(self, snapshot: Snapshot) -> None:
        """Save the state as it is now; it may change as soon as this returns. A saved step is not saved again.

        Args:
            snapshot: its `parent` is the checkpoint that this start saved last, or resumed from.

        Raises:
            SaveError: on every rank, if the previous save failed; without background saving, if this one did.
            NonFiniteError: likewise.
        """
        if self._pending is not None and self._pending.overdue:
            self.check()
            if self._pending is not None:  # the disk still does not respond; the run continues without a save
                return
        self._wait_for_pending()
        if snapshot.step == self.saved:
            return
        pending = self._pending = _PendingSave(snapshot.step)
        copied = self._staging.copy(snapshot.shards) if self._settings.background else snapshot.shards
        kept = replace(snapshot, shards=copied, parent=folder_name(self.saved) if self.saved else None)

        def attempt() -> Path:
            return commit.save_checkpoint(
                self._folder, kept, self._save_group, self._retention, allowed=self._allowed, parts=self._parts
            )

        def write() -> None:
            try:
                self._staging.wait()
                pending.path = self._save_with_retries(pending, attempt)
            except BaseException as error:  # reported by `_resolve`, on every rank
                pending.error = error

        if self._settings.background:
            pending.thread = threading.Thread(target=write, name=f"save after step {snapshot.step}", daemon=True)
            pending.thread.start()
        else:
            write()
            self._wait_for_pending()

    def stop_retrying(self) -> None:
        """Stop retrying, since this run must end soon; every rank calls this before the same save."""
        self._no_retries.set()

    def check(self) -> None:
        """After a step, collect the outcome of the save in flight if it is done on all ranks.

        Raises:
            SaveError: if it failed, on every rank after the same step.
            NonFiniteError: if the state was not finite, likewise.
        """
        if self._pending is not None:
            self._resolve(self._pending)

    def finish(self) -> None:
        """Wait for the save in flight.

        Raises:
            SaveError: if it failed, or an earlier one did and none succeeded since, even if the run continued.
            NonFiniteError: if the state was not finite.
        """
        self._wait_for_pending()
        if self._failed is not None:
            raise self._failed

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._staging.wait_until_prepared()
        self._no_retries.set()
        if kind is None:
            self.finish()
        elif self._pending is not None and self._pending.thread is not None:
            # Other ranks may be gone, so do not communicate. A save interrupted here is cleaned up by a later one.
            self._pending.thread.join(_EXIT_WAIT)

    def _save_with_retries(self, pending: _PendingSave, attempt: Callable[[], Path]) -> Path:
        """A commit, retried as long as the settings allow while all ranks' disk errors are temporary."""
        pause, tries = _FIRST_PAUSE, 1
        while True:
            try:
                return attempt()
            except SaveError as error:
                if not error.transient:
                    raise
                spent = time.monotonic() - pending.started
                over = self._no_retries.is_set() or spent + pause > self._settings.retry_for
                if self._save_group.reduce_max([int(over)], "whether a save is retried")[0]:
                    more = f" {tries} attempts in {spent:.0f} s (checkpoint.retry_for)." if tries > 1 else ""
                    raise SaveError(f"{error}{more}") from error
                log.warning("the checkpoint of step %d: %s Retrying in %g s", pending.step, error, pause)
            self._no_retries.wait(pause)
            pending.last_attempt = time.monotonic()
            pause, tries = min(2 * pause, _PAUSE), tries + 1

    def _wait_for_pending(self) -> None:
        """Wait for the save in flight and collect its outcome on all ranks."""
        pending = self._pending
        if pending is None:
            return
        if pending.thread is not None:
            pending.thread.join()
        self._resolve(pending)
        assert self._pending is None

    def _resolve(self, pending: _PendingSave) -> None:
        """Act on a save's outcome once it is done on all ranks."""
        over, error, took = pending.is_over, pending.error, time.monotonic() - pending.started
        waited = 0.0 if over else took  # the same on all ranks where nothing is late, which is cheap to gather
        mine = [over, type(error).__name__ if over and error else "", str(error) if over and error else "", waited]
        replies = self._group.gather(mine, f"the outcome of the checkpoint of step {pending.step}")
        if not all(over for over, *_ in replies):
            if max(took for *_, took in replies) > self._deadline and not pending.overdue:
                pending.overdue = True
                late = ", ".join(str(rank) for rank, (over, *_) in enumerate(replies) if not over)
                self._fail(
                    pending,
                    SaveError.__name__,
                    f"rank {late} has not written its part for {self._deadline:g} s "
                    "(launch.deadlines.save); its disk or the store does not respond",
                )
            return
        self._pending = None
        faults = [(kind, text) for _, kind, text, _ in replies if kind]
        if not faults:
            self.saved, self._failed = pending.step, None
            self.seconds = time.monotonic() - pending.last_attempt
            if self._finished is not None:
                assert pending.path is not None
                self._finished(pending.path)
            return
        if isinstance(error, Exception) and not isinstance(error, UnisonoError):
            log.error("a checkpoint could not be written", exc_info=error)
        kind, text = faults[0]
        if any(kind == NonFiniteError.__name__ for kind, _ in faults):
            raise NonFiniteError(text)
        self._fail(pending, kind, text)

    def _fail(self, pending: _PendingSave, kind: str, text: str) -> None:
        """End the run because of a failed save, or continue without it, as the settings say."""
        since = f"the newest is from step {self.saved}" if self.saved else "there is none yet"
        why = text if kind == SaveError.__name__ else f"{kind}: {text}"
        failed = SaveError(f"the checkpoint of step {pending.step} was not written ({since}): {why}")
        if self._settings.on_failure == "stop":
            raise failed
        self._failed = failed
        if self._say is not None:
            self._say(f"{failed} The run continues; the next save that is due will try again (checkpoint.on_failure).")
