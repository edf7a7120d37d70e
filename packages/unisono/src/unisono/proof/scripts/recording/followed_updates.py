"""How far a script is followed: some updates; and more where they are cheap, or the next epoch begins soon."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

_LATEST = 17  # update to go on to, with which an epoch of 16 begins again
_SECONDS = 0.5  # of processor time that the further ones may take, beside about 4 s to start a process
_ROOM = 2**28  # bytes that they may leave in the trace


class FollowedUpdates:
    """How many updates of a script are followed.

    The first run of a proof decides, and the others are given its number. A script of cheap updates is followed to the
    same one in every proof, one of dear updates to what was asked for; only one whose later updates are much dearer
    than those that were measured (it evaluates between epochs) is ended where its time is up.

    Args:
        asked: updates that are followed in any case.
        timeout: seconds that the run may take.
        further: whether there may be more.

    Attributes:
        asked: the same.
        last: the update with which the script is ended.
    """

    def __init__(self, asked: int, timeout: float, further: bool) -> None:
        self.asked = self.last = asked
        self._further, self._timeout = further, timeout
        self._began = time.monotonic()
        self._before = (0.0, 0.0)  # processor time, and time, when the last update but one began of those
        self._least, self._limit = asked, math.inf  # updates, and processor time with which it ends after them

    def begin_update(self, made: int, folder: Path, find_next_epoch: Callable[[int], int]) -> None:
        """An update begins.

        Args:
            made: updates before it.
            folder: of the trace.
            find_next_epoch: with which update, by how many the passes so far are of, the second epoch begins.
        """
        if not self._further:
            return
        now = time.process_time(), time.monotonic()
        if made + 2 == self.asked:
            self._before = now
        elif made + 1 == self.asked:
            self._choose(now, folder, find_next_epoch(self.asked))
        elif made + 1 >= self._least and (now[0] > self._limit or not self._is_soon(now[1])):
            self.last = min(self.last, made + 1)

    def _choose(self, now: tuple[float, float], folder: Path, begins: int) -> None:
        """Decide, with the last update that was asked for, by what the one before it has taken.

        The first ones take more: what is not the model's own is looked for then.
        """
        processor, elapsed = (a - b for a, b in zip(now, self._before, strict=True))
        more = _LATEST - self.asked
        if self.asked < begins <= _LATEST and self._is_soon(now[1] + (begins - self.asked) * elapsed):
            self.last = self._least = begins
        written = sum(file.stat().st_size for file in folder.iterdir()) / max(1, self.asked - 1)
        cheap = more * processor <= _SECONDS and more * written <= _ROOM
        if cheap and self._is_soon(now[1] + more * elapsed):
            self.last, self._limit = max(self.last, _LATEST), now[0] + 2 * _SECONDS

    def _is_soon(self, then: float) -> bool:
        """With room for several processes on the same cores, and for an evaluation between the epochs."""
        return then - self._began < self._timeout / 4
