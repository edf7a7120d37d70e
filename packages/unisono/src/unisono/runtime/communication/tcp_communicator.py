"""The control channel without torch: JSON over a TCP connection from each process to rank 0.

Processes meet here before an engine starts anything, so a missing one can be named. Rank 0 coordinates: it collects the
values of every rank and sends them to each, or reports the rank that is missing.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Sequence

from unisono.runtime import heartbeat
from unisono.runtime.communication import authenticated_line
from unisono.runtime.communication.authenticated_line import GRACE_SECONDS, TOKEN, AuthenticatedLine, GreetingError
from unisono.runtime.communication.communicator import Json, ProcessInfo, format_address
from unisono.runtime.communication.listening import listen
from unisono.runtime.errors import DeadlineError
from unisono.runtime.text import one_line

_GREETING_TIMEOUT = 5.0  # seconds for a new connection to identify itself


class TcpCommunicator:
    """All processes of a job; see `unisono.runtime.communication.communicator.Communicator`.

    Args:
        place: This process.
        host: Address of rank 0.
        port: Port on which rank 0 listens.
        timeout: Seconds that any wait may take.
        lines: On rank 0, a connection to each other rank; elsewhere, the connection to rank 0.
        listener: Rank 0's socket, for further connections of the same processes.
        channel: Number of this communicator among those of the same processes.
    """

    def __init__(
        self,
        place: ProcessInfo,
        host: str,
        port: int,
        timeout: float,
        lines: dict[int, AuthenticatedLine],
        listener: socket.socket | None,
        channel: int = 0,
    ) -> None:
        self.rank, self.size, self.timeout = place.rank, place.world_size, timeout
        self._place, self._address, self._lines = place, (host, port), lines
        self._listener, self._channel, self._others = listener, channel, 0

    @property
    def own_address(self) -> str:
        """The address of this process on its first connection."""
        return next(iter(self._lines.values())).own_address

    def gather(self, value: Json, what: str) -> list[Json]:
        """Return the value of every rank, in rank order, on every rank.

        Raises:
            DeadlineError: Naming the rank that is gone or late.
        """
        with heartbeat.phase("wait", what):
            return authenticated_line.gather(self._lines, self.rank, self.size, value, self.timeout, what, self._advice)

    def gather_to_first(self, value: Json, what: str) -> list[Json]:
        """Return the value of every rank, in rank order, on rank 0, and nothing elsewhere."""
        everyone: list[Json] = []
        self._reduce(value, everyone.extend, what)
        return everyone

    def barrier(self, what: str) -> None:
        """Return once every rank has called it."""
        self._reduce(None, lambda values: None, what)

    def reduce_max(self, numbers: Sequence[int], what: str) -> list[int]:
        """Return the elementwise maximum over all ranks."""
        most = self._reduce(list(numbers), lambda values: [max(column) for column in zip(*values, strict=True)], what)
        if not isinstance(most, list) or len(most) != len(numbers):
            raise DeadlineError(f"rank 0 sent an invalid answer while waiting for {what}")
        return most

    def _reduce(self, value: Json, combine: Callable[[list[Json]], Json], what: str) -> Json:
        with heartbeat.phase("wait", what):
            return authenticated_line.reduce(self._lines, self.rank, value, combine, self.timeout, what, self._advice)

    @property
    def _advice(self) -> str:
        return f" (launch.timeout is {self.timeout:g} s). Look at the logs of the other ranks"

    def duplicate(self) -> TcpCommunicator:
        """Return a communicator of the same processes with its own connections, for other threads; collective."""
        self._others += 1
        channel = self._channel * 64 + self._others
        host, port = self._address
        deadline = time.monotonic() + self.timeout
        self.barrier("the second connection of all processes")
        if self.rank:
            lines = {
                0: _connect_to_rank_zero(self._place, host, port, channel, deadline, self.timeout, "launch.timeout")
            }
        else:
            assert self._listener is not None
            lines = _accept_processes(self._place, self._listener, channel, deadline, self.timeout, "launch.timeout")
        return TcpCommunicator(self._place, host, port, self.timeout, lines, self._listener, channel)

    def close(self) -> None:
        """Close the connections; the listener belongs to the first communicator."""
        for line in self._lines.values():
            line.close()
        if self._listener is not None and self._channel == 0:
            self._listener.close()


def connect_processes(
    place: ProcessInfo, host: str, port: int, start_timeout: float, timeout: float
) -> TcpCommunicator:
    """Meet all other processes at rank 0; they have `start_timeout` seconds to appear.

    Raises:
        DeadlineError: Naming the ranks that did not appear, or rank 0 if it is unreachable.
    """
    deadline = time.monotonic() + start_timeout
    key = "launch.start_timeout"
    with heartbeat.phase("wait", "the other processes to appear"):
        if place.rank:
            lines = {0: _connect_to_rank_zero(place, host, port, 0, deadline, start_timeout, key)}
            return TcpCommunicator(place, host, port, timeout, lines, None)
        try:
            listener = listen(host, port, place.launcher == "unisono") or socket.create_server(("", port))
        except OSError as error:
            raise DeadlineError(f"rank 0 cannot listen at {format_address(host, port)}: {error}") from error
        lines = _accept_processes(place, listener, 0, deadline, start_timeout, key)
        return TcpCommunicator(place, host, port, timeout, lines, listener)


def _accept_processes(
    place: ProcessInfo, listener: socket.socket, channel: int, deadline: float, limit: float, key: str
) -> dict[int, AuthenticatedLine]:
    """Accept a connection from every other process, on rank 0; returns them in rank order."""
    lines: dict[int, AuthenticatedLine] = {}
    while len(lines) < place.world_size - 1:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            line = AuthenticatedLine(listener.accept()[0], "a process")
        except TimeoutError:
            absent = [rank for rank in range(1, place.world_size) if rank not in lines]
            many = "s" if len(absent) > 1 else ""
            text = (
                f"of {place.world_size} processes, rank{many} {', '.join(map(str, absent))} did not start or could "
                f"not reach rank 0 within {limit:g} s ({key})"
            )
            authenticated_line.broadcast(lines, {"refused": text})
            raise DeadlineError(f"rank 0: {text}") from None
        greeted = _authenticate_process(line, place.world_size, channel)
        if greeted is None or greeted in lines:
            line.close()
        else:
            lines[greeted] = line
    authenticated_line.broadcast(lines, {"welcome": f"rank 0 ({platform.node()}, process {os.getpid()})"})
    return dict(sorted(lines.items()))


def _authenticate_process(line: AuthenticatedLine, size: int, channel: int) -> int | None:
    """Return the rank that has connected; None if it does not belong to this job or this channel."""
    try:
        who = line.admit(_read_token(), "environment", time.monotonic() + _GREETING_TIMEOUT)
    except GreetingError:
        return None
    rank = who.get("rank")
    if type(rank) is not int or not 0 < rank < size or (who.get("size"), who.get("channel")) != (size, channel):
        return None
    line.name = f"rank {rank} ({one_line(who.get('host'), 100)}, process {one_line(who.get('pid'), 20)})"
    return rank


def _connect_to_rank_zero(
    place: ProcessInfo, host: str, port: int, channel: int, deadline: float, limit: float, key: str
) -> AuthenticatedLine:
    """Connect another process to rank 0, which may not be listening yet."""
    where = format_address(host, port)
    who = {
        "rank": place.rank, "size": place.world_size, "channel": channel, "host": platform.node(), "pid": os.getpid(),
    }  # fmt: skip

    def greet(line: AuthenticatedLine) -> None:
        until = max(deadline, time.monotonic() + GRACE_SECONDS)  # rank 0 may be greeting another process
        line.introduce(who, _read_token(), line.offer(until)[1], until)

    try:
        line = authenticated_line.connect_line((host, port), f"rank 0 at {where}", deadline, greet)
    except GreetingError as error:
        raise DeadlineError(
            f"rank {place.rank} could not connect to rank 0 at {where} within {limit:g} s ({key}): {error}. Check "
            "that rank 0 is running, that this is its address (MASTER_ADDR, MASTER_PORT), and that no firewall "
            "blocks the port"
        ) from error
    message = line.receive(max(deadline, time.monotonic()) + GRACE_SECONDS, "all processes to connect")
    if "refused" in message:
        line.close()
        raise DeadlineError(f"rank {place.rank}: {one_line(message['refused'], 2000)}")
    line.name = one_line(message.get("welcome"), 300)
    return line


def _read_token() -> bytes:
    return os.fsencode(os.environ.get(TOKEN, ""))
