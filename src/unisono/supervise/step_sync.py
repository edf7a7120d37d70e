"""Between two steps, all ranks decide together what to do next, in one small reduction.

A rank may have been asked to end or to save, or may have lost the run to another process; a callback on it may request
something, or have failed; and the other ranks do not know. Each rank encodes its requests in a few integers, and the
maximum of each counts for all. So all ranks act on the same request at the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.runtime.communicator import Communicator
from unisono.runtime.consensus import raise_everywhere
from unisono.runtime.errors import Preempted, RunError
from unisono.supervise import identity, preemption
from unisono.supervise.run_lock import RunLock

STOP, SAVE = "stop", "save"  # files in the run's directory that ask for it; rank 0 takes them away
_REQUEST_INTERVAL = 0.5  # seconds between two looks for them
_LOCK_INTERVAL = 3.0  # and at the lease
_SAVE_MARGIN = 1.5  # a save may take longer than the ones before
_END_RESERVE = 2.0  # seconds of the deadline that are left for the end itself, or a quarter of a short one


@dataclass(frozen=True)
class RankRequests:
    """What one rank asks for.

    Attributes:
        stop: end the run here, saved.
        save: save after this step.
        evaluate: evaluate after this step.
        reasons: who asks for what and why, for the log; empty where it follows from the step alone.
        error: of a callback; the run ends with it.
    """

    stop: bool = False
    save: bool = False
    evaluate: bool = False
    reasons: tuple[str, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True)
class Decision:
    """What all ranks do now.

    Attributes:
        save: save after this step, whatever the step.
        stop: end the run here, after that.
        evaluate: evaluate after this step, before that.
        preempted: end it at once, since the job has to go; `save` says whether there is time to save.
        why: what was decided about the save, for the sentence at the end.
        reasons: who asked for what and why, of all ranks.
        seconds_left: seconds until the run has to end.
    """

    save: bool = False
    stop: bool = False
    evaluate: bool = False
    preempted: bool = False
    why: str = ""
    reasons: tuple[str, ...] = ()
    seconds_left: float = field(default=math.inf, compare=False)

    def __or__(self, later: Decision) -> Decision:
        """This one and what was decided since."""
        return Decision(
            self.save or later.save,
            self.stop or later.stop,
            self.evaluate or later.evaluate,
            self.preempted or later.preempted,
            later.why or self.why,
            (*self.reasons, *later.reasons),
            min(self.seconds_left, later.seconds_left),
        )


class StepSync:
    """Where the ranks of a run decide together. Every method but `check_lease` is collective.

    Args:
        communicator: of all ranks.
        directory: of the run.
        deadline: seconds from a signal to the end of the process.
        lease: of the run, if this process, or its launcher, has one.
        writing: whether this is a run that trains, of which something can be asked.
    """

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        deadline: float,
        lease: RunLock | None = None,
        writing: bool = True,
    ) -> None:
        self._communicator, self._directory, self._deadline, self._lease = communicator, directory, deadline, lease
        self._processes = communicator.gather(identity.own_identity(), "the numbers of all processes")
        self._last_look = self._last_lock_look = -math.inf
        if communicator.rank == 0 and writing:
            self._take_requests()  # what an earlier start was asked for

    def open(self) -> None:
        """From now on, signals are answered here."""
        here = [one for one in self._processes if one["machine"] == identity.machine_id()]
        preemption.defer_signals(self._deadline, here)

    def decide(self, wishes: RankRequests | None = None, saving: float = 0.0) -> Decision:
        """What all ranks do now; every rank calls this after every step, and again after whatever has taken long.

        Args:
            wishes: of this rank.
            saving: seconds that a save takes, as far as this rank knows.

        Raises:
            RunError: on every rank, if another start has taken over the run.
            Exception: on every rank, of a callback that failed on one of them.
        """
        wishes = wishes or RankRequests()
        waited = preemption.seconds_since_signal()
        first = self._communicator.rank == 0
        asked = self._take_requests() if first else set()
        lost = self._check_takeover() if first else None
        since = 0 if waited is None else int(waited * 1000) + 1  # milliseconds
        own = [
            STOP in asked or wishes.stop, SAVE in asked or wishes.save, since, int(saving * 1000), lost is not None,
            wishes.evaluate, bool(wishes.reasons), wishes.error is not None,
        ]  # fmt: skip
        numbers = self._communicator.reduce_max([*map(int, own)], "what all ranks do after this step")
        stop, save, since, cost, gone, evaluate, explained, failed = numbers
        if gone:
            raise RunError(self._communicator.gather(lost, "who has taken over the run")[0] or "the run was taken over")
        if failed:
            self._raise_everywhere(wishes.error)
        reasons = self._gather_reasons(wishes.reasons) if explained else ()
        if not since:
            return Decision(bool(stop or save), bool(stop), bool(evaluate), reasons=reasons)
        need, left = cost / 1000, self._deadline - (since - 1) / 1000
        fits = need * _SAVE_MARGIN <= left
        why = "" if fits else (
            f"saving takes about {need:.1f} s, but only {max(0.0, left):.1f} s were left of launch.preempt_deadline="
            f"{self._deadline:g}"
        )  # fmt: skip
        until = left - min(_END_RESERVE, self._deadline / 4)
        return Decision(fits, bool(stop), False, True, why, reasons, until)

    def refuse_if_lost(self) -> None:
        """See, on all ranks together, that the run has not been taken over; before anything is written into it.

        Raises:
            RunError: on every rank, if it has.
        """
        check = self._lease.check_held if self._lease is not None and self._communicator.rank == 0 else None
        raise_everywhere(self._communicator, check, "whether the run has been taken over")

    def check_lease(self) -> None:
        """See, on this rank alone and from any of its threads, that the run has not been taken over.

        Raises:
            RunError: if it has.
        """
        if self._lease is not None:
            self._lease.check_held()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The context of a save: a preemption waits for its end."""
        with preemption.finish_before_exit():
            yield

    def preempted(self, made: int, total: int, saved: int, why: str) -> Preempted:
        """The error with which a preempted run ends, after `made` of `total` updates, of which `saved` are kept."""
        kept = f"the newest checkpoint is from step {saved}" if saved else "there is no checkpoint yet"
        rest = "which is saved" if saved == made else f"which is not saved: {why}; {kept}"
        error = Preempted(f"preempted after step {made} of {total}, {rest}")
        preemption.announce_end(error)
        return error

    def _raise_everywhere(self, error: Exception | None) -> None:
        """Raise what a callback has raised, on every rank."""

        def fail() -> None:
            assert error is not None
            raise error

        raise_everywhere(self._communicator, fail if error is not None else None, "which callback has failed")

    def _gather_reasons(self, reasons: Sequence[str]) -> tuple[str, ...]:
        """The reasons of all ranks, each once, with the ranks unless all have it."""
        everyone = self._communicator.gather(list(reasons), "who asks for what after this step")
        found = dict.fromkeys(reason for theirs in everyone for reason in theirs)
        ranks = {reason: [str(rank) for rank, theirs in enumerate(everyone) if reason in theirs] for reason in found}
        return tuple(
            reason if len(ranks[reason]) == len(everyone) else f"{reason} (rank {', '.join(ranks[reason])})"
            for reason in found
        )

    def _take_requests(self) -> set[str]:
        """The requests that lie in the run's directory; they are taken away."""
        if time.monotonic() - self._last_look < _REQUEST_INTERVAL:
            return set()
        self._last_look = time.monotonic()
        found = set()
        for name in (STOP, SAVE):
            with suppress(OSError):
                (self._directory / name).unlink()
                found.add(name)
        return found

    def _check_takeover(self) -> str | None:
        if self._lease is None or time.monotonic() - self._last_lock_look < _LOCK_INTERVAL:
            return None
        self._last_lock_look = time.monotonic()
        return self._lease.describe_takeover()
