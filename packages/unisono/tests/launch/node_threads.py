"""Launchers of several nodes as threads of this process, which meet at one of its ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.launch.nodes import tcp_rendezvous
from unisono.launch.nodes.tcp_rendezvous import NodeCommunicator
from unisono.runtime.errors import UnisonoError


class Node(threading.Thread):
    """The launcher of a node; `end` is what its act returned or raised."""

    def __init__(
        self, rank: int, port: int, folder: Path, act: Callable[[NodeCommunicator], Any] | None = None,
        size: int = 2, start_timeout: float = 60, timeout: float = 60,
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.given = rank, size, f"127.0.0.1:{port}", start_timeout, timeout, folder
        self.act = act or (lambda met: met.gather(met.rank, "ranks"))
        self.end: Any = None
        self.start()

    def run(self) -> None:
        try:
            with tcp_rendezvous.connect_nodes(*self.given) as met:
                self.end = self.act(met)
        except UnisonoError as error:
            self.end = error


def ends(*nodes: Node) -> list[Any]:
    """What has become of nodes."""
    for node in nodes:
        node.join(120)
    assert not any(node.is_alive() for node in nodes)
    return [node.end for node in nodes]


def connected(port: int) -> socket.socket:
    """A connection to a node that may only begin to listen."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 60)
        except ConnectionRefusedError:
            time.sleep(0.02)
