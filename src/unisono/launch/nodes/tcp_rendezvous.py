"""How the launchers of several nodes meet, and how each notices that another is gone.

JSON lines over one TCP connection from every node to node 0. Each wait has a deadline that holds on a dead link too,
which torch's TCPStore does not promise: there a wait that has timed out still waits for the server's answer.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from unisono.launch.nodes import network
from unisono.runtime.communicator import Json, written
from unisono.runtime.errors import ConfigError, DeadlineError, RunError, UnisonoError
from unisono.runtime.json_line import JsonLine

TOKEN = "UNISONO_TOKEN"  # in the environment of all nodes, if the user has set it; it is never sent
_GREETING = 5.0  # seconds for whoever connects to say who it is
_PATIENCE = 5.0  # seconds by which a node waits longer than node 0, which tells why
_GRACE = 10.0  # seconds for this node's processes to notice by themselves that others are gone


class Meeting:
    """All nodes of a job as one party; a `unisono.runtime.communicator.Party` whose ranks are nodes.

    Attributes:
        rank: of this node.
        size: number of nodes.
        lost: why another node is given up, once `watched` has noticed.
    """

    def __init__(self, rank: int, size: int, lines: dict[int, JsonLine], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.lost: str | None = None
        self._lines = lines  # node 0 has one to each of the others, and they have one to node 0
        self._writing = threading.Lock()

    def gather(self, value: Json, what: str) -> list[Json]:
        """The value of every node, in their order, on every node.

        Raises:
            DeadlineError: naming the node that is gone or too late.
        """
        if self.rank:
            line = self._lines[0]
            told = line.exchange({"value": value}, self.timeout + _PATIENCE, what)
            if "fault" in told:
                raise DeadlineError(told["fault"])
            return list(told["values"])
        deadline = time.monotonic() + self.timeout
        values = [value] + [None] * (self.size - 1)
        try:
            for rank, line in self._lines.items():
                values[rank] = line.receive(deadline, what)["value"]
        except DeadlineError as error:
            self._tell({"fault": str(error)})
            raise
        self._tell({"values": values})
        return values

    def barrier(self, what: str) -> None:
        """Return once every node has come here."""
        self.gather(None, what)

    def everywhere(self, act: Callable[[], Json], what: str) -> list[Json]:
        """Do something on every node, and return what came of it on each; a refusal of one is everyone's.

        Raises:
            RunError: with the text of the first node that refused.
        """
        try:
            mine = [None, act()]
        except UnisonoError as error:
            mine = [str(error), None]
        told = self.gather(mine, what)
        refused = {rank: text for rank, (text, _) in enumerate(told) if text}
        if refused:
            rank, text = next(iter(refused.items()))
            alike = len(refused) == self.size and set(refused.values()) == {text}
            raise RunError(text if alike else f"node {rank}: {text}")
        return [value for _, value in told]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, end this process's children some seconds after another node is gone or has failed.

        They are ended as by a SIGHUP to this process, which comes as a KeyboardInterrupt. (A SIGTERM lets them save.)

        Raises:
            DeadlineError: in its place.
        """
        stop = threading.Event()
        watches = [
            threading.Thread(target=self._watch, args=(line, stop), daemon=True) for line in self._lines.values()
        ]
        for thread in (*watches, threading.Thread(target=self._beat, args=(stop,), daemon=True)):
            thread.start()
        try:
            yield
        except BaseException as error:
            self._tell({"left": 1})
            if isinstance(error, KeyboardInterrupt) and self.lost:
                raise DeadlineError(f"{self.lost}. The processes of this node were ended") from error
            raise
        finally:
            stop.set()
        self._tell({"left": 0})
        deadline = time.monotonic() + self.timeout
        for thread in watches:  # who hangs up with something unread takes back what it has said last
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Hang up."""
        for line in self._lines.values():
            line.close()

    def _tell(self, message: Json) -> None:
        with self._writing:
            for line in self._lines.values():
                with suppress(OSError):
                    line.send(message, time.monotonic() + _PATIENCE)

    def _watch(self, line: JsonLine, stop: threading.Event) -> None:
        why = None
        while why is None:
            try:
                told = line.receive(time.monotonic() + self.timeout, "a sign of life")
            except DeadlineError as error:
                why = str(error)
            else:
                if told.get("left") == 0:
                    return
                why = f"{line.name} has ended with an error, which it tells there" if "left" in told else None
        if stop.wait(_GRACE):
            return
        self.lost = why
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGHUP)

    def _beat(self, stop: threading.Event) -> None:
        while not stop.wait(min(5.0, self.timeout / 4)):
            self._tell({})


@contextmanager
def meet(rank: int, size: int, rendezvous: str, start_timeout: float, timeout: float) -> Iterator[Meeting]:
    """Meet the launchers of all nodes at node 0.

    Args:
        rank: of this node.
        size: number of nodes.
        rendezvous: `host:port` of node 0.
        start_timeout: seconds for all nodes to come.
        timeout: seconds for any later wait.

    Raises:
        ConfigError: if node 0 cannot be met there, or if the nodes have not been numbered 0 to size - 1.
        DeadlineError: naming nodes that did not come.
    """
    host, port = network.rendezvous(rendezvous)
    deadline = time.monotonic() + start_timeout
    print(f"unisono: node {rank} of {size} meets the others at {rendezvous}", file=sys.stderr, flush=True)  # noqa: T201
    lines = (
        {0: _joined(rank, size, host, port, deadline, start_timeout)}
        if rank
        else _received(size, host, port, deadline, start_timeout)
    )
    meeting = Meeting(rank, size, lines, timeout)
    try:
        yield meeting
    finally:
        meeting.close()


def _received(size: int, host: str, port: int, deadline: float, start_timeout: float) -> dict[int, JsonLine]:
    """Node 0: a line from each of the other nodes, in their order."""
    lines: dict[int, JsonLine] = {}
    with _listening(host, port, size) as listener:
        while len(lines) < size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                line = JsonLine(listener.accept()[0], "a node")
            except TimeoutError:
                absent = ", ".join(str(rank) for rank in range(1, size) if rank not in lines)
                text = (
                    f"of {size} nodes, node {absent} did not come to {written(host, port)} within {start_timeout:g} s "
                    "(launch.start_timeout). Start the same command there, with its own launch.node_rank, and look at "
                    "what it says"
                )
                raise _refused(lines, DeadlineError(text)) from None
            try:
                nonce = secrets.token_hex(16)
                line.send({"nonce": nonce}, time.monotonic() + _GREETING)
                told = line.receive(min(deadline, time.monotonic() + _GREETING), "a greeting")
                came, theirs, proof = int(told["node"]), int(told["nodes"]), str(told["proof"])
            except (DeadlineError, OSError, KeyError, TypeError, ValueError):  # not one of ours
                line.close()
                continue
            if not hmac.compare_digest(proof.encode(), _proof(nonce, came).encode()):
                why = f"{TOKEN} is not the same there and on node 0"
                print(f"unisono: node 0 has sent away {told.get('host')}: {why}", file=sys.stderr, flush=True)  # noqa: T201
                _refused({came: line}, ConfigError(f"node 0 has sent this node away: {why}; set it alike on all nodes"))
                continue
            line.name = f"node {came} ({told['host']}, process {told['pid']})"
            wrong = _wrong_number(came, theirs, size, line.name, lines)
            lines[-1 if wrong else came] = line
            if wrong:
                raise _refused(lines, ConfigError(wrong))
    for line in lines.values():
        line.send({"welcome": f"node 0 ({platform.node()}, process {os.getpid()})"}, deadline)
    return dict(sorted(lines.items()))


def _proof(nonce: str, rank: int) -> str:
    """What only a node of this job can say, if there is a token that strangers do not know."""
    return hmac.new(os.environ.get(TOKEN, "").encode(), f"{nonce} {rank}".encode(), "sha256").hexdigest()


def _wrong_number(came: int, theirs: int, size: int, name: str, lines: dict[int, JsonLine]) -> str | None:
    if theirs != size:
        return f"launch.nodes is {size} on node 0 and {theirs} on {name}; start all nodes with one command"
    if came in lines:
        both = f"{lines[came].name} and {name}"
        return f"launch.node_rank={came} was given to two nodes: {both}; number them from 0 to {size - 1}"
    return None


def _refused(lines: dict[int, JsonLine], error: UnisonoError) -> UnisonoError:
    """The same error, after all who came have been told."""
    for line in lines.values():
        with suppress(OSError):
            line.send({"refused": str(error), "late": isinstance(error, DeadlineError)}, time.monotonic() + 1)
        line.close()
    return error


def _joined(rank: int, size: int, host: str, port: int, deadline: float, start_timeout: float) -> JsonLine:
    """Another node: the line to node 0, which may not be there yet."""
    _, address = network.resolve(host, port)
    why = "nobody is there"
    while True:
        try:
            link = socket.create_connection((address, port), max(0.01, min(5.0, deadline - time.monotonic())))
            break
        except OSError as error:
            why = error.strerror or "no answer"
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"node {rank} could not meet node 0 at {written(host, port)} within {start_timeout:g} s "
                f"(launch.start_timeout): {why}. Is node 0 started, is this its address, and does "
                "a firewall let the port pass?"
            )
        time.sleep(0.1)
    line = JsonLine(link, f"node 0 at {written(host, port)}")
    nonce = str(line.receive(max(deadline, time.monotonic() + _PATIENCE), "its greeting").get("nonce"))
    me = {"node": rank, "nodes": size, "host": platform.node(), "pid": os.getpid(), "proof": _proof(nonce, rank)}
    told = line.exchange(me, max(0.0, deadline - time.monotonic()) + _PATIENCE, "all nodes to come")
    if "refused" in told:
        line.close()
        raise (DeadlineError if told["late"] else ConfigError)(told["refused"])
    line.name = str(told["welcome"])
    return line


def _listening(host: str, port: int, size: int) -> socket.socket:
    """The socket at which node 0 waits for the others."""
    family, address = network.resolve(host, port)
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        address = ""  # many hosts give their own name to 127.0.1.1; others know it by another address
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(size)
    except OSError as error:
        listener.close()
        asked = f"launch.rendezvous={written(host, port)}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{asked}: port {port} of this node is in use; choose another, on all nodes") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{asked} must be an address of node 0, and this node, which was started with "
                f"launch.node_rank=0, has others: {network.described(network.interfaces())}"
            ) from error
        raise ConfigError(f"{asked} cannot be used: {error.strerror}") from error
    return listener
