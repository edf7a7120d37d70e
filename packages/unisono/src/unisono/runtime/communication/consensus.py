"""Consensus between processes: an error on one rank is raised on all, and a result of one is shared with all.

If one process raised alone, the others would wait until their deadline and report the wait instead of the cause. So
every rank reports how its part went, and the first error is raised on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from unisono.runtime.communication.communicator import Channel, Json
from unisono.runtime.errors import RunError, UnisonoError, error_class

T = TypeVar("T")
_SIGN_OF_LIFE = 1.0  # seconds between two of a rank whose work takes long
_JOIN_TIMEOUT = 10.0  # seconds for the others to learn that the work is done


def raise_everywhere(
    channel: Channel, work: Callable[[], Json] | None, what: str, *, member: str = "rank"
) -> list[Json]:
    """Run `work` on every rank; if it fails on one, raise the same error on all. Collective.

    Args:
        channel: Of all ranks, or all nodes.
        work: This rank's part, with a JSON result; None if this rank has nothing to do.
        what: Name of the wait, for timeouts.
        member: What messages call a member of the channel.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        UnisonoError: The error of the first rank that failed, with its class. The text names the rank unless every rank
            that had work reports the same.
        Exception: On the failing rank itself, any error that is not a `UnisonoError`, to keep its traceback.
    """
    mine: list[Json] = [work is not None, None, None]
    own: Exception | None = None
    if work is not None:
        try:
            mine[2] = work()
        except Exception as error:
            own, mine[1] = error, _serialize_error(error)
    everyone = channel.gather(mine, what)
    failed = {rank: error for rank, (_, error, _) in enumerate(everyone) if error is not None}
    if not failed:
        return [result for _, _, result in everyone]
    if own is not None and not isinstance(own, UnisonoError):
        raise own
    first, refused = next(iter(failed.items()))
    workers = [rank for rank, (worked, _, _) in enumerate(everyone) if worked]
    alike = list(failed) == workers and all(other["text"] == refused["text"] for other in failed.values())
    text = refused["text"] if alike else f"{member} {first}: {refused['text']}"
    raised = own if isinstance(own, UnisonoError) and mine[1] == refused else _rebuild_error(refused)
    raised.args = (text,)
    raised.agreed = channel.size > 1  # one process may be a rank that has asked no other
    raise raised


def run_on_first(channel: Channel, work: Callable[[], T], what: str) -> T | None:
    """Run `work` on rank 0, for longer than any timeout allows; the others receive a sign of life every second.

    Collective; nothing else may use the channel in the meantime. The work runs in the calling thread, and the signs of
    life in another one on every rank: a log of collectives, which passes over other threads, then sees none on any.

    Returns:
        On rank 0 the result of `work`; on the others None, once it is done.
    """
    over = threading.Event()

    def exchange() -> None:
        while channel.gather(channel.rank == 0 and not over.wait(_SIGN_OF_LIFE), what)[0]:
            pass

    signs = _Attempt(exchange)
    thread = threading.Thread(target=signs.make, name=what, daemon=True)
    if channel.size > 1:
        thread.start()
    if channel.rank:
        thread.join()
        signs.result()  # raises what has ended the wait
        return None
    try:
        return work()
    finally:  # an error of the signs is left to the next collective exchange, which names the rank that is gone
        over.set()
        if channel.size > 1:
            thread.join(_JOIN_TIMEOUT)


def run_everywhere(channel: Channel, work: Callable[[], Json] | None, what: str, *, member: str = "rank") -> list[Json]:
    """Run `work` on every rank as `raise_everywhere` does, for longer than any timeout allows.

    Collective; nothing else may use the channel in the meantime. The work runs in a thread of its own, while the
    calling one exchanges signs of life every second. A rank that is gone ends the wait of the others, not their work.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        UnisonoError: As `raise_everywhere`.
        DeadlineError: If another rank is gone.
    """
    attempt = _Attempt(work or (lambda: None))
    thread = threading.Thread(target=attempt.make, name=what, daemon=True)
    thread.start()
    while True:
        thread.join(_SIGN_OF_LIFE)
        if not any(channel.gather(thread.is_alive(), what)):
            return raise_everywhere(channel, attempt.result if work is not None else None, what, member=member)


def share_first(channel: Channel, work: Callable[[], Json], what: str) -> Json:
    """Run `work` on rank 0, however long it takes, and return its JSON result, or raise its error, on every rank."""
    attempt = _Attempt(work)
    run_on_first(channel, attempt.make, what)
    return raise_everywhere(channel, attempt.result if channel.rank == 0 else None, what)[0]


class _Attempt:
    """Work whose result, or whose error, is asked for later."""

    def __init__(self, work: Callable[[], Json]) -> None:
        self._work = work
        self._value: Json = None
        self._error: Exception | None = None

    def make(self) -> None:
        try:
            self._value = self._work()
        except Exception as error:
            self._error = error

    def result(self) -> Json:
        if self._error is not None:
            raise self._error
        return self._value


def _serialize_error(error: Exception) -> dict[str, Json]:
    if isinstance(error, UnisonoError):
        known = next(kind for kind in type(error).__mro__ if error_class(kind.__name__) is kind)
        return {"class": known.__name__, "text": str(error), "fault": error.fault}
    return {"class": RunError.__name__, "text": f"{type(error).__name__}: {error}", "fault": ""}


def _rebuild_error(error: dict[str, Json]) -> UnisonoError:
    found = error_class(error["class"])(error["text"])
    found.fault = error["fault"]
    return found
