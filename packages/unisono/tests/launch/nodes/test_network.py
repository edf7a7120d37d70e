"""Addresses and interfaces of this host."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from unisono.launch.nodes import network
from unisono.launch.nodes.network import Interface
from unisono.runtime.communication import listening
from unisono.runtime.communication.communicator import format_address
from unisono.runtime.errors import ConfigError

FOUND = [
    Interface("lo", ("127.0.0.1", "::1"), up=True),
    Interface("eth0", ("10.0.0.5", "fd00::5"), up=True),
    Interface("eth1", ("10.1.0.5",), up=False),
    Interface("ib0", (), up=True),
]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with these interfaces, on which the other is behind eth0."""
    monkeypatch.setattr(network, "interfaces", lambda: FOUND)
    monkeypatch.setattr(network, "find_own_address", lambda host, port: "10.0.0.5")


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:", ":29400", "a:b", "a:0", "a:65536", "fd00::1:29400", ""])
def test_a_rendezvous_without_host_and_port_is_refused_with_an_example(text: str):
    with pytest.raises(ConfigError, match=r"as in 10\.0\.0\.1:29400"):
        network.parse_rendezvous(text)


@pytest.mark.parametrize(("host", "text"), [("10.0.0.1", "10.0.0.1:29400"), ("fd00::1", "[fd00::1]:29400")])
def test_an_address_is_written_as_it_is_read(host: str, text: str):
    assert format_address(host, 29400) == text
    assert network.parse_rendezvous(text) == (host, 29400)


def test_a_name_that_leads_nowhere_is_refused():
    with pytest.raises(ConfigError, match=r"cannot resolve the host name 'no-such-host\.invalid'"):
        network.resolve_host("no-such-host.invalid", 1)


def test_the_loopback_is_found_by_its_address():
    names = {i.name for i in network.interfaces() if "127.0.0.1" in i.addresses}
    assert network.choose_interface(None, "127.0.0.1", 29400, {}) == (names.pop(), "127.0.0.1")


@pytest.mark.parametrize(
    ("asked", "address", "environment", "chosen"),
    [
        pytest.param("eth0", "10.0.0.1", {network.GLOO: "lo"}, ("eth0", "10.0.0.5"), id="what is asked for first"),
        pytest.param(None, "10.0.0.1", {network.GLOO: "lo"}, ("lo", "127.0.0.1"), id="then the user's environment"),
        pytest.param(None, "10.0.0.1", {}, ("eth0", "10.0.0.5"), id="else the one that leads to the other node"),
        pytest.param("eth0", "fd00::1", {}, ("eth0", "fd00::5"), id="an address of the other node's family"),
    ],
)
def test_an_interface_is_chosen(
    host: None, asked: str | None, address: str, environment: dict[str, str], chosen: tuple[str, str]
):
    assert network.choose_interface(asked, address, 29400, environment) == chosen


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("eth3", "launch.interface=eth3: this host has no such interface, did you mean 'eth"),
        ("eth1", "launch.interface=eth1: this interface is down; choose another of lo 127.0.0.1, eth0 10.0.0.5, eth1"),
        ("ib0", "launch.interface=ib0: this interface has no address"),
    ],
)
def test_an_interface_that_cannot_be_used_is_refused_with_those_that_can(host: None, name: str, told: str):
    with pytest.raises(ConfigError) as caught:
        network.choose_interface(name, "10.0.0.1", 1, {})
    assert str(caught.value).startswith(told)
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME=wlan9: this host has no such interface"):
        network.choose_interface(None, "10.0.0.1", 1, {network.GLOO: "wlan9"})


def test_no_way_to_a_host_is_told_with_the_interfaces(monkeypatch: pytest.MonkeyPatch):
    class NoWay(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network.socket, "socket", NoWay)
    with pytest.raises(ConfigError, match=r"no route to 10.0.0.1 \(Network is unreachable\); its interfaces: "):
        network.find_own_address("10.0.0.1", 1)


# where the processes of one host meet ---------------------------------------------------------------------------------


def reserved_at(*there: str) -> Callable[[str], socket.socket]:
    """Ports of a host with these addresses alone."""

    def reserved(address: str) -> socket.socket:
        if address not in there:
            raise OSError(99, "Cannot assign requested address")
        return socket.socket()

    return reserved


@pytest.mark.parametrize(
    ("there", "found"), [(("127.0.0.1", "::1"), "127.0.0.1"), (("127.0.0.1",), "127.0.0.1"), (("::1",), "::1")]
)
def test_processes_of_one_host_meet_at_the_loopback_of_either_kind(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], found: str
):
    monkeypatch.setattr(network, "reserve_port", reserved_at(*there))
    monkeypatch.setattr(network, "_is_reachable", lambda address: True)
    assert network.find_loopback() == found


def test_a_host_whose_loopback_is_down_is_told_how_to_mend_it(host: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(network, "reserve_port", reserved_at())
    with pytest.raises(
        ConfigError, match=r"reach neither 127\.0\.0\.1 nor ::1.* eth0 10\.0\.0\.5.*`ip link set lo up`"
    ):
        network.find_loopback()


def test_a_loopback_that_is_down_keeps_its_addresses(host: None, monkeypatch: pytest.MonkeyPatch):
    """Linux lets a process bind to 127.0.0.1 all the same; gloo then said that not all ranks had arrived."""

    class Down(socket.socket):
        def connect(self, address: object, /) -> None:
            raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(network, "reserve_port", reserved_at("127.0.0.1", "::1"))
    monkeypatch.setattr(network.socket, "socket", Down)
    with pytest.raises(ConfigError, match=r"`ip link set lo up`"):
        network.find_loopback()


def test_a_port_that_is_kept_is_nobody_else_s():
    with listening.reserve_port("127.0.0.1") as kept, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(kept.getsockname())


class Known:
    """Processes whose addresses on the connection to rank 0 are known; gathers what this one and the others say."""

    def __init__(self, addresses: list[str], rank: int) -> None:
        self.addresses, self.rank, self.own_address = addresses, rank, addresses[rank]

    def gather(self, value: str, what: str) -> list[str]:
        return [*self.addresses[: self.rank], value, *self.addresses[self.rank + 1 :]]


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),  # one host
        (["10.0.0.5", "10.0.0.6"], "10.0.0.5"),
        (["127.0.1.1", "10.0.0.6"], "10.0.0.5"),  # the name of this host means 127.0.1.1, and there is another
    ],
)
def test_a_process_is_known_by_an_address_that_the_others_reach_or_the_interface_of_the_environment(
    host: None, monkeypatch: pytest.MonkeyPatch, there: list[str], found: str
):
    monkeypatch.delenv(network.GLOO, raising=False)
    assert network.process_addresses(Known(there, 0), "node-a", 29400) == [found, there[1]]  # type: ignore[arg-type]
    monkeypatch.setenv(network.GLOO, "eth0")
    given = network.process_addresses(Known(["127.0.0.1", "10.0.0.6"], 0), "10.0.0.6", 29400)  # type: ignore[arg-type]
    assert given == ["10.0.0.5", "10.0.0.6"]
