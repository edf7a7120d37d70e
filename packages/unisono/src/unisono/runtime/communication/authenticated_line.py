"""Authenticated JSON messages over one TCP connection: both ends prove that they know the same token.

The ends are two nodes of a run, or two processes of a JAX run, where the process with rank 0 acts as node 0. Every
other member has a connection to member 0, and `gather` and `broadcast` use those.

Anybody can connect to the rendezvous port, and anybody can listen there before node 0 does. Until both sides are
authenticated, a message is at most 4 KB, has one overall deadline, and any defect in it raises the same error.
Afterwards every message carries an HMAC keyed by connection, direction and sequence number, so nobody on the network
can change, replay or forge one. Nothing is encrypted: configurations and paths can be read on the network.

    node 0 -> node   {"unisono": 4, "token": which, "nonce": a}
    node -> node 0   {"nonce": b, "proof": HMAC(token, "node", a, b, who), "who": {...}}
    node 0 -> node   {"proof": HMAC(token, "node 0", b, a)}
    both             HMAC(HMAC(token, "key", a, b), direction, number, message) message
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

from unisono.runtime.communication.communicator import Json
from unisono.runtime.errors import DeadlineError
from unisono.runtime.text import one_line
from unisono.runtime.untrusted.safe_paths import parse_json
from unisono.runtime.untrusted.shapes import Object

TOKEN = "UNISONO_TOKEN"  # set in the environment of every node or process; never sent
VERSION = 4
MAX_GREETING_BYTES = 4096  # per message, before both sides are authenticated
MAX_MESSAGE_BYTES = 64 << 20  # per message, afterwards
GRACE_SECONDS = 5.0  # by which a member waits longer than member 0, whose reason then arrives first; and to send one
_MAC = 64  # characters of an HMAC-SHA256 in hex
_NONCE = 32  # characters


class GreetingError(Exception):
    """The other end is not a node of this job, or cannot prove that it is."""


class TokenError(GreetingError):
    """The other end speaks the protocol but does not know the token."""


class AuthenticatedLine:
    """A connected socket that sends and receives authenticated messages; several threads may send."""

    def __init__(self, link: socket.socket, name: str) -> None:
        self.name = name
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send small messages at once
        self._link = link
        # A timeout belongs to the socket object, and one thread writes while another reads.
        self._write_socket = link.dup()
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._key: bytes | None = None
        self._directions = (b"", b"")  # sent, received
        self._sent_count = self._received_count = 0

    @property
    def own_address(self) -> str:
        """The address of this end."""
        return str(self._link.getsockname()[0])

    # greetings ------------------------------------------------------------------------------------------------------

    def admit(self, token: bytes, which: str, deadline: float) -> dict[str, Any]:
        """Run node 0's side of the handshake and return what the peer says about itself.

        Args:
            token: The secret that all nodes share.
            which: Public name of the token's source, so that the peer picks the right one.
            deadline: For the whole handshake.

        Raises:
            TokenError: If the peer does not know the token; it has been sent a refusal.
            GreetingError: If the peer sends anything but a valid greeting.
        """
        own_nonce = secrets.token_hex(_NONCE // 2)
        self._send_greeting({"unisono": VERSION, "token": which, "nonce": own_nonce}, deadline)
        message = self._receive_greeting(deadline)
        peer, peer_nonce = message.get("who"), _hex_field(message, "nonce", _NONCE)
        if not isinstance(peer, dict):
            raise GreetingError("it did not identify itself")
        if not _equal_digests(
            _hex_field(message, "proof", _MAC), _mac(token, b"node", own_nonce, peer_nonce, _canonical_json(peer))
        ):
            self._send_greeting({"refused": "token"}, deadline)
            raise TokenError(one_line(peer.get("host"), 100))
        self._send_greeting({"proof": _mac(token, b"node 0", peer_nonce, own_nonce)}, deadline)
        self._start_session(token, own_nonce, peer_nonce, (b"0>", b">0"))
        return peer

    def offer(self, deadline: float) -> tuple[str, str]:
        """Receive node 0's first message on another node: which token it asks for, and its nonce.

        Raises:
            GreetingError: If the answer is not node 0's greeting.
        """
        message = self._receive_greeting(deadline)
        if message.get("unisono") != VERSION:
            raise GreetingError("the process that answers there is not node 0, or runs another version of Unisono")
        which = message.get("token")
        if not isinstance(which, str) or len(which) > 100:
            raise GreetingError("the process that answers there did not say which token it expects")
        return which, _hex_field(message, "nonce", _NONCE)

    def introduce(self, identity: dict[str, Any], token: bytes, peer_nonce: str, deadline: float) -> None:
        """Authenticate this node to node 0, and node 0 to this node.

        Raises:
            TokenError: If node 0 rejects the token, or cannot prove that it knows it.
            GreetingError: If the answer is malformed.
        """
        own_nonce = secrets.token_hex(_NONCE // 2)
        proof = _mac(token, b"node", peer_nonce, own_nonce, _canonical_json(identity))
        self._send_greeting({"nonce": own_nonce, "proof": proof, "who": identity}, deadline)
        message = self._receive_greeting(deadline)
        if message.get("refused") == "token" or not _equal_digests(
            _hex_field(message, "proof", _MAC), _mac(token, b"node 0", own_nonce, peer_nonce)
        ):
            raise TokenError("it does not know this node's token")
        self._start_session(token, peer_nonce, own_nonce, (b">0", b"0>"))

    # messages -------------------------------------------------------------------------------------------------------

    def send(self, message: Json, deadline: float) -> None:
        """Send a message.

        Raises:
            OSError: If the connection fails.
        """
        self.send_text(json.dumps(message), deadline)

    def send_text(self, text: str, deadline: float) -> None:
        """Send a message that is JSON already, as it goes to many."""
        with self._sending:
            if self._key is not None:
                text = f"{_mac(self._key, self._directions[0], str(self._sent_count), text)} {text}"
                self._sent_count += 1
            self._write_socket.settimeout(max(0.01, deadline - time.monotonic()))
            self._write_socket.sendall(text.encode() + b"\n")

    def receive(self, deadline: float, what: str) -> dict[str, Any]:
        """Return the next message.

        Raises:
            DeadlineError: If none arrives in time, or its authentication fails.
        """
        assert self._key is not None
        mac, _, text = self._line(deadline, what, MAX_MESSAGE_BYTES).partition(b" ")
        expected = _mac(self._key, self._directions[1], str(self._received_count), text.decode("utf-8", "replace"))
        if not _equal_digests(mac.decode("ascii", "replace"), expected):
            raise DeadlineError(f"{self.name}: a message was changed or forged on the way, while waiting for {what}")
        self._received_count += 1
        with suppress(ValueError):
            return dict(parse_json(text, Object))
        raise DeadlineError(f"{self.name} sent something that is not a Unisono message, while waiting for {what}")

    def exchange(self, message: Json, timeout: float, what: str) -> dict[str, Any]:
        """Send a message and return the reply."""
        deadline = time.monotonic() + timeout
        try:
            self.send(message, deadline)
        except OSError as error:
            raise DeadlineError(f"{self.name} disconnected ({error.strerror}) while waiting for {what}") from error
        return self.receive(deadline, what)

    def close(self) -> None:
        """Close the connection."""
        self._write_socket.close()
        self._link.close()

    # internals ------------------------------------------------------------------------------------------------------

    def _start_session(self, token: bytes, first: str, second: str, directions: tuple[bytes, bytes]) -> None:
        self._key = bytes.fromhex(_mac(token, b"key", first, second))
        self._directions = directions

    def _send_greeting(self, message: Json, deadline: float) -> None:
        try:
            self.send(message, deadline)
        except OSError as error:
            raise GreetingError(f"it disconnected ({error.strerror or error})") from error

    def _receive_greeting(self, deadline: float) -> dict[str, Any]:
        """Receive one handshake message. The sender is not authenticated yet, so every defect is a `GreetingError`."""
        try:
            return dict(parse_json(self._line(deadline, "a greeting", MAX_GREETING_BYTES), Object))
        except (DeadlineError, ValueError) as error:
            raise GreetingError(one_line(error)) from error

    def _line(self, deadline: float, what: str, limit: int) -> bytes:
        """Return the bytes up to the next newline, all of which must arrive before the deadline."""
        began, searched = time.monotonic(), 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            if len(self._buffer) > limit:
                raise DeadlineError(
                    f"{self.name} sent {len(self._buffer)} bytes without an end of line, while waiting for {what}"
                )
            searched = len(self._buffer)
            remaining = deadline - time.monotonic()
            try:
                if remaining <= 0 and searched:  # a trickle of bytes does not extend the deadline
                    raise TimeoutError
                self._link.settimeout(max(0.01, remaining))
                part = self._link.recv(1 << 16)
            except TimeoutError:
                elapsed = time.monotonic() - began
                raise DeadlineError(
                    f"no message from {self.name} for {elapsed:.0f} s while waiting for {what}"
                ) from None
            except OSError as error:
                raise DeadlineError(f"{self.name} disconnected ({error.strerror}) while waiting for {what}") from error
            if not part:
                raise DeadlineError(f"{self.name} disconnected while waiting for {what}")
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if len(line) > limit:
            raise DeadlineError(
                f"{self.name} sent a message of {len(line)} bytes, which is too long, while waiting for {what}"
            )
        return line


# between member 0 of a job (a process or a node) and all others -----------------------------------------------------


def connect_line(
    address: tuple[str, int], name: str, deadline: float, greet: Callable[[AuthenticatedLine], None]
) -> AuthenticatedLine:
    """Connect to member 0, which may not be listening yet; another process may answer, which `greet` refuses.

    Raises:
        GreetingError: Why the last attempt before the deadline failed.
    """
    while True:
        try:
            link = socket.create_connection(address, max(0.01, min(5.0, deadline - time.monotonic())))
            line = AuthenticatedLine(link, name)
            with ExitStack() as unless_greeted:
                unless_greeted.callback(line.close)
                greet(line)
                unless_greeted.pop_all()
                return line
        except GreetingError as error:
            why = error
        except OSError as error:
            why = GreetingError(error.strerror or str(error) or "no answer")
        if time.monotonic() >= deadline:
            raise why
        time.sleep(0.1)


def gather(
    lines: Mapping[int, AuthenticatedLine],
    rank: int,
    size: int,
    value: Json,
    timeout: float,
    what: str,
    advice: str = "",
) -> list[Json]:
    """Return the value of every member, in rank order, on every member.

    Most gathers ask whether all are well or have the same, so equal values in a row are sent once: what member 0 sends
    then grows with the number of members and not with its square.

    `lines` are those to all other members, in rank order, on member 0, and the one to member 0 elsewhere.

    Raises:
        DeadlineError: On every member, naming the one that is gone or late, with `advice` after it.
    """
    runs = reduce(lines, rank, value, _count_runs, timeout, what, advice)
    with suppress(TypeError, ValueError):
        if sum(count for _, count in runs) == size and all(type(count) is int and count > 0 for _, count in runs):
            return [deepcopy(one) for one, count in runs for _ in range(count)]
    raise DeadlineError(f"{lines[0].name} sent an invalid answer while waiting for {what}")


def _count_runs(values: Sequence[Json]) -> list[list[Json]]:
    """Each value with how often it stands there in a row; values are equal if their JSON is (1, 1.0 and true are not).

    >>> _count_runs([None, None, 1, 1.0, True, None])
    [[None, 2], [1, 1], [1.0, 1], [True, 1], [None, 1]]
    """
    runs: list[list[Json]] = []
    before = None
    for value in values:
        text = json.dumps(value)
        if text == before:
            runs[-1][1] += 1
        else:
            runs.append([value, 1])
        before = text
    return runs


def reduce(
    lines: Mapping[int, AuthenticatedLine],
    rank: int,
    value: Json,
    combine: Callable[[list[Json]], Json],
    timeout: float,
    what: str,
    advice: str = "",
) -> Json:
    """Return, on every member, what member 0 makes of the values of all; see `gather`.

    What member 0 sends grows with the number of members and not with its square, as a list of unequal values does.
    """
    if rank:
        answer = lines[0].exchange({"value": value}, timeout + GRACE_SECONDS, what)
        if "fault" in answer:
            raise DeadlineError(one_line(answer["fault"], 2000))
        return answer.get("result")
    deadline = time.monotonic() + timeout
    try:
        result = combine([value, *(line.receive(deadline, what).get("value") for line in lines.values())])
    except (TypeError, ValueError) as error:  # a `DeadlineError` is one, too
        misfit = f"members sent values that do not fit together while waiting for {what}: {error}"
        fault = f"{error}{advice}" if isinstance(error, DeadlineError) else misfit
        broadcast(lines, {"fault": fault})
        raise DeadlineError(fault) from error
    broadcast(lines, {"result": result})
    return result


def broadcast(lines: Mapping[int, AuthenticatedLine], message: Json) -> None:
    """Send a message to all members that can still be reached."""
    text = json.dumps(message)
    for line in lines.values():
        with suppress(OSError):
            line.send_text(text, time.monotonic() + GRACE_SECONDS)


def _hex_field(message: dict[str, Any], name: str, length: int) -> str:
    """Return a field of a greeting that must consist of exactly `length` hexadecimal digits."""
    value = message.get(name)
    if not isinstance(value, str) or len(value) != length or not set(value) <= set("0123456789abcdef"):
        raise GreetingError(f"its {name} is missing or malformed")
    return value


def _canonical_json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _mac(key: bytes, purpose: bytes, *parts: str) -> str:
    """Return an HMAC over length-prefixed parts, so that no two lists of parts encode to the same bytes."""
    content = purpose + b"".join(len(part.encode()).to_bytes(8, "big") + part.encode() for part in parts)
    return hmac.new(key, content, "sha256").hexdigest()


def _equal_digests(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode(), second.encode())
