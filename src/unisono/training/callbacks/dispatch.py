"""The callbacks of a run, called at named points: the loop's own first, then the user's.

The loop's own are trusted: their exceptions propagate. A user's are guarded: their requests are named in the log, and
their exceptions are kept until all ranks meet, so that the run ends on all ranks, naming rank, callback and method.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.callback import Callback, CallbackRequest, CallbackResult, Evaluate, RunInfo, Save, Stop
from unisono.runtime import heartbeat
from unisono.runtime.communicator import Json
from unisono.runtime.errors import CallbackError, UnisonoError
from unisono.supervise.step_sync import RankRequests

log = logging.getLogger(__name__)
_VERBS = {Stop: "stop", Save: "save", Evaluate: "evaluate"}


class LoopCallback(Callback):
    """One of the loop's own callbacks, which has three more hooks."""

    def before_step(self, step: int) -> None:
        """Before waiting for the data of a step; `step` updates have been made."""

    def after_step(self, step: int) -> None:
        """After a step and what was due after it; `step` updates have been made."""

    def before_save(self, step: int) -> None:
        """Before the state after `step` updates is saved; an exception prevents the save."""


class Callbacks:
    """All callbacks of a process.

    Args:
        own: the loop's, in calling order; `on_end` is called in reverse order.
        users: the user's.
        rank: of this process.
    """

    def __init__(self, own: Sequence[LoopCallback], users: Sequence[Callback], rank: int) -> None:
        self._loop_callbacks, self._rank = list(own), rank
        self._user_callbacks = _name_callbacks(users)
        self._started: list[Callback] = []
        self._pending = RankRequests()  # of saves that ended since the last point

    def on_start(self, run: RunInfo, state: Mapping[str, Json]) -> RankRequests:
        """Before the first step; see `Callback.on_start`.

        Args:
            run: this run.
            state: what `state` returned for the checkpoint that the run resumes from.
        """

        def start(name: str, one: Callback) -> CallbackResult:
            if state.get(name) is not None:
                one.load_state(state[name])
            return one.on_start(run)

        asked: list[CallbackResult] = []
        for one in self._loop_callbacks:
            self._started.append(one)
            asked.append(one.on_start(run))
        return self._add_user_wishes(_merge_wishes(asked), "on_start", run.first, start)

    def before_step(self, step: int) -> None:
        """See `LoopCallback.before_step`."""
        for one in self._loop_callbacks:
            one.before_step(step)

    def on_step(self, step: int, values: Mapping[str, float]) -> RankRequests:
        """See `Callback.on_step`; includes requests made by `on_save` since."""
        wishes = _merge_wishes([one.on_step(step, values) for one in self._loop_callbacks])
        wishes = _combine_wishes(self.take_pending(), wishes)
        return self._add_user_wishes(wishes, "on_step", step, lambda _, one: one.on_step(step, values))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> RankRequests:
        """See `Callback.on_evaluation`."""
        wishes = _merge_wishes([one.on_evaluation(step, values) for one in self._loop_callbacks])
        return self._add_user_wishes(wishes, "on_evaluation", step, lambda _, one: one.on_evaluation(step, values))

    def before_save(self, step: int) -> None:
        """See `LoopCallback.before_save`."""
        for one in self._loop_callbacks:
            one.before_save(step)

    def on_save(self, step: int, checkpoint: Path) -> None:
        """See `Callback.on_save`; requests are handled at the next hook."""
        wishes = _merge_wishes([one.on_save(step, checkpoint) for one in self._loop_callbacks])
        wishes = self._add_user_wishes(wishes, "on_save", step, lambda _, one: one.on_save(step, checkpoint))
        self._pending = _combine_wishes(self._pending, wishes)

    def take_pending(self) -> RankRequests:
        """Requests or errors of `on_save` since the last hook."""
        pending, self._pending = self._pending, RankRequests()
        return pending

    def after_step(self, step: int) -> None:
        """See `LoopCallback.after_step`."""
        for one in self._loop_callbacks:
            one.after_step(step)

    def on_user_end(self, step: int, reason: str) -> RankRequests:
        """`Callback.on_end` of the user's callbacks; the result holds at most an error."""
        return self._add_user_wishes(self.take_pending(), "on_end", step, lambda _, one: one.on_end(step, reason))

    def on_loop_end(self, step: int, reason: str) -> None:
        """`Callback.on_end` of all of the loop's own callbacks that were started, even if one raises."""
        first: BaseException | None = None
        while self._started:
            try:
                self._started.pop().on_end(step, reason)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    def state(self) -> dict[str, Json]:
        """The state that the user's callbacks need on resume, by name."""
        found = {name: one.state() for name, one in self._user_callbacks.items()}
        return {name: state for name, state in found.items() if state is not None}

    def _add_user_wishes(
        self, wishes: RankRequests, point: str, step: int, call: Callable[[str, Callback], CallbackResult | None]
    ) -> RankRequests:
        """The given requests combined with those of the user's callbacks."""
        for name, one in self._user_callbacks.items():
            with heartbeat.phase("record", f"{name}.{point}"):
                try:
                    asked = _list_wishes(call(name, one))
                except Exception as error:
                    return _combine_wishes(wishes, RankRequests(error=self._build_error(error, name, point, step)))
            reasons = tuple(
                f"{name} asks to {_VERBS[type(wish)]}{f': {wish.reason}' if wish.reason else ''}" for wish in asked
            )
            wishes = _combine_wishes(wishes, _merge_wishes([asked], reasons))
        return wishes

    def _build_error(self, error: Exception, name: str, point: str, step: int) -> UnisonoError:
        """A user callback's error as raised on all ranks; unexpected exceptions include their traceback."""
        where = f"callback {name} on rank {self._rank}, {point} after step {step}"
        if isinstance(error, UnisonoError):
            error.args = (f"{where}: {error}",)
            return error
        trace = "".join(traceback.format_exception(error)).rstrip()
        log.error("%s failed", where, exc_info=error)
        found = CallbackError(f"{where}: {type(error).__name__}: {error}\n{trace}")
        found.__cause__ = error
        return found


def _name_callbacks(users: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class name; several of one class are numbered."""
    found: dict[str, Callback] = {}
    for one in users:
        name = type(one).__name__
        alike = sum(type(other).__name__ == name for other in found.values())
        found[f"{name} {alike + 1}" if alike else name] = one
    return found


def _list_wishes(asked: Any) -> list[CallbackRequest]:
    wishes = [] if asked is None else list(asked) if isinstance(asked, list | tuple) else [asked]
    for wish in wishes:
        if not isinstance(wish, CallbackRequest):
            raise TypeError(
                f"returned {wish!r}; a callback returns None, Stop(…), Save(…), Evaluate(…), or a list of them"
            )
    return wishes


def _merge_wishes(asked: Sequence[CallbackResult | None], reasons: tuple[str, ...] = ()) -> RankRequests:
    wishes = [wish for one in asked for wish in _list_wishes(one)]
    kinds = {type(wish) for wish in wishes}
    return RankRequests(Stop in kinds, Save in kinds, Evaluate in kinds, reasons)


def _combine_wishes(first: RankRequests, second: RankRequests) -> RankRequests:
    return RankRequests(
        first.stop or second.stop,
        first.save or second.save,
        first.evaluate or second.evaluate,
        (*first.reasons, *second.reasons),
        first.error or second.error,
    )
