"""Consensus of all processes: an error of one is raised on all, a result of one is given to all.

A process that raised alone would leave the others in a wait until their deadline, with a message about the wait and not
about the cause. So every rank says how its part went, and the first error is raised on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from unisono.runtime.communicator import Channel, Json
from unisono.runtime.errors import RunError, UnisonoError, error_class

T = TypeVar("T")
_JOIN_TIMEOUT = 10.0  # seconds for the others to hear that something is over


def raise_everywhere(
    channel: Channel, work: Callable[[], Json] | None, what: str, *, member: str = "rank"
) -> list[Json]:
    """Do something on every rank; where it fails on one, the same error is raised on all. Collective.

    Args:
        channel: all ranks, or all nodes.
        work: of this rank, with a result that is JSON; None where this rank has nothing to do.
        what: is waited for; named in a timeout.
        member: what a member of the channel is called in messages.

    Returns:
        The results of all ranks, in rank order.

    Raises:
        UnisonoError: the error of the first rank that failed, of its class. Its text names the rank, unless every rank
            that had something to do says the same.
        Exception: on the rank itself, what is not a `UnisonoError`, so that its traceback is kept.
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
    raised.agreed = True
    raise raised


def run_on_first(channel: Channel, work: Callable[[], T], what: str) -> T | None:
    """Do something on rank 0 that may take longer than any wait; the others hear every second that it is under way.

    Args:
        channel: which nothing else uses in the meantime. Collective.
        work: of rank 0, in the thread that called.
        what: is waited for; named in a timeout.

    Returns:
        On rank 0 its result; elsewhere None, once it is over.
    """
    if channel.rank:
        while channel.gather(False, what)[0]:
            pass
        return None
    over = threading.Event()

    def report() -> None:
        with suppress(Exception):  # whoever is gone is named by the next exchange of all
            while channel.gather(not over.wait(1.0), what)[0]:
                pass

    thread = threading.Thread(target=report, name=what, daemon=True)
    if channel.size > 1:
        thread.start()
    try:
        return work()
    finally:
        over.set()
        if channel.size > 1:
            thread.join(_JOIN_TIMEOUT)


def share_first(channel: Channel, work: Callable[[], Json], what: str) -> Json:
    """Do something on rank 0, however long it takes, and return its result, or raise its error, on every rank.

    Args:
        channel: as for `run_on_first`. Collective.
        work: of rank 0, with a result that is JSON.
        what: is waited for; named in a timeout.
    """
    outcome: list[Any] = []

    def attempt() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    run_on_first(channel, attempt, what)

    def result() -> Json:
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    return raise_everywhere(channel, result if channel.rank == 0 else None, what)[0]


def _serialize_error(error: Exception) -> dict[str, Json]:
    """An error as JSON."""
    if isinstance(error, UnisonoError):
        known = next(kind for kind in type(error).__mro__ if error_class(kind.__name__) is kind)
        return {"class": known.__name__, "text": str(error), "fault": error.fault}
    return {"class": RunError.__name__, "text": f"{type(error).__name__}: {error}", "fault": ""}


def _rebuild_error(error: dict[str, Json]) -> UnisonoError:
    """The error that another rank described."""
    found = error_class(error["class"])(error["text"])
    found.fault = error["fault"]
    return found
