"""The user's callbacks of a run, called at named points.

Their requests are named in the log, and their exceptions are kept until all ranks meet, so that the run ends on all
ranks, naming rank, callback and method.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.callback import Callback, CallbackRequest, CallbackResult, Evaluate, RunInfo, Save, Stop
from unisono.runtime import heartbeat
from unisono.runtime.code.user_code import format_user_error
from unisono.runtime.communication.communicator import Json
from unisono.runtime.errors import CallbackError, UnisonoError
from unisono.supervise.step_sync import RankRequests

log = logging.getLogger(__name__)
_VERBS = {Stop: "stop", Save: "save", Evaluate: "evaluate"}


class Callbacks:
    """The user's callbacks in a process."""

    def __init__(self, users: Sequence[Callback], rank: int) -> None:
        self._rank, self._callbacks = rank, _name_callbacks(users)
        self._pending = RankRequests()  # of saves that ended since the last point

    def on_start(self, run: RunInfo, state: Mapping[str, Json], due: RankRequests) -> RankRequests:
        """Before the first step; see `Callback.on_start`.

        Args:
            run: this run.
            state: what `state` returned for the checkpoint that the run resumes from.
            due: requests of the loop itself, which the result includes.
        """

        def start(name: str, one: Callback) -> CallbackResult:
            if state.get(name) is not None:
                one.load_state(state[name])
            return one.on_start(run)

        return self._collect(due, "on_start", run.first, start)

    def on_step(self, step: int, values: Mapping[str, float], due: RankRequests) -> RankRequests:
        """See `Callback.on_step`; includes requests of the loop itself (`due`), and those of `on_save` since."""
        requests = _combine(self.take_pending(), due)
        return self._collect(requests, "on_step", step, lambda _, one: one.on_step(step, values))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> RankRequests:
        """See `Callback.on_evaluation`."""
        return self._collect(RankRequests(), "on_evaluation", step, lambda _, one: one.on_evaluation(step, values))

    def on_save(self, step: int, checkpoint: Path) -> None:
        """See `Callback.on_save`; requests are handled at the next hook."""
        requests = self._collect(RankRequests(), "on_save", step, lambda _, one: one.on_save(step, checkpoint))
        self._pending = _combine(self._pending, requests)

    def take_pending(self) -> RankRequests:
        """Requests or errors of `on_save` since the last hook."""
        pending, self._pending = self._pending, RankRequests()
        return pending

    def on_end(self, step: int, reason: str) -> RankRequests:
        """See `Callback.on_end`; the result holds at most an error."""
        return self._collect(self.take_pending(), "on_end", step, lambda _, one: one.on_end(step, reason))

    def state(self) -> dict[str, Json]:
        """The state that the user's callbacks need on resume, by name."""
        found = {name: one.state() for name, one in self._callbacks.items()}
        return {name: state for name, state in found.items() if state is not None}

    def _collect(
        self, requests: RankRequests, point: str, step: int, call: Callable[[str, Callback], CallbackResult | None]
    ) -> RankRequests:
        """The given requests combined with those of the callbacks."""
        for name, callback in self._callbacks.items():
            with heartbeat.phase("record", f"{name}.{point}"):
                try:
                    own = _list_requests(call(name, callback))
                except Exception as error:
                    return _combine(requests, RankRequests(error=self._build_error(error, name, point, step)))
            reasons = tuple(
                f"{callback.title or name} asks to {_VERBS[type(one)]}{f': {one.reason}' if one.reason else ''}"
                for one in own
            )
            kinds = {type(one) for one in own}
            requests = _combine(requests, RankRequests(Stop in kinds, Save in kinds, Evaluate in kinds, reasons))
        return requests

    def _build_error(self, error: Exception, name: str, point: str, step: int) -> UnisonoError:
        """A user callback's error as raised on all ranks; unexpected exceptions have the user's lines."""
        where = f"callback {name} on rank {self._rank}, {point} after step {step}"
        if isinstance(error, UnisonoError):
            error.args = (f"{where}: {error}",)
            return error
        log.error("%s failed", where, exc_info=error)
        found = CallbackError(f"{where}: {format_user_error(error) or f'{type(error).__name__}: {error}'}")
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


def _list_requests(returned: Any) -> list[CallbackRequest]:
    requests = [] if returned is None else list(returned) if isinstance(returned, list | tuple) else [returned]
    for one in requests:
        if not isinstance(one, CallbackRequest):
            raise TypeError(
                f"returned {one!r}; a callback returns None, Stop(…), Save(…), Evaluate(…), or a list of them"
            )
    return requests


def _combine(first: RankRequests, second: RankRequests) -> RankRequests:
    return RankRequests(
        first.stop or second.stop,
        first.save or second.save,
        first.evaluate or second.evaluate,
        (*first.reasons, *second.reasons),
        first.error or second.error,
    )
