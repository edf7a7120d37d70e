"""Saves beside training: a copy of the state now, the files meanwhile, and what came of it on every rank at once.

One save is in flight, and the next waits for it. It is written by a thread that talks to those of the other ranks over
a group of its own. While one is in flight, every step ends with a small message of all ranks, so that all of them learn
of its end at the same step. A failure ends the run there or, where the settings say so, is told until a later save
succeeds: one that nobody asked for would make a run without checkpoints that ends with success. What may be over soon,
as a file server that is away, is tried again first, from the copies.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.retention import Retention
from unisono.checkpoint.core.staging import Staging
from unisono.config.schema.run import Checkpoint as Settings
from unisono.engines.state import Shard
from unisono.runtime.communicator import Group, Json
from unisono.runtime.errors import NonFiniteError, SaveError, UnisonoError

log = logging.getLogger(__name__)

_LAST_WAIT = 10.0  # seconds that a run which fails gives the save in flight
_FIRST_PAUSE, _PAUSE = 1.0, 10.0  # seconds before a save is tried again; each time twice as long


@dataclass
class _Flight:
    """A save on its way, or what came of it."""

    made: int
    began: float = field(default_factory=time.monotonic)
    tried: float = field(default_factory=time.monotonic)  # for the last time
    thread: threading.Thread | None = None
    path: Path | None = None
    error: BaseException | None = None
    overdue: bool = False

    @property
    def over(self) -> bool:
        return self.thread is None or not self.thread.is_alive()


class Saver:
    """The checkpoints of one start of a run. Every method is collective. A context that ends with `finish`.

    Args:
        folder: `checkpoints` of the run.
        group: all ranks.
        settings: the `checkpoint` group of the configuration.
        first: updates made before, in the checkpoint that the run goes on from; 0 if there is none.
        finished: called on every rank with the folder of every checkpoint, once it is there.
        say: called on every rank with a line about a save that failed, where the run goes on.
        deadline: seconds after which a save that is not over on all ranks has failed.
        allowed: see `commit.save`.

    Attributes:
        saved: updates made in the newest checkpoint; 0 if there is none.
        seconds: that the last save took, from when it was tried last until all ranks knew of its end; 0 if there was
            none.
    """

    def __init__(
        self,
        folder: Path,
        group: Group,
        settings: Settings,
        *,
        first: int = 0,
        finished: Callable[[Path], None] | None = None,
        say: Callable[[str], None] | None = None,
        allowed: Callable[[], None] | None = None,
        deadline: float = math.inf,
    ) -> None:
        self._folder, self._group, self._settings, self._deadline = folder, group, settings, deadline
        self._retention = Retention.of(settings)
        self._own = group.another() if settings.background else group
        self._staging = Staging()
        self._flight: _Flight | None = None
        self.saved = first
        self.seconds = 0.0
        self._failed: SaveError | None = None
        self._finished, self._say, self._allowed = finished, say, allowed
        self._hurried = threading.Event()

    @property
    def unsaved_since(self) -> int | None:
        """The step of the last checkpoint, if a later save has failed and none has succeeded since; else None."""
        return self.saved if self._failed is not None else None

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Ask for the memory that copies of such pieces take, beside the steps, so that no save has to wait for it."""
        if self._settings.background:
            self._staging.prepare(shards)

    def save(
        self,
        made: int,
        shards: Sequence[Shard],
        state: dict[str, Json],
        about: Mapping[str, Json] | None = None,
        metric: Mapping[str, float] | None = None,
        *,
        holds: str = "everything",
    ) -> None:
        """Save the state as it is now; it may change as soon as this returns. A step that is saved already is left.

        Args:
            made: updates made.
            shards: this rank's pieces.
            state: JSON, the same on every rank.
            about: what makes it, JSON.
            metric: of an evaluation of this very state.
            holds: `everything`, or `model` if no run can go on from it.

        Raises:
            SaveError: on every rank, of the save before; without a background, of this one.
            NonFiniteError: likewise.
        """
        if self._flight is not None and self._flight.overdue:
            self.check()
            if self._flight is not None:  # its disk still does not answer, and the run goes on without
                return
        self._settle()
        if made == self.saved:
            return
        flight = self._flight = _Flight(made)
        copies = self._staging.copy(shards) if self._settings.background else shards
        parent = commit.name_of(self.saved) if self.saved else None

        def attempt() -> Path:
            return commit.save(
                self._folder, made, copies, state, self._own, self._retention,
                about=about, metric=metric, parent=parent, holds=holds, allowed=self._allowed,
            )  # fmt: skip

        def write() -> None:
            try:
                self._staging.wait()
                flight.path = self._tried_again(flight, attempt)
            except BaseException as error:  # told by `_resolve`, on every rank
                flight.error = error

        if self._settings.background:
            flight.thread = threading.Thread(target=write, name=f"save after step {made}", daemon=True)
            flight.thread.start()
        else:
            write()
            self._settle()

    def hurry(self) -> None:
        """From now on, try nothing again: this run has to go; every rank calls this before the same save."""
        self._hurried.set()

    def check(self) -> None:
        """See, after a step, what came of the save in flight, if it is over on all ranks.

        Raises:
            SaveError: if it failed, on every rank after the same step.
            NonFiniteError: if the state was not finite, likewise.
        """
        if self._flight is not None:
            self._resolve(self._flight)

    def finish(self) -> None:
        """Wait for the save in flight.

        Raises:
            SaveError: if it failed, or one before it with none since, even where the run went on.
            NonFiniteError: if the state was not finite.
        """
        self._settle()
        if self._failed is not None:
            raise self._failed

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._staging.prepared()
        self._hurried.set()
        if kind is None:
            self.finish()
        elif self._flight is not None and self._flight.thread is not None:
            # Others may be gone, so nothing is asked of them. What is cut off is absent, and swept by a later save.
            self._flight.thread.join(_LAST_WAIT)

    def _tried_again(self, flight: _Flight, attempt: Callable[[], Path]) -> Path:
        """A commit, tried again as long as the settings say while what all ranks hear from their disks may pass."""
        pause, tries = _FIRST_PAUSE, 1
        while True:
            try:
                return attempt()
            except SaveError as error:
                if not error.passing:
                    raise
                spent = time.monotonic() - flight.began
                over = self._hurried.is_set() or spent + pause > self._settings.retry_for
                if self._own.highest([int(over)], "whether a save is tried again")[0]:
                    more = f" It was tried {tries} times in {spent:.0f} s (checkpoint.retry_for)." if tries > 1 else ""
                    raise SaveError(f"{error}{more}") from error
                log.warning("the checkpoint of step %d: %s It is tried again in %g s", flight.made, error, pause)
            self._hurried.wait(pause)
            flight.tried = time.monotonic()
            pause, tries = min(2 * pause, _PAUSE), tries + 1

    def _settle(self) -> None:
        """Wait for the save in flight, and for what came of it on all ranks."""
        flight = self._flight
        if flight is None:
            return
        if flight.thread is not None:
            flight.thread.join()
        self._resolve(flight)
        assert self._flight is None

    def _resolve(self, flight: _Flight) -> None:
        """What all ranks say of a save; nothing happens until it is over on all of them."""
        over, error, took = flight.over, flight.error, time.monotonic() - flight.began
        mine = [over, type(error).__name__ if over and error else "", str(error) if over and error else "", took]
        told = self._group.gather(mine, f"what became of the checkpoint of step {flight.made}")
        if not all(over for over, *_ in told):
            if max(took for *_, took in told) > self._deadline and not flight.overdue:
                flight.overdue = True
                late = ", ".join(str(rank) for rank, (over, *_) in enumerate(told) if not over)
                self._fail(
                    flight,
                    SaveError.__name__,
                    f"rank {late} has not written its part for {self._deadline:g} s "
                    "(launch.deadlines.save); its disk does not answer",
                )
            return
        self._flight = None
        faults = [(kind, text) for _, kind, text, _ in told if kind]
        if not faults:
            self.saved, self._failed = flight.made, None
            self.seconds = time.monotonic() - flight.tried
            if self._finished is not None:
                assert flight.path is not None
                self._finished(flight.path)
            return
        if isinstance(error, Exception) and not isinstance(error, UnisonoError):
            log.error("a checkpoint could not be written", exc_info=error)
        kind, text = faults[0]
        if any(kind == NonFiniteError.__name__ for kind, _ in faults):
            raise NonFiniteError(text)
        self._fail(flight, kind, text)

    def _fail(self, flight: _Flight, kind: str, text: str) -> None:
        """End the run for a save that failed, or go on without, as the settings say."""
        failed = SaveError(_sentence(flight.made, self.saved, kind, text))
        if self._settings.on_failure == "stop":
            raise failed
        self._failed = failed
        if self._say is not None:
            self._say(f"{failed} The run goes on, and the next save that is due tries again (checkpoint.on_failure).")


def _sentence(made: int, saved: int, kind: str, text: str) -> str:
    """What happened to a save, for people."""
    since = f"the newest is of step {saved}" if saved else "there is none yet"
    why = text if kind == SaveError.__name__ else f"{kind}: {text}"
    return f"the checkpoint of step {made} was not written ({since}): {why}"
