"""JSON messages, one a line, over a TCP connection, where each wait has a name and a deadline that holds on a dead link."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import time
from contextlib import suppress
from typing import Any

from unisono.runtime.communicator import SHARES_PORT, Json
from unisono.runtime.errors import DeadlineError


class JsonLine:
    """A connected socket; `name` is whoever is at its other end."""

    def __init__(self, link: socket.socket, name: str) -> None:
        self.name = name
        with suppress(OSError):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait for more
        self._link = link
        self._writes = link.dup()  # a timeout belongs to a socket object, and one thread writes while another reads
        self._read = b""

    def send(self, message: Json, deadline: float) -> None:
        """Send a message, or raise an OSError."""
        self._writes.settimeout(max(0.01, deadline - time.monotonic()))
        self._writes.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, deadline: float, what: str) -> Any:
        """The next message, as a dictionary; a DeadlineError if it does not come."""
        began = time.monotonic()
        while b"\n" not in self._read:
            try:
                self._link.settimeout(max(0.01, deadline - time.monotonic()))
                part = self._link.recv(1 << 16)
            except TimeoutError:
                waited = time.monotonic() - began
                raise DeadlineError(f"{self.name} has said nothing for {waited:.0f} s, in wait for {what}") from None
            except OSError as error:
                raise DeadlineError(f"{self.name} is gone ({error.strerror}), in wait for {what}") from error
            if not part:
                raise DeadlineError(f"{self.name} is gone, in wait for {what}")
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        try:
            message = json.loads(line)
        except ValueError as error:
            raise DeadlineError(f"{self.name} does not speak as a process of ours") from error
        return message if isinstance(message, dict) else {}

    def exchange(self, message: Json, timeout: float, what: str) -> Any:
        """Send a message and return the next one that comes."""
        deadline = time.monotonic() + timeout
        try:
            self.send(message, deadline)
        except OSError as error:
            raise DeadlineError(f"{self.name} is gone ({error.strerror}), in wait for {what}") from error
        return self.receive(deadline, what)

    def close(self) -> None:
        """Hang up."""
        for link in (self._link, self._writes):
            with suppress(OSError):
                link.close()


def listen(host: str, port: int, shared: bool) -> socket.socket | None:
    """A socket at one address of this host alone; None where others may know this host by another address.

    Args:
        host: name or address of this host.
        port: of it.
        shared: whether our launcher keeps the port for this process; with any other, a port in use is an error.

    Raises:
        OSError: if the port is in use.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
        return None  # many hosts give their own name to 127.0.1.1
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, SHARES_PORT, 1)
        listener.bind((address[0], port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of this host is in use; choose another MASTER_PORT") from error
        return None  # its address may be translated on the way here
    return listener
