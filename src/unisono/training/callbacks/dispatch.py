"""The callbacks of a run, called at named points: the loop's own first, then the user's.

The loop's own are trusted: what they raise goes through. A user's is guarded: what it asks for is named in the log, and
what it raises is kept until all ranks meet, so that the run ends on all of them with rank, callback and point named.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.callback import Asked, Callback, Evaluate, RunInfo, Save, Stop, Wish
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Json
from unisono.runtime.errors import CallbackError, UnisonoError
from unisono.supervise.step_sync import Wishes

log = logging.getLogger(__name__)
_VERBS = {Stop: "stop", Save: "save", Evaluate: "evaluate"}


class LoopCallback(Callback):
    """One of the loop's own callbacks, which has three more points."""

    def before_step(self, step: int) -> None:
        """Before the data of a step are waited for, `step` updates made."""

    def after_step(self, step: int) -> None:
        """After a step and what was due after it, `step` updates made."""

    def before_save(self, step: int) -> None:
        """Before the state after `step` updates is saved; an error refuses that."""


class Callbacks:
    """All callbacks of a process.

    Args:
        own: the loop's, in the order in which they are called; at the end in the opposite one.
        users: the user's.
        rank: of this process.
    """

    def __init__(self, own: Sequence[LoopCallback], users: Sequence[Callback], rank: int) -> None:
        self._own, self._rank = list(own), rank
        self._users = _named(users)
        self._started: list[Callback] = []
        self._pending = Wishes()  # of saves that ended since the last point

    def on_start(self, run: RunInfo, state: Mapping[str, Json]) -> Wishes:
        """Before the first step; see `Callback.on_start`.

        Args:
            run: this one.
            state: what `state` returned for the checkpoint that the run resumes from.
        """

        def start(name: str, one: Callback) -> Asked:
            if state.get(name) is not None:
                one.load_state(state[name])
            return one.on_start(run)

        asked: list[Asked] = []
        for one in self._own:
            self._started.append(one)
            asked.append(one.on_start(run))
        return self._with_users(_merged(asked), "on_start", run.first, start)

    def before_step(self, step: int) -> None:
        """See `LoopCallback.before_step`."""
        for one in self._own:
            one.before_step(step)

    def on_step(self, step: int, values: Mapping[str, float]) -> Wishes:
        """See `Callback.on_step`; with what was asked for since by `on_save`."""
        wishes = _merged([one.on_step(step, values) for one in self._own])
        wishes = _both(self.take_pending(), wishes)
        return self._with_users(wishes, "on_step", step, lambda _, one: one.on_step(step, values))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> Wishes:
        """See `Callback.on_evaluation`."""
        wishes = _merged([one.on_evaluation(step, values) for one in self._own])
        return self._with_users(wishes, "on_evaluation", step, lambda _, one: one.on_evaluation(step, values))

    def before_save(self, step: int) -> None:
        """See `LoopCallback.before_save`."""
        for one in self._own:
            one.before_save(step)

    def on_save(self, step: int, checkpoint: Path) -> None:
        """See `Callback.on_save`; what is asked for is taken up by the next point."""
        wishes = _merged([one.on_save(step, checkpoint) for one in self._own])
        wishes = self._with_users(wishes, "on_save", step, lambda _, one: one.on_save(step, checkpoint))
        self._pending = _both(self._pending, wishes)

    def take_pending(self) -> Wishes:
        """What `on_save` was asked for, or has failed with, since the last point."""
        pending, self._pending = self._pending, Wishes()
        return pending

    def after_step(self, step: int) -> None:
        """See `LoopCallback.after_step`."""
        for one in self._own:
            one.after_step(step)

    def on_users_end(self, step: int, reason: str) -> Wishes:
        """`Callback.on_end` of the user's callbacks; the wishes hold nothing but an error."""
        return self._with_users(self.take_pending(), "on_end", step, lambda _, one: one.on_end(step, reason))

    def on_own_end(self, step: int, reason: str) -> None:
        """`Callback.on_end` of the loop's own that were started, all of them, whatever one raises."""
        first: BaseException | None = None
        while self._started:
            try:
                self._started.pop().on_end(step, reason)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def state(self) -> dict[str, Json]:
        """What the user's callbacks need when the run is resumed, by name."""
        found = {name: one.state() for name, one in self._users.items()}
        return {name: state for name, state in found.items() if state is not None}

    def _with_users(
        self, wishes: Wishes, point: str, step: int, call: Callable[[str, Callback], Asked | None]
    ) -> Wishes:
        """The same wishes with those of the user's callbacks at a point."""
        for name, one in self._users.items():
            with heartbeat.phase("record", f"{name}.{point}"):
                try:
                    asked = _listed(call(name, one))
                except Exception as error:
                    return _both(wishes, Wishes(error=self._described(error, name, point, step)))
            reasons = tuple(
                f"{name} asks to {_VERBS[type(wish)]}{f': {wish.reason}' if wish.reason else ''}" for wish in asked
            )
            wishes = _both(wishes, _merged([asked], reasons))
        return wishes

    def _described(self, error: Exception, name: str, point: str, step: int) -> UnisonoError:
        """An error of a user's callback, as all ranks raise it; where it is a fault of code with its traceback."""
        where = f"callback {name} on rank {self._rank}, {point} after step {step}"
        if isinstance(error, UnisonoError):
            error.args = (f"{where}: {error}",)
            return error
        trace = "".join(traceback.format_exception(error)).rstrip()
        log.error("%s failed", where, exc_info=error)
        found = CallbackError(f"{where}: {type(error).__name__}: {error}\n{trace}")
        found.__cause__ = error
        return found


def _named(users: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by the name of their class; several of one class are numbered."""
    found: dict[str, Callback] = {}
    for one in users:
        name = type(one).__name__
        alike = sum(type(other).__name__ == name for other in found.values())
        found[f"{name} {alike + 1}" if alike else name] = one
    return found


def _listed(asked: Any) -> list[Wish]:
    wishes = [] if asked is None else list(asked) if isinstance(asked, list | tuple) else [asked]
    for wish in wishes:
        if not isinstance(wish, Wish):
            raise TypeError(
                f"returned {wish!r}; a callback returns None, Stop(…), Save(…), Evaluate(…), or a list of them"
            )
    return wishes


def _merged(asked: Sequence[Asked | None], reasons: tuple[str, ...] = ()) -> Wishes:
    wishes = [wish for one in asked for wish in _listed(one)]
    kinds = {type(wish) for wish in wishes}
    return Wishes(Stop in kinds, Save in kinds, Evaluate in kinds, reasons)


def _both(first: Wishes, second: Wishes) -> Wishes:
    return Wishes(
        first.stop or second.stop,
        first.save or second.save,
        first.evaluate or second.evaluate,
        (*first.reasons, *second.reasons),
        first.error or second.error,
    )
