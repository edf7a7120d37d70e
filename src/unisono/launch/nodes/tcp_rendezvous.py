"""How the launchers of several nodes meet, and how each notices that another is gone.

JSON messages over one TCP connection from every node to node 0, which both sides authenticate by a token: the user's
(`UNISONO_TOKEN`), or one that node 0 leaves for this user alone in the folder of runs, which all nodes share. Each wait
has a deadline that holds on a dead link too, which torch's TCPStore does not promise: there a wait that has timed out
still waits for the server's answer.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unisono.launch.nodes import network, shared_secret
from unisono.runtime.authenticated_line import TOKEN, AuthenticatedLine, GreetingError, TokenError
from unisono.runtime.communicator import Json, written
from unisono.runtime.errors import ConfigError, DeadlineError, RunError, UnisonoError
from unisono.runtime.text import one_line

_OF_ENVIRONMENT, _NONE, _SHARED = "environment", "none", "shared:"  # how nodes know the token, a public name
_GREETING = 5.0  # seconds for whoever connects to prove itself, all of it
_AT_ONCE = 64  # connections that may be greeting at a time
_SENT_AWAY = 10  # hosts that are named when they are sent away
_PATIENCE = 5.0  # seconds by which a node waits longer than node 0, which tells why
_GRACE = 10.0  # seconds for this node's processes to notice by themselves that others are gone


class Meeting:
    """All nodes of a job as one party; a `unisono.runtime.communicator.Party` whose ranks are nodes.

    Attributes:
        rank: of this node.
        size: number of nodes.
        lost: why another node is given up, once `watched` has noticed.
    """

    def __init__(self, rank: int, size: int, lines: dict[int, AuthenticatedLine], timeout: float) -> None:
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
                raise DeadlineError(one_line(told["fault"], 2000))
            values = told.get("values")
            if not isinstance(values, list) or len(values) != self.size:
                raise DeadlineError(f"{line.name} does not speak as a node of ours, in wait for {what}")
            return values
        deadline = time.monotonic() + self.timeout
        values = [value] + [None] * (self.size - 1)
        try:
            for rank, line in self._lines.items():
                values[rank] = line.receive(deadline, what).get("value")
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
        told = [part if isinstance(part, list) and len(part) == 2 else [None, None] for part in self.gather(mine, what)]
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

    def _watch(self, line: AuthenticatedLine, stop: threading.Event) -> None:
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
def meet(
    rank: int, size: int, rendezvous: str, start_timeout: float, timeout: float, folder: Path
) -> Iterator[Meeting]:
    """Meet the launchers of all nodes at node 0.

    Args:
        rank: of this node.
        size: number of nodes.
        rendezvous: `host:port` of node 0.
        start_timeout: seconds for all nodes to come.
        timeout: seconds for any later wait.
        folder: of all runs, which all nodes share; a token is left there if the user has set none.

    Raises:
        ConfigError: if node 0 cannot be met there, or if the nodes have not been numbered 0 to size - 1.
        DeadlineError: naming nodes that did not come.
    """
    host, port = network.rendezvous(rendezvous)
    deadline = time.monotonic() + start_timeout
    _tell(f"node {rank} of {size} meets the others at {rendezvous}")
    secret = shared_secret.path_of(folder.absolute(), rendezvous)
    lines = (
        {0: _joined(rank, size, host, port, deadline, start_timeout, secret)}
        if rank
        else _received(size, host, port, deadline, start_timeout, secret)
    )
    meeting = Meeting(rank, size, lines, timeout)
    try:
        yield meeting
    finally:
        meeting.close()


def _tell(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)  # noqa: T201 - before there is a log


# node 0 -------------------------------------------------------------------------------------------------------------


def _received(
    size: int, host: str, port: int, deadline: float, start_timeout: float, secret: Path
) -> dict[int, AuthenticatedLine]:
    """A line from each of the other nodes, in their order."""
    lines: dict[int, AuthenticatedLine] = {}
    with _listening(host, port, size) as listener, _token_left(secret, written(host, port)) as (token, which):
        guests = _Guests(listener, token, which)
        try:
            while len(lines) < size - 1:
                try:
                    line, who = guests.came.get(timeout=max(0.01, deadline - time.monotonic()))
                except queue.Empty:
                    absent = ", ".join(str(rank) for rank in range(1, size) if rank not in lines)
                    text = (
                        f"of {size} nodes, node {absent} did not come to {written(host, port)} within "
                        f"{start_timeout:g} s (launch.start_timeout). Start the same command there, with its own "
                        "launch.node_rank, and look at what it says"
                    )
                    raise _refused(lines, DeadlineError(text)) from None
                came, theirs = who.get("node"), who.get("nodes")
                line.name = f"node {one_line(came, 20)} ({one_line(who.get('host'), 100)}, process {one_line(who.get('pid'), 20)})"
                wrong = _wrong_number(came, theirs, size, line.name, lines)
                lines[-1 if wrong else int(str(came))] = line
                if wrong:
                    raise _refused(lines, ConfigError(wrong))
        finally:
            guests.close()
    for line in lines.values():
        line.send({"welcome": f"node 0 ({platform.node()}, process {os.getpid()})"}, deadline)
    return dict(sorted(lines.items()))


class _Guests:
    """Whoever connects, each greeted by a thread of its own, so that nobody can make the others wait.

    Attributes:
        came: lines to nodes that have proved themselves, and what each says of itself.
    """

    def __init__(self, listener: socket.socket, token: bytes, which: str) -> None:
        self.came: queue.SimpleQueue[tuple[AuthenticatedLine, dict[str, Any]]] = queue.SimpleQueue()
        self._token, self._which = token, which
        self._free = threading.Semaphore(_AT_ONCE)
        self._closed = threading.Event()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Greet nobody else."""
        self._closed.set()
        self._thread.join()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        while not self._closed.is_set():
            try:
                link = listener.accept()[0]
            except OSError:  # nobody came, or has gone again; or there is no descriptor left for a moment
                continue
            if not self._free.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        line = None
        try:
            line = AuthenticatedLine(link, "a node")
            who = line.admit(self._token, self._which, time.monotonic() + _GREETING)
            self.came.put((line, who))
            line = None
        except TokenError as stranger:
            if str(stranger) not in self._told and len(self._told) < _SENT_AWAY:
                self._told.add(str(stranger))
                _tell(f"node 0 has sent away {stranger}: it does not know the token of this run ({TOKEN})")
        except Exception:  # a stranger, whatever it says or does, ends nothing here
            pass
        finally:
            self._free.release()
            if line is not None:
                line.close()


