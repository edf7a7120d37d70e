"""Between two steps: what all ranks do next, decided by all of them in one small reduction.

A rank may have been told to end, to save, or that the run is not its own any more, and the others do not know. Each
puts its wishes into a place of a few integers; the largest of each place is everyone's. So all ranks act on the same
wish at the same step. What follows from the step alone (evaluation, checkpoints) needs no reduction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.runtime.communicator import Group
from unisono.runtime.errors import Preempted, RunError
from unisono.supervise import identity, preemption
from unisono.supervise.run_lock import Lease

STOP, SAVE = "stop", "save"  # files in the run's folder that ask for it; rank 0 takes them away
_LOOK = 0.5  # seconds between two looks for them
_LOOK_LEASE = 3.0  # and at the lease
_MARGIN = 1.5  # a save may take longer than the ones before
_TO_END = 2.0  # seconds of the deadline that are left for the end itself, or a quarter of a short one
_PLACES = 8  # of the reduction: stop, save, milliseconds since the first signal, those of a save, a lost lease; spare


@dataclass(frozen=True)
class Decision:
    """What all ranks do now.

    Attributes:
        save: save after this step, whatever the step.
        stop: end the run here, after that.
        preempted: end it at once, since the job has to go; `save` says whether there is time to save.
        why: what was decided about the save, for the sentence at the end.
        left: seconds until the run has to end.
    """

    save: bool = False
    stop: bool = False
    preempted: bool = False
    why: str = ""
    left: float = field(default=math.inf, compare=False)

    def __or__(self, later: Decision) -> Decision:
        """This one and what was decided since."""
        wishes = self.save or later.save, self.stop or later.stop, self.preempted or later.preempted
        return Decision(*wishes, later.why or self.why, min(self.left, later.left))


class Boundary:
    """Where the ranks of a run decide; made by all of them together.

    Args:
        group: all ranks.
        folder: of the run.
        deadline: seconds from a signal to the end of the process.
        lease: of the run, if this process, or its launcher, has one.
        writing: whether this is a run that trains, of which something can be asked.
    """

    def __init__(
        self, group: Group, folder: Path, deadline: float, lease: Lease | None = None, writing: bool = True
    ) -> None:
        self._group, self._folder, self._deadline, self._lease = group, folder, deadline, lease
        self._processes = group.gather(identity.mine(), "the numbers of all processes")
        self._looked = self._looked_at_lease = -math.inf
        if group.rank == 0 and writing:
            self._taken()  # what an earlier start was asked for

    def open(self) -> None:
        """From now on, signals are answered here."""
        here = [one for one in self._processes if one["machine"] == identity.machine()]
        preemption.answered(self._deadline, here)

    def decide(self, saving: float = 0.0) -> Decision:
        """What all ranks do now; every rank calls this after every step, and again after whatever has taken long.

        Args:
            saving: seconds that a save takes, as far as this rank knows.

        Raises:
            RunError: on every rank, if another start has taken over the run.
        """
        waited = preemption.waited()
        wishes = self._taken() if self._group.rank == 0 else set()
        lost = self._lost() if self._group.rank == 0 else None
        signalled = 0 if waited is None else int(waited * 1000) + 1
        own = [STOP in wishes, SAVE in wishes, signalled, int(saving * 1000), lost is not None]
        numbers = [*map(int, own), *[0] * (_PLACES - len(own))]
        stop, save, signalled, cost, gone, *_ = self._group.highest(numbers, "what all ranks do after this step")
        if gone:
            raise RunError(self._group.gather(lost, "who has taken over the run")[0] or "the run was taken over")
        if not signalled:
            return Decision(bool(stop or save), bool(stop))
        need, left = cost / 1000, self._deadline - (signalled - 1) / 1000
        fits = need * _MARGIN <= left
        why = "" if fits else (
            f"saving takes about {need:.1f} s and {max(0.0, left):.1f} s were left of launch.preempt_deadline="
            f"{self._deadline:g}"
        )  # fmt: skip
        return Decision(fits, bool(stop), True, why, left - min(_TO_END, self._deadline / 4))

    def owned(self) -> None:
        """See, on all ranks together, that the run has not been taken over; before anything is written into it.

        Raises:
            RunError: on every rank, if it has.
        """
        lost = self._lost(at_once=True) if self._group.rank == 0 else None
        if told := self._group.gather(lost, "whether the run has been taken over")[0]:
            raise RunError(told)

    def kept(self) -> None:
        """See, on this rank alone and from any of its threads, that the run has not been taken over.

        Raises:
            RunError: if it has.
        """
        if self._lease is not None:
            self._lease.check()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a save: it is not broken off."""
        with preemption.unbroken():
            yield

    def preempted(self, made: int, total: int, saved: int, why: str) -> Preempted:
        """The error with which a preempted run ends, after `made` of `total` updates, of which `saved` are kept."""
        rest = "which is saved" if saved == made else (
            f"which is not saved: {why}; the newest checkpoint is that of step {saved}" if saved
            else f"which is not saved: {why}; there is no checkpoint yet"
        )  # fmt: skip
        error = Preempted(f"preempted after step {made} of {total}, {rest}. Start the same command again to go on")
        preemption.decided(error)
        return error

    def _taken(self) -> set[str]:
        """The wishes that lie in the run's folder; they are taken away."""
        if time.monotonic() - self._looked < _LOOK:
            return set()
        self._looked = time.monotonic()
        found = set()
        for name in (STOP, SAVE):
            with suppress(OSError):
                (self._folder / name).unlink()
                found.add(name)
        return found

    def _lost(self, at_once: bool = False) -> str | None:
        if self._lease is None or (not at_once and time.monotonic() - self._looked_at_lease < _LOOK_LEASE):
            return None
        self._looked_at_lease = time.monotonic()
        return self._lease.lost()
