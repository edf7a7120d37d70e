"""Connects the launchers of several nodes, and lets each notice when another is gone.

JSON messages travel over one TCP connection from every node to node 0, which both sides authenticate with a token: the
user's (`UNISONO_TOKEN`), or one that node 0 leaves for this user in the shared folder of runs. Every wait has a
deadline, even on a dead link. torch's TCPStore does not guarantee that: a wait that timed out there still waits for the
server's answer.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import platform
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from unisono.launch.nodes import network
from unisono.launch.nodes.run_token import find_token, print_status, provide_token, secret_path
from unisono.runtime.communication import authenticated_line
from unisono.runtime.communication.authenticated_line import (
    GRACE_SECONDS,
    TOKEN,
    AuthenticatedLine,
    GreetingError,
    TokenError,
)
from unisono.runtime.communication.communicator import Json, format_address
from unisono.runtime.errors import ConfigError, DeadlineError, UnisonoError
from unisono.runtime.text import one_line

_GREETING_TIMEOUT = 5.0  # seconds for the whole handshake of a new connection
_MAX_GREETINGS = 64  # handshakes at a time
_MAX_REJECTIONS_SHOWN = 10  # refused hosts that are reported by name
_GRACE = 10.0  # seconds for this node's processes to notice by themselves that others are gone


class NodeCommunicator:
    """All nodes of a job; a `unisono.runtime.communication.communicator.Channel` whose ranks are nodes.

    Attributes:
        rank: Of this node.
        size: Number of nodes.
        failure: Why another node was given up, once `watch_nodes` has noticed.
    """

    def __init__(self, rank: int, size: int, lines: dict[int, AuthenticatedLine], timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.failure: str | None = None
        self._lines = lines  # on node 0 a connection to each other node, elsewhere the connection to node 0

    def gather(self, value: Json, what: str) -> list[Json]:
        """Return the value of every node, in node order, on every node.

        Raises:
            DeadlineError: Naming the node that is gone or late.
        """
        return authenticated_line.gather(self._lines, self.rank, self.size, value, self.timeout, what)

    @contextmanager
    def watch_nodes(self) -> Iterator[None]:
        """While this lasts, end this process's children some seconds after another node is gone or has failed.

        They end as if this process had received a SIGQUIT, which raises a KeyboardInterrupt. (A SIGTERM would let them
        save.)

        Raises:
            DeadlineError: Instead of the KeyboardInterrupt.
        """
        stop = threading.Event()
        acts = [partial(self._watch_node, line, stop) for line in self._lines.values()]
        watches = [threading.Thread(target=act, daemon=True) for act in acts]
        for thread in (*watches, threading.Thread(target=self._send_heartbeats, args=(stop,), daemon=True)):
            thread.start()
        try:
            yield
        except BaseException as error:
            authenticated_line.broadcast(self._lines, {"left": 1})
            if isinstance(error, KeyboardInterrupt) and self.failure:
                raise DeadlineError(f"{self.failure}. The processes of this node were stopped") from error
            raise
        finally:
            stop.set()
        authenticated_line.broadcast(self._lines, {"left": 0})
        deadline = time.monotonic() + self.timeout
        for thread in watches:  # closing a connection with unread data would discard our last message
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Close all connections."""
        for line in self._lines.values():
            line.close()

    def _watch_node(self, line: AuthenticatedLine, stop: threading.Event) -> None:
        why = None
        while why is None:
            try:
                answer = line.receive(time.monotonic() + self.timeout, "a heartbeat")
            except DeadlineError as error:
                why = str(error)
            else:
                if answer.get("left") == 0:
                    return
                why = f"{line.name} ended with an error (see its own output)" if "left" in answer else None
        if stop.wait(_GRACE):
            return
        self.failure = why
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGQUIT)

    def _send_heartbeats(self, stop: threading.Event) -> None:
        while not stop.wait(min(5.0, self.timeout / 4)):
            authenticated_line.broadcast(self._lines, {})


