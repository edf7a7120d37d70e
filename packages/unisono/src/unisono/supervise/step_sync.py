"""Between two steps, all ranks decide together what to do next, in one small reduction.

A rank may have been asked to stop or to save, or may have lost the run to another process; a callback on it may have
requested something or failed; and the other ranks do not know. Each rank encodes its requests as a few integers, and
the maximum of each applies to all. So all ranks act on the same request at the same step.
"""

from __future__ import annotations

import math
import stat
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.runtime.communication.communicator import Communicator
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.errors import Preempted, RunError
from unisono.supervise import identity, preemption
from unisono.supervise.run_lock import RunLock

STOP, SAVE = "stop", "save"  # request files in the run's directory; rank 0 removes them
AS_REQUESTED = "as requested"  # why a run stopped if nothing but a user asked it to, and not a callback
STOP_AFTER = "run.stop_after="  # the beginning of why, if that setting did

_REQUEST_INTERVAL = 0.5  # seconds between checks for request files
_LOCK_INTERVAL = 3.0  # seconds between checks of the lock
_SAVE_MARGIN = 1.5  # a save may take longer than earlier ones
_END_RESERVE = 2.0  # seconds of the deadline reserved for shutting down, or a quarter of a short deadline


@dataclass(frozen=True)
class RankRequests:
    """The requests of one rank.

    Attributes:
        stop: Save and end the run here.
        save: Save after this step.
        evaluate: Evaluate after this step.
        reasons: Who requests what and why, for the log; empty for requests that follow from the step alone.
        error: Of a callback; the run ends with it.
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
        save: Save after this step, on or off schedule.
        stop: End the run here, after saving.
        evaluate: Evaluate after this step, before saving.
        preempted: End at once because the job is preempted; `save` says whether there is time to save.
        not_saved_because: Why a preempted run does not save, for the final message; empty if it does.
        reasons: Who requested what and why, over all ranks.
        seconds_left: Seconds until the run has to end.
    """

    save: bool = False
    stop: bool = False
    evaluate: bool = False
    preempted: bool = False
    not_saved_because: str = ""
    reasons: tuple[str, ...] = ()
    seconds_left: float = field(default=math.inf, compare=False)

    def __or__(self, later: Decision) -> Decision:
        """Combine this decision with a later one."""
        return Decision(
            self.save or later.save,
            self.stop or later.stop,
            self.evaluate or later.evaluate,
            self.preempted or later.preempted,
            later.not_saved_because or self.not_saved_because,
            (*self.reasons, *later.reasons),
            min(self.seconds_left, later.seconds_left),
        )