@contextmanager
def _token_left(secret: Path, where: str) -> Iterator[tuple[bytes, str]]:
    """The token of this run and its public name; one that is made here is there for the other nodes until they came."""
    if given := os.environ.get(TOKEN):
        yield given.encode(), _OF_ENVIRONMENT
        return
    token, name = secrets.token_hex(32), secrets.token_hex(8)
    try:
        shared_secret.leave(secret, {"name": name, "token": token})
    except RunError as error:
        _tell(
            f"WARNING: {error}. Without a token anybody who can reach {where} can take part in this run: set {TOKEN}, "
            "alike on all nodes, e.g. to the output of `openssl rand -hex 32`"
        )
        yield b"", _NONE
        return
    try:
        yield token.encode(), f"{_SHARED}{name}"
    finally:
        secret.unlink(missing_ok=True)


def _wrong_number(came: Any, theirs: Any, size: int, name: str, lines: dict[int, AuthenticatedLine]) -> str | None:
    if theirs != size:
        return (
            f"launch.nodes is {size} on node 0 and {one_line(theirs, 20)} on {name}; start all nodes with one command"
        )
    if type(came) is not int or not 0 < came < size:
        return f"launch.node_rank is {one_line(came, 20)} on {name}; number the nodes from 0 to {size - 1}"
    if came in lines:
        both = f"{lines[came].name} and {name}"
        return f"launch.node_rank={came} was given to two nodes: {both}; number them from 0 to {size - 1}"
    return None


def _refused(lines: dict[int, AuthenticatedLine], error: UnisonoError) -> UnisonoError:
    """The same error, after all who came have been told."""
    for line in lines.values():
        with suppress(OSError):
            line.send({"refused": str(error), "late": isinstance(error, DeadlineError)}, time.monotonic() + 1)
        line.close()
    return error


