"""Sockets of rank 0: one that reserves a free port for it, and one that listens at one address of its host."""

from __future__ import annotations

import errno
import ipaddress
import socket

from unisono.runtime.communication.communicator import REUSE_PORT_OPTION


def listen(host: str, port: int, shared: bool) -> socket.socket | None:
    """Open a socket on one address of this host; None if other hosts may know this host by a different address.

    Args:
        host: Name or address of this host.
        port: To listen on.
        shared: Whether our launcher has reserved the port for this process; otherwise a port in use is an error.

    Raises:
        OSError: If the port is in use.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_loopback and host not in ("localhost", address[0]):
        return None  # many hosts map their own name to 127.0.1.1
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, REUSE_PORT_OPTION, 1)
        listener.bind((address[0], port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of this host is in use; set MASTER_PORT to a free one") from error
        return None  # its address may be translated by NAT
    return listener


def reserve_port(address: str) -> socket.socket:
    """Open a socket that reserves a free port at one address of this host, for a process that listens later.

    No other user's process gets the port while the socket is open.
    """
    held = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, REUSE_PORT_OPTION, 1)
        held.bind((address, 0))
    except OSError:
        held.close()
        raise
    return held
