"""What a run of many ranks costs on its way in, per exchange, and until a dead rank is named: no torch, no network.

    python -m benchmarks.control_plane [--ranks 64 256 1024] [--per-node 8]

Rank 0 is a process of its own, whose processor time and bytes are counted; the others are threads of a few processes
on this host, with the same code that real ranks run (`TcpCommunicator`, `NodeCommunicator`). Measured are the meeting
of all ranks at rank 0, a barrier, a maximum (what JAX ranks agree on after every step), gathers, errors of one rank on
all, the seconds until one that is gone is named on every rank, what a node's launcher sends and receives while a run
goes on, and the processor time of a node's monitor. Seconds of the clock are those of two cores that also run all other
ranks; processor seconds and bytes of rank 0 are what a cluster would see.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from unisono.launch.nodes.tcp_rendezvous import NodeCommunicator, connect_nodes
from unisono.runtime.communication import authenticated_line
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.communication.consensus import raise_everywhere
from unisono.runtime.communication.tcp_communicator import TcpCommunicator, connect_processes
from unisono.runtime.errors import ConfigError, DeadlineError
from unisono.runtime.text import format_bytes
from unisono.supervise.monitor import Specification

TIMEOUT = 300.0  # seconds for each wait
CROWD = 256  # threads of a process
WATCHED = 10.0  # seconds for which nodes and a monitor are looked at


class Counter:
    """Bytes that this process sends and receives on its connections."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        sendall, receive = socket.socket.sendall, socket.socket.recv
        counter = self

        class Counted(socket.socket):
            def sendall(self, data: Any, *flags: Any) -> None:
                counter.sent += len(data)
                sendall(self, data, *flags)

            def recv(self, *arguments: Any) -> bytes:
                data = receive(self, *arguments)
                counter.received += len(data)
                return data

        socket.socket = Counted  # type: ignore[misc]


def _fail() -> None:
    raise ConfigError("a rank that fails on purpose")


def steps(group: TcpCommunicator) -> dict[str, Callable[[], Any]]:
    """The exchanges that are measured, in their order; the last one a rank leaves."""

    def all_fail() -> None:
        try:
            raise_everywhere(group, _fail if group.rank == group.size - 1 else None, "an error of one rank")
        except ConfigError:
            return
        raise AssertionError("no rank failed")

    def lose() -> None:
        if group.rank == group.size - 1:
            group.close()
            return
        try:
            group.gather(None, "a rank that is gone")
        except DeadlineError as error:
            if f"rank {group.size - 1} " not in str(error):
                raise AssertionError(f"another rank was named: {error}") from error
            return
        raise AssertionError("nobody noticed")

    return {
        "barrier": lambda: group.barrier("a barrier"),
        "maximum": lambda: group.reduce_max([group.rank, 1, 0], "the decision of all ranks after this step"),
        "gather of unequal 60 bytes": lambda: group.gather({"rank": group.rank, "digest": "0" * 40}, "a gather"),
        "gather of equal 60 bytes": lambda: group.gather({"rank": 0, "digest": "0" * 40}, "a gather"),
        "gather at rank 0 of 30 kB": lambda: group.gather_to_first([group.rank, "0" * 30_000], "a gather"),
        "error of one rank": all_fail,
        "dead rank named": lose,
    }


def take_part(rank: int, size: int, port: int, say: Callable[[str, float, float, int, int], None]) -> None:
    """Be a rank: meet the others, and do every exchange."""
    counter = Counter() if rank == 0 else None

    def timed(name: str, act: Callable[[], Any]) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        bytes_before = (counter.sent, counter.received) if counter else (0, 0)
        result = act()
        bytes_after = (counter.sent, counter.received) if counter else (0, 0)
        say(
            name, time.perf_counter() - began, time.process_time() - cpu,
            bytes_after[0] - bytes_before[0], bytes_after[1] - bytes_before[1],
        )  # fmt: skip
        return result

    place = ProcessInfo(rank=rank, world_size=size, local_rank=0, local_world_size=1, launcher="torchrun")
    group = timed("meeting", lambda: connect_processes(place, "127.0.0.1", port, TIMEOUT, TIMEOUT))
    for name, act in steps(group).items():
        if name != "dead rank named":
            group.barrier("all to be ready")  # of which only the next is measured
        timed(name, act)
    group.close()


def measure_ranks(size: int) -> list[tuple[str, float, float, int, int]]:
    """Run `size` ranks; what rank 0 saw of each exchange: name, seconds, processor seconds, bytes sent and received."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    words = [sys.executable, "-m", "benchmarks.control_plane"]
    crowd = [
        subprocess.Popen([*words, "--take-part", str(first), str(min(first + CROWD, size)), str(size), str(port)])
        for first in range(1, size, CROWD)
    ]
    try:
        first = subprocess.run([*words, "--take-part", "0", "1", str(size), str(port)], capture_output=True, text=True)
        codes = [process.wait(TIMEOUT) for process in crowd]
    finally:
        for process in crowd:
            process.kill()
    if first.returncode or any(codes):
        raise SystemExit(f"{size} ranks: {first.stderr}{codes}")
    return [tuple(json.loads(line)) for line in first.stdout.splitlines()]


def measure_nodes(nodes: int) -> dict[str, float]:
    """What node 0's launcher spends on `nodes` launchers while a run goes on, per second."""
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        held.close()
        over, counter = threading.Event(), Counter()
        os.environ[authenticated_line.TOKEN] = "t" * 32

        def node(rank: int) -> None:
            with connect_nodes(rank, nodes, f"127.0.0.1:{port}", TIMEOUT, TIMEOUT, Path(folder)) as meeting:
                _watch(meeting, over)

        threads = [threading.Thread(target=node, args=(rank,)) for rank in range(1, nodes)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        with connect_nodes(0, nodes, f"127.0.0.1:{port}", TIMEOUT, TIMEOUT, Path(folder)) as meeting:
            results["seconds to meet"] = time.perf_counter() - began
            cpu, sent = time.process_time(), counter.sent
            with meeting.watch_nodes():
                time.sleep(WATCHED)
                # every launcher is a part of this process
                results["bytes a second, all launchers together"] = (counter.sent - sent) / WATCHED
                results["share of a core, all launchers together"] = (time.process_time() - cpu) / WATCHED
                over.set()
        for thread in threads:
            thread.join(TIMEOUT)
    return results


def _watch(meeting: NodeCommunicator, over: threading.Event) -> None:
    with meeting.watch_nodes():
        over.wait()


RANK = """
import sys, time
from pathlib import Path
from unisono.runtime import heartbeat
writer = heartbeat.HeartbeatWriter(Path(sys.argv[1]), int(sys.argv[2]))
for step in range(1, 100_000):
    writer.step(step, 0.1)
    time.sleep(0.1)
"""


def measure_monitor(ranks: int) -> float:
    """The share of a core that the monitor of a node with so many ranks takes while each reports ten steps a second."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "heartbeats")
        directory.mkdir()
        processes = [subprocess.Popen([sys.executable, "-c", RANK, str(directory), str(rank)]) for rank in range(ranks)]
        limits = {"stuck_after": 600.0}
        specification = Specification(str(directory), folder, list(range(ranks)), limits=limits)
        words = [sys.executable, "-m", "unisono.supervise.monitor", json.dumps(asdict(specification))]
        monitor = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        try:
            while sum(1 for _ in directory.iterdir()) < ranks:
                time.sleep(0.1)
            time.sleep(2.0)
            watched = psutil.Process(monitor.pid)
            before = sum(watched.cpu_times()[:2])
            time.sleep(WATCHED)
            return (sum(watched.cpu_times()[:2]) - before) / WATCHED
        finally:
            for process in (monitor, *processes):
                process.kill()
                process.wait()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--only", choices=["ranks", "nodes"], help="one of the two tables")
    parser.add_argument("--take-part", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ[authenticated_line.TOKEN] = "t" * 32
    if options.take_part:
        first, last, size, port = options.take_part
        if first == 0:
            take_part(0, size, port, lambda *row: print(json.dumps(row), flush=True))
            return
        threads = [
            threading.Thread(target=take_part, args=(rank, size, port, lambda *row: None))
            for rank in range(first, last)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8 * max(options.ranks) + 1000), hard))
    if options.only != "nodes":
        print_ranks(options.ranks)
    if options.only != "ranks":
        print_nodes(options.ranks, options.per_node)


def print_ranks(sizes: list[int]) -> None:
    """What rank 0 of so many ranks spends on each exchange."""
    print("| ranks | exchange | seconds | processor seconds of rank 0 | sent by rank 0 | received |")
    print("|---|---|---|---|---|---|")
    for size in sizes:
        for name, seconds, cpu, sent, received in measure_ranks(size):
            print(f"| {size} | {name} | {seconds:.3f} | {cpu:.3f} | {format_bytes(sent)} | {format_bytes(received)} |")


def print_nodes(sizes: list[int], per_node: int) -> None:
    """What launchers and monitors spend while a run goes on."""
    for size in sizes:
        nodes = size // per_node
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            found = measure_nodes(nodes)
        for name, value in found.items():
            print(f"{nodes} nodes: {name} {value:.4g}")
    print(f"monitor of a node of {per_node} ranks: {100 * measure_monitor(per_node):.2f} % of a core")


if __name__ == "__main__":
    main()