class StepSync:
    """Where the ranks of a run decide together. Every method except `check_lease` is collective.

    Args:
        communicator: Of all ranks.
        directory: Of the run.
        deadline: Seconds from a signal to the end of the process.
        lease: The run's lock, if this process or its launcher holds it.
        watches_folder: Whether this rank looks for request files and other starts in the directory; None: rank 0 does.
    """

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        deadline: float,
        lease: RunLock | None = None,
        watches_folder: bool | None = None,
    ) -> None:
        self._communicator, self._directory, self._deadline, self._lease = communicator, directory, deadline, lease
        self._processes = communicator.gather(identity.own_identity(), "the numbers of all processes")
        self._last_look = self._last_lock_look = -math.inf
        self._watches_folder = communicator.rank == 0 if watches_folder is None else watches_folder
        if self._watches_folder:
            self._take_requests()  # discard requests meant for an earlier start

    def take_over_signals(self) -> None:
        """Handle signals at step boundaries from now on."""
        local = [process for process in self._processes if process["machine"] == identity.machine_id()]
        preemption.defer_signals(self._deadline, local)

    def decide(self, requests: RankRequests | None = None, saving: float = 0.0) -> Decision:
        """Decide what all ranks do now; every rank calls this after every step, and again after any long operation.

        Args:
            requests: Requests of this rank.
            saving: Estimated duration of a save in seconds, as far as this rank knows.

        Raises:
            RunError: On every rank, if another start has taken over the run, or its folder has vanished.
            Exception: On every rank, the error of a callback that failed on one of them.
        """
        requests = requests or RankRequests()
        seconds = preemption.seconds_since_signal()
        from_files = self._take_requests() if self._watches_folder else set()
        takeover = self._check_takeover() if self._watches_folder else None
        since = 0 if seconds is None else int(seconds * 1000) + 1  # milliseconds
        local = [
            STOP in from_files or requests.stop, SAVE in from_files or requests.save, since, int(saving * 1000),
            takeover is not None,
            requests.evaluate, bool(requests.reasons), requests.error is not None,
        ]  # fmt: skip
        numbers = self._communicator.reduce_max([*map(int, local)], "the decision of all ranks after this step")
        stop, save, since, cost, taken_over, evaluate, has_reasons, has_error = numbers
        if taken_over:
            owners = self._communicator.gather(takeover, "the new owner of the run")
            raise RunError(next(filter(None, owners), "the run was taken over"))
        if has_error:

            def fail() -> None:
                assert requests.error is not None
                raise requests.error

            raise_everywhere(
                self._communicator, fail if requests.error is not None else None, "the error of a callback"
            )
        reasons = self._gather_reasons(requests.reasons) if has_reasons else ()
        if not since:
            return Decision(bool(stop or save), bool(stop), bool(evaluate), reasons=reasons)
        save_seconds, remaining = cost / 1000, self._deadline - (since - 1) / 1000
        fits = save_seconds * _SAVE_MARGIN <= remaining
        reason = "" if fits else (
            f"saving takes about {save_seconds:.1f} s, but only {max(0.0, remaining):.1f} s were left of "
            f"launch.preempt_deadline={self._deadline:g}"
        )  # fmt: skip
        seconds_left = remaining - min(_END_RESERVE, self._deadline / 4)
        return Decision(fits, bool(stop), False, True, reason, reasons, seconds_left)

    def refuse_if_lost(self) -> None:
        """Check on all ranks that the run has not been taken over, before anything is written into it.

        Raises:
            RunError: On every rank, if it has.
        """
        check = self._lease.check_held if self._lease is not None and self._watches_folder else None
        raise_everywhere(self._communicator, check, "whether the run has been taken over")

    def check_lease(self) -> None:
        """Check that the run has not been taken over, on this rank only; may be called from any thread.

        Raises:
            RunError: If it has.
        """
        if self._lease is not None:
            self._lease.check_held()

    def saving(self) -> AbstractContextManager[None]:
        """Return the context of a save, whose end a preemption waits for."""
        return preemption.finish_before_exit()

    def preempted_error(self, step: int, total: int, saved: int, reason: str) -> Preempted:
        """Return the error that ends a preempted run after a step; `saved` is that of the newest checkpoint."""
        newest = f"the newest checkpoint is from step {saved}" if saved else "there is no checkpoint yet"
        rest = "which is saved" if saved == step else f"which is not saved: {reason}; {newest}"
        error = Preempted(f"preempted after step {step} of {total}, {rest}")
        preemption.announce_end(error)
        return error

    def _gather_reasons(self, reasons: Sequence[str]) -> tuple[str, ...]:
        """Return the reasons of all ranks without duplicates, naming the ranks unless all share a reason."""
        everyone = self._communicator.gather(list(reasons), "the requests of all ranks after this step")
        ranks: dict[str, list[str]] = {}
        for rank, rank_reasons in enumerate(everyone):
            for reason in dict.fromkeys(rank_reasons):
                ranks.setdefault(reason, []).append(str(rank))
        alike = len(everyone)
        return tuple(r if len(who) == alike else f"{r} (rank {', '.join(who)})" for r, who in ranks.items())

    def _take_requests(self) -> set[str]:
        """Return the request files found in the run's directory, and remove them; a link is no request."""
        if time.monotonic() - self._last_look < _REQUEST_INTERVAL:
            return set()
        self._last_look = time.monotonic()
        requests = set()
        for name in (STOP, SAVE):
            with suppress(OSError):
                path = self._directory / name
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()
                    requests.add(name)
        return requests

    def _check_takeover(self) -> str | None:
        if self._lease is None or time.monotonic() - self._last_lock_look < _LOCK_INTERVAL:
            return None
        self._last_lock_look = time.monotonic()
        return self._lease.describe_loss()