def _listening(host: str, port: int, size: int) -> socket.socket:
    """The socket at which node 0 waits for the others."""
    family, address = network.resolve(host, port)
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        address = ""  # many hosts give their own name to 127.0.1.1; others know it by another address
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(max(size, 256))  # strangers may fill it, too
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


# the other nodes ----------------------------------------------------------------------------------------------------


def _joined(
    rank: int, size: int, host: str, port: int, deadline: float, start_timeout: float, secret: Path
) -> AuthenticatedLine:
    """The line to node 0, which may not be there yet; and somebody else may answer in its place."""
    _, address = network.resolve(host, port)
    at = written(host, port)
    who = {"node": rank, "nodes": size, "host": platform.node(), "pid": os.getpid()}
    why, unseen = "nobody is there", ""
    while True:
        line = None
        try:
            link = socket.create_connection((address, port), max(0.01, min(5.0, deadline - time.monotonic())))
            line = AuthenticatedLine(link, f"node 0 at {at}")
            until = time.monotonic() + _GREETING
            which, theirs = line.offer(until)
            token = _token_of(which, secret, at)
            if token is not None:
                line.introduce(who, token, theirs, until)
                break
            unseen = (  # and stays the reason when node 0 has given up waiting
                f"it asks for a token that node 0 leaves in {secret.parent} for this user alone, and this node sees none "
                "there. run.dir must lie on a file system that all nodes share, under the same path"
            )
        except TokenError as error:
            why = f"{error} ({TOKEN}); it may not be node 0"
            if os.environ.get(TOKEN):
                raise ConfigError(
                    f"whoever answers at {at} is refused: {why}. Set {TOKEN} alike on all nodes"
                ) from error
        except GreetingError as error:
            why = str(error)
        except OSError as error:
            why = error.strerror or "no answer"
        except BaseException:
            if line is not None:
                line.close()
            raise
        if line is not None:
            line.close()
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"node {rank} could not meet node 0 at {at} within {start_timeout:g} s "
                f"(launch.start_timeout): {unseen or why}. Is node 0 started, is this its address, and does "
                "a firewall let the port pass?"
            )
        time.sleep(0.1)
    told = line.receive(max(deadline, time.monotonic()) + _PATIENCE, "all nodes to come")
    if "refused" in told:
        line.close()
        raise (DeadlineError if told.get("late") else ConfigError)(one_line(told["refused"], 2000))
    line.name = one_line(told.get("welcome"), 300)
    return line


def _token_of(which: str, secret: Path, at: str) -> bytes | None:
    """The token that node 0 asks for; None if this node does not see it yet.

    Raises:
        ConfigError: if the user has set it on one of the two alone, or node 0 asks for none though it could.
    """
    given = os.environ.get(TOKEN)
    if (which == _OF_ENVIRONMENT) != bool(given):
        there, here = ("is", "is not") if which == _OF_ENVIRONMENT else ("is not", "is")
        raise ConfigError(
            f"{TOKEN} {here} set on this node, and {there} set on node 0, or on whoever answers at {at}; set it alike on "
            "all nodes"
        )
    if given:
        return given.encode()
    if which.startswith(_SHARED):
        found = shared_secret.find(secret) or {}
        fits = found.get("name") == which.removeprefix(_SHARED) and isinstance(found.get("token"), str)
        return str(found["token"]).encode() if fits else None
    try:  # node 0 would be this user on a host that shares this folder
        probe = secret.with_name(f"{secret.name}.{secrets.token_hex(4)}")
        shared_secret.leave(probe, {})
        probe.unlink(missing_ok=True)
    except RunError:
        _tell(f"WARNING: node 0 at {at} asks for no token, so anybody could answer there: set {TOKEN} on all nodes")
        return b""
    raise ConfigError(
        f"whoever answers at {at} asks for no token, though node 0 could leave one in {secret.parent}: it may not be node 0. "
        f"run.dir must be the same folder on all nodes; else set {TOKEN} alike on all of them"
    )