@contextmanager
def connect_nodes(
    rank: int, size: int, rendezvous: str, start_timeout: float, timeout: float, folder: Path
) -> Iterator[NodeCommunicator]:
    """Connect the launchers of all nodes through node 0.

    Args:
        rank: Of this node.
        size: Number of nodes.
        rendezvous: `host:port` of node 0.
        start_timeout: Seconds for all nodes to connect.
        timeout: Seconds for any later wait.
        folder: The folder of all runs, shared by all nodes; a token is left there if the user has set none.

    Raises:
        ConfigError: If node 0 cannot be reached at this address, or the nodes are not numbered 0 to size - 1.
        DeadlineError: Naming nodes that did not connect.
    """
    host, port = network.parse_rendezvous(rendezvous)
    deadline = time.monotonic() + start_timeout
    print_status(f"node {rank} of {size} meets the others at {rendezvous}")
    secret = secret_path(folder.absolute(), rendezvous)
    meet = size, host, port, deadline, start_timeout, secret
    lines = {0: _join_node_0(rank, *meet)} if rank else _accept_nodes(*meet)
    meeting = NodeCommunicator(rank, size, lines, timeout)
    try:
        yield meeting
    finally:
        meeting.close()


# node 0 -------------------------------------------------------------------------------------------------------------


def _accept_nodes(
    size: int, host: str, port: int, deadline: float, start_timeout: float, secret: Path
) -> dict[int, AuthenticatedLine]:
    """Accept a connection from every other node; returns them in node order."""
    lines: dict[int, AuthenticatedLine] = {}
    with (
        _open_listener(host, port, size) as listener,
        provide_token(secret, format_address(host, port)) as (token, which),
    ):
        guests = _Acceptor(listener, token, which)
        try:
            while len(lines) < size - 1:
                try:
                    line, who = guests.arrivals.get(timeout=max(0.01, deadline - time.monotonic()))
                except queue.Empty:
                    absent = ", ".join(str(rank) for rank in range(1, size) if rank not in lines)
                    text = (
                        f"node {absent} of {size} did not connect to {format_address(host, port)} within "
                        f"{start_timeout:g} s (launch.start_timeout). Start the same command there, with its own "
                        "launch.node_rank, and check its output"
                    )
                    raise _refuse_all(lines, DeadlineError(text)) from None
                came, theirs = who.get("node"), who.get("nodes")
                host_name, pid = one_line(who.get("host"), 100), one_line(who.get("pid"), 20)
                line.name = f"node {one_line(came, 20)} ({host_name}, process {pid})"
                wrong = _describe_wrong_number(came, theirs, size, line.name, lines)
                lines[-1 if wrong else int(str(came))] = line
                if wrong:
                    raise _refuse_all(lines, ConfigError(wrong))
        finally:
            guests.close()
    authenticated_line.broadcast(lines, {"welcome": f"node 0 ({platform.node()}, process {os.getpid()})"})
    return dict(sorted(lines.items()))


