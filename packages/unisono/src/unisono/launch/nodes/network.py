"""Addresses and network interfaces of this host: which one leads to another host, and its name.

A host's address is never looked up by its own name, which may lead to 127.0.0.1 or be shared by two hosts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from unisono.runtime.communication.listening import reserve_port
from unisono.runtime.communication.tcp_communicator import TcpCommunicator
from unisono.runtime.errors import ConfigError, nearest

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class Interface:
    """A network interface of this host.

    Attributes:
        name: As known to the kernel, e.g. `eth0`.
        addresses: IPv4 first, then IPv6.
        up: Whether it is usable.
        speed: In Mbit/s; 0 if unknown.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool
    speed: int = 0


def interfaces() -> list[Interface]:
    """Return all interfaces of this host."""
    states = psutil.net_if_stats()
    return [
        Interface(
            name,
            tuple(a.address for kind in (socket.AF_INET, socket.AF_INET6) for a in found if a.family == kind),
            name in states and states[name].isup,
            states[name].speed if name in states else 0,
        )
        for name, found in psutil.net_if_addrs().items()
    ]


def format_interfaces(found: list[Interface]) -> str:
    """Format interfaces on one line, e.g. `lo 127.0.0.1, eth0 10.0.0.1 (down)`."""
    return ", ".join(f"{i.name} {i.addresses[0] if i.addresses else '-'}{'' if i.up else ' (down)'}" for i in found)


def parse_rendezvous(text: str) -> tuple[str, int]:
    """Parse `host:port`; an IPv6 address must be in brackets.

    Raises:
        ConfigError: For anything else.

    >>> parse_rendezvous("node0:29400"), parse_rendezvous("[fd00::1]:29400")
    (('node0', 29400), ('fd00::1', 29400))
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or (":" in host and host[0] != "["):
        raise ConfigError(
            f"launch.rendezvous={text}: write the address of node 0 and a free port on it, as in 10.0.0.1:29400 "
            "(an IPv6 address in brackets)"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def find_loopback() -> str:
    """Return the address at which this host's processes meet: 127.0.0.1, or ::1 if there is no IPv4 loopback.

    Raises:
        ConfigError: If the host has neither, e.g. because the loopback interface is down.
    """
    for address in ("127.0.0.1", "::1"):
        with suppress(OSError), reserve_port(address):
            if _is_reachable(address):
                return address
    raise ConfigError(
        "this host can reach neither 127.0.0.1 nor ::1, so its processes cannot connect to each other; its interfaces: "
        f"{format_interfaces(interfaces())}. Run `ip link set lo up`"
    )


def _is_reachable(address: str) -> bool:
    """Whether there is a way to an address; sends nothing. An interface that is down keeps its addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
    return True


def resolve_host(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the address family and the address of a host.

    Raises:
        ConfigError: If its name cannot be resolved.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"launch.rendezvous: cannot resolve the host name {host!r} ({error.strerror}); use the address of node 0"
        ) from error
    return family, str(address[0])


def find_own_address(host: str, port: int) -> str:
    """Return this host's own address on the route to another host, as chosen by the kernel; nothing is sent.

    Raises:
        ConfigError: If there is no route.
    """
    family, address = resolve_host(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise ConfigError(
                f"this host has no route to {host} ({error.strerror}); its interfaces: "
                f"{format_interfaces(interfaces())}"
            ) from error
        return str(probe.getsockname()[0])


def choose_interface(
    interface: str | None, host: str, port: int, environment: Mapping[str, str] = os.environ
) -> tuple[str, str]:
    """Choose the interface through which this node talks to the others, and its address.

    Args:
        interface: `launch.interface`; otherwise the user's environment decides, or else the route to `host`.
        host: Another node.
        port: On that node.
        environment: Of this process.

    Raises:
        ConfigError: For an interface that does not exist or cannot be used.
    """
    found = interfaces()
    name = interface or environment.get(GLOO)
    if name is None:
        address = find_own_address(host, port)
        name = next((i.name for i in found if any(a.partition("%")[0] == address for a in i.addresses)), None)
        if name is None:
            raise ConfigError(
                f"no interface has the address {address}, which leads to {host}; set launch.interface to one of "
                f"{format_interfaces(found)}"
            )
        return name, address
    key = f"launch.interface={name}" if interface else f"{GLOO}={name}"
    chosen = next((i for i in found if i.name == name), None)
    if chosen is None:
        raise ConfigError(f"{key}: this host has no such interface, {nearest(name, [i.name for i in found])}")
    if not chosen.up or not chosen.addresses:
        why = "has no address" if chosen.up else "is down"
        raise ConfigError(f"{key}: this interface {why}; choose another of {format_interfaces(found)}")
    family = resolve_host(host, port)[0]
    fitting = [a for a in chosen.addresses if (":" in a) == (family == socket.AF_INET6)]
    return name, (fitting or list(chosen.addresses))[0]


def process_addresses(group: TcpCommunicator, host: str, port: int) -> list[str]:
    """Return the address at which the others reach each process, by rank; collective.

    It is that of the interface which `GLOO_SOCKET_IFNAME` names, else that of the connection to rank 0. Processes on
    the host of rank 0 may have met it at a loopback address; if there are other hosts, they use the address that leads
    to those.
    """
    own = choose_interface(None, host, port)[1] if GLOO in os.environ else group.own_address
    everyone = group.gather(own, "the addresses of all processes")
    elsewhere = next((address for address in everyone if not _is_loopback(address)), None)
    if elsewhere is None:
        return everyone
    if _is_loopback(own):
        own = find_own_address(elsewhere, port)
    return group.gather(own, "the addresses of all processes on several hosts")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback
