"""What several nodes must agree on before any of them starts a process.

They must mean the same run: configuration, code, versions and data. They must reach each other through their chosen
interfaces. And they must share a file system, since every process reads the run's configuration there and writes its
part of a checkpoint.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from unisono.checkpoint.core import provenance
from unisono.config.schema.run import RunConfig
from unisono.launch.nodes import network
from unisono.launch.nodes.tcp_rendezvous import NodeCommunicator
from unisono.runtime.communication.communicator import Node
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.communication.listening import reserve_port
from unisono.runtime.errors import RunError
from unisono.runtime.files import write_whole
from unisono.runtime.untrusted import safe_paths, safe_writing

TOKEN = "nodes.token"  # in the run's folder during startup: a random number known only to this start
# Keys that may differ between nodes; node 0 names the run.
_PER_NODE_KEYS = ("launch.node_rank", "launch.interface", "run.name")
_PATIENCE = 10.0  # seconds for a network file system to show what another host has written
_CONNECT_TIMEOUT = 5.0  # seconds for a connection between two nodes


def agree_on_node(meeting: NodeCommunicator, config: RunConfig, stack: ExitStack) -> Node:
    """Compare what the nodes were given, choose interfaces, and check that every node reaches every other.

    Args:
        meeting: All nodes.
        config: Concrete, of this node; its task has been imported.
        stack: Keeps resources while the processes run: rank 0's reserved port.

    Returns:
        This node, with the address at which all processes will meet.

    Raises:
        RunError: Naming two nodes and how they differ, or two that cannot reach each other.
    """
    provenance.check_agreement(meeting, provenance.shared_inputs(config, _PER_NODE_KEYS), "node")
    return _connect_nodes(meeting, config, stack)


def _connect_nodes(meeting: NodeCommunicator, config: RunConfig, stack: ExitStack) -> Node:
    """Choose this node's interface, and check that all nodes reach each other through theirs."""
    assert config.launch.rendezvous is not None
    interface, (host, port) = config.launch.interface, network.parse_rendezvous(config.launch.rendezvous)

    def choose() -> tuple[str, str] | None:  # not on node 0, whose own name may mean 127.0.1.1
        return network.choose_interface(interface, host, port) if meeting.rank else None

    others = raise_everywhere(meeting, choose, "the interfaces of all nodes", member="node")
    with ExitStack() as listeners:

        def listen() -> dict[str, Any]:
            name, address = others[meeting.rank] or network.choose_interface(interface, others[1][1], port)
            listener = listeners.enter_context(_open_listener(address))
            kept = stack.enter_context(reserve_port(address))
            ports = [each.getsockname()[1] for each in (listener, kept)]
            return {"interface": name, "address": address, "ports": ports}

        nodes = raise_everywhere(meeting, listen, "the addresses of all nodes", member="node")
        reach = partial(_reach_all_nodes, nodes, meeting.rank)
        raise_everywhere(meeting, reach, "all nodes to reach each other", member="node")
    return Node(meeting.rank, meeting.size, nodes[0]["address"], nodes[0]["ports"][1], nodes[meeting.rank]["interface"])


def _open_listener(address: str) -> socket.socket:
    try:
        return socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    except OSError as error:
        raise RunError(
            f"this node cannot listen at {address}: {os.strerror(error.errno or 0)}; set launch.interface to another "
            "interface"
        ) from error


def _reach_all_nodes(nodes: list[dict[str, Any]], mine: int) -> None:
    """Connect to every other node once; the kernel there accepts."""
    here = nodes[mine]
    for rank, node in enumerate(nodes):
        try:
            if rank != mine:
                place = node["address"], node["ports"][0]
                socket.create_connection(place, _CONNECT_TIMEOUT, (here["address"], 0)).close()
        except OSError as error:
            raise RunError(
                f"node {mine} ({here['interface']}, {here['address']}) cannot reach node {rank} ({node['interface']}, "
                f"{node['address']}): {error.strerror or 'no answer'}. Set launch.interface on each node to interfaces "
                "that reach each other, and open all ports between the nodes in the firewall"
            ) from error


def write_token(path: Path) -> str:
    """Write a random number into the run's folder, by which other nodes recognise that they see the same folder."""
    token = secrets.token_hex(8)
    write_whole(path / TOKEN, token)
    return token


def remove_token(path: Path, node: Node) -> None:
    """Remove the number once all nodes have seen it."""
    if node.rank == 0:
        (path / TOKEN).unlink(missing_ok=True)


def check_shared_directory(path: Path, token: str) -> None:
    """Check that a folder is the one that node 0 created, and that this node can write to it.

    Raises:
        RunError: If not.
    """
    deadline = time.monotonic() + _PATIENCE
    while not _has_token(path / TOKEN, token):
        if time.monotonic() > deadline:
            there = "is a different folder on this node" if path.exists() else "does not exist on this node"
            raise RunError(
                f"{path}, which node 0 created for this run, {there}: run.dir must be on a file system that all "
                "nodes share, under the same path. If there is none, set launch.shared_folder=false and "
                "checkpoint.upload.url"
            )
        time.sleep(0.2)
    try:
        with tempfile.TemporaryFile(dir=safe_writing.make_folder(path, "logs")):
            pass
    except OSError as error:
        raise RunError(
            f"{path} cannot be written to from this node: {error.strerror}; choose another run.dir"
        ) from error


def _has_token(path: Path, token: str) -> bool:
    with suppress(OSError):
        list(path.parent.parent.iterdir())  # makes a network file system refresh its directory cache
        return safe_paths.read_text(path.parent, path.name) == token
    return False