class _Acceptor:
    """Accepts connections, each greeted in its own thread, so that no stranger can make the others wait."""

    def __init__(self, listener: socket.socket, token: bytes, which: str) -> None:
        # Connections to authenticated nodes, and what each says about itself.
        self.arrivals: queue.SimpleQueue[tuple[AuthenticatedLine, dict[str, Any]]] = queue.SimpleQueue()
        self._token, self._token_name = token, which
        self._slots = threading.Semaphore(_MAX_GREETINGS)
        self._closed = threading.Event()
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no further connections."""
        self._closed.set()
        self._thread.join()

    def _accept(self, listener: socket.socket) -> None:
        listener.settimeout(0.1)
        while not self._closed.is_set():
            try:
                link = listener.accept()[0]
            except OSError:  # a timeout, a connection already gone, or temporarily no free descriptor
                continue
            if not self._slots.acquire(blocking=False):
                link.close()
                continue
            threading.Thread(target=self._greet, args=(link,), daemon=True).start()

    def _greet(self, link: socket.socket) -> None:
        line = None
        try:
            line = AuthenticatedLine(link, "a node")
            who = line.admit(self._token, self._token_name, time.monotonic() + _GREETING_TIMEOUT)
            self.arrivals.put((line, who))
            line = None
        except TokenError as stranger:
            if str(stranger) not in self._reported and len(self._reported) < _MAX_REJECTIONS_SHOWN:
                self._reported.add(str(stranger))
                print_status(f"node 0 refused {stranger}: it does not know the token of this run ({TOKEN})")
        except Exception:  # nothing that a stranger sends may end node 0
            pass
        finally:
            self._slots.release()
            if line is not None:
                line.close()


def _describe_wrong_number(
    came: Any, theirs: Any, size: int, name: str, lines: dict[int, AuthenticatedLine]
) -> str | None:
    if theirs != size:
        return (
            f"launch.nodes is {size} on node 0 but {one_line(theirs, 20)} on {name}; start all nodes with one command"
        )
    if type(came) is not int or not 0 < came < size:
        return f"launch.node_rank is {one_line(came, 20)} on {name}; number the nodes from 0 to {size - 1}"
    if came in lines:
        both = f"{lines[came].name} and {name}"
        return f"two nodes have launch.node_rank={came}: {both}; number them from 0 to {size - 1}"
    return None


def _refuse_all(lines: dict[int, AuthenticatedLine], error: UnisonoError) -> UnisonoError:
    """Return the error, after sending it to all connected nodes."""
    authenticated_line.broadcast(lines, {"refused": str(error), "late": isinstance(error, DeadlineError)})
    for line in lines.values():
        line.close()
    return error


def _open_listener(host: str, port: int, size: int) -> socket.socket:
    family, address = network.resolve_host(host, port)
    if ipaddress.ip_address(address).is_loopback and host not in ("localhost", address):
        address = ""  # many hosts map their own name to 127.0.1.1, which other hosts cannot reach
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(max(size, 256))  # strangers may fill the queue, too
    except OSError as error:
        listener.close()
        key = f"launch.rendezvous={format_address(host, port)}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{key}: port {port} of this node is in use; use another port on all nodes") from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"{key} must be an address of node 0, but this node, which was started with "
                f"launch.node_rank=0, has these: {network.format_interfaces(network.interfaces())}"
            ) from error
        raise ConfigError(f"{key} cannot be used: {error.strerror}") from error
    return listener


# the other nodes ----------------------------------------------------------------------------------------------------


def _join_node_0(
    rank: int, size: int, host: str, port: int, deadline: float, start_timeout: float, secret: Path
) -> AuthenticatedLine:
    """Connect to node 0, which may not be up yet; another process may answer in its place."""
    _, address = network.resolve_host(host, port)
    at = format_address(host, port)
    who = {"node": rank, "nodes": size, "host": platform.node(), "pid": os.getpid()}
    unseen: list[str] = []  # still the reason to report once node 0 has stopped waiting

    def greet(line: AuthenticatedLine) -> None:
        until = time.monotonic() + _GREETING_TIMEOUT
        which, theirs = line.offer(until)
        token = find_token(which, secret, at)
        if token is None:
            unseen[:] = [
                f"it asks for the token that node 0 wrote into {secret.parent} for this user only, but this node sees "
                "none there. run.dir must be on a file system that all nodes share, under the same path; or set "
                f"launch.shared_folder=false, checkpoint.upload.url and {TOKEN}"
            ]
            raise GreetingError(*unseen)
        try:
            line.introduce(who, token, theirs, until)
        except TokenError as error:
            why = f"{error} ({TOKEN}); it may not be node 0"
            if os.environ.get(TOKEN):
                raise ConfigError(
                    f"the process that answers at {at} was refused: {why}. Set {TOKEN} to the same value on all nodes"
                ) from error
            raise GreetingError(why) from error

    try:
        line = authenticated_line.connect_line((address, port), f"node 0 at {at}", deadline, greet)
    except GreetingError as error:
        raise DeadlineError(
            f"node {rank} could not connect to node 0 at {at} within {start_timeout:g} s (launch.start_timeout): "
            f"{unseen[0] if unseen else error}. Check that node 0 is running, that this is its address, and that no "
            "firewall blocks the port"
        ) from error
    answer = line.receive(max(deadline, time.monotonic()) + GRACE_SECONDS, "all nodes to connect")
    if "refused" in answer:
        line.close()
        raise (DeadlineError if answer.get("late") else ConfigError)(one_line(answer["refused"], 2000))
    line.name = one_line(answer.get("welcome"), 300)
    return line
