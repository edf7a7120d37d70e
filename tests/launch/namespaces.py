"""Hosts for tests: network namespaces on this machine, joined by a bridge of one link each. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PORT = 29400


def missing() -> str | None:
    """Why there can be no namespaces here, or None."""
    if not shutil.which("ip"):
        return "iproute2 is not installed"
    if os.geteuid() != 0:
        return "needs root"
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass(frozen=True)
class Host:
    """One namespace: its name, its interface and its address. All of them have the hostname of this machine."""

    name: str
    interface: str
    address: str

    def command(self, *words: str, before: str = "") -> list[str]:
        """A command inside; `before` is a shell command that runs first, in a mount namespace of its own."""
        inside = ["ip", "netns", "exec", self.name]
        return [*inside, "sh", "-c", f'{before} && exec "$@"', "sh", *words] if before else [*inside, *words]

    def link(self, state: str) -> None:
        """Pull the cable out (`down`) or in (`up`)."""
        _ip("-n", self.name, "link", "set", self.interface, state)


@contextmanager
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, and a second, unconnected interface each."""
    tag = f"{os.getpid() % 100000}"
    pair = (Host(f"na{tag}", f"va{tag}", "10.99.0.1"), Host(f"nb{tag}", f"vb{tag}", "10.99.0.2"))
    try:
        for host in pair:
            _ip("netns", "add", host.name)
        first, second = pair
        _ip(
            "link", "add", first.interface, "netns", first.name, "type", "veth",
            "peer", "name", second.interface, "netns", second.name,
        )  # fmt: skip
        for number, host in enumerate(pair):
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.link("up")
            _ip("-n", host.name, "link", "add", "other", "type", "veth", "peer", "name", "end")
            _ip("-n", host.name, "addr", "add", f"10.98.{number}.1/24", "dev", "other")
            for end in ("other", "end"):
                _ip("-n", host.name, "link", "set", end, "up")
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
