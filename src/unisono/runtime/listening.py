"""A listening socket at one address of this host, on a port that a launcher may have reserved for it."""

from __future__ import annotations

import errno
import ipaddress
import socket

from unisono.runtime.communicator import REUSE_PORT_OPTION


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
            listener.setsockopt(socket.SOL_SOCKET, REUSE_PORT_OPTION, 1)
        listener.bind((address[0], port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"port {port} of this host is in use; set MASTER_PORT to a free one") from error
        return None  # its address may be translated on the way here
    return listener
