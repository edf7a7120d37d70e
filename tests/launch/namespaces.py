"""Hosts for tests: network namespaces on this machine, joined by a cable, with a further interface each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from unisono_faults.matrix import AbstainError
from unisono_faults.scenarios.network import command_on, make_hosts, run_ip

PORT = 29400
ADDRESSES = ("10.99.0.1", "10.99.0.2")


def missing() -> str | None:
    """Why there can be no namespaces here, or None."""
    try:
        with make_hosts(ADDRESSES):
            return None
    except AbstainError as error:
        return str(error)


@dataclass(frozen=True)
class Host:
    """One namespace: its name, its interface and its address. All of them have the hostname of this machine."""

    name: str
    interface: str
    address: str

    def command(self, *words: str, before: str = "") -> list[str]:
        """A command inside; `before` is a shell command that runs first, in a mount namespace of its own."""
        return command_on(self.name, *(["sh", "-c", f'{before} && exec "$@"', "sh"] if before else []), *words)

    def link(self, state: str) -> None:
        """Pull the cable out (`down`) or in (`up`)."""
        run_ip("-n", self.name, "link", "set", self.interface, state)


@contextmanager
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, and a second, unconnected interface each."""
    with make_hosts(ADDRESSES) as names:
        first, second = (Host(name, f"v{n}", ADDRESSES[n]) for n, name in enumerate(names))
        for number, host in enumerate((first, second)):
            run_ip("-n", host.name, "link", "add", "other", "type", "veth", "peer", "name", "end")
            run_ip("-n", host.name, "addr", "add", f"10.98.{number}.1/24", "dev", "other")
            for end in ("other", "end"):
                run_ip("-n", host.name, "link", "set", end, "up")
        yield first, second
