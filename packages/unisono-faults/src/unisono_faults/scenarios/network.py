"""Networks: unreachable addresses, ports in use, IPv6 only, firewalls, disconnected cables."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from unisono_faults import job, task_fault
from unisono_faults.job import Job, free_port
from unisono_faults.matrix import REFUSED, UNREACHED, AbstainError, Outcome, Sandbox, scenario
from unisono_faults.scenarios.setup import run_by_hand

IPV4 = ("10.97.0.1", "10.97.0.2")
IPV6 = ("fd00:97::1", "fd00:97::2")


@scenario("F42", "an address that does not answer, a port in use")
def _port(sandbox: Sandbox) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    command, two = job.train_command("launch.start_timeout=10"), {"WORLD_SIZE": "2"}
    (done,) = run_by_hand(
        [sandbox.folder], [command], [{**two, "MASTER_ADDR": "192.0.2.1", "RANK": "1"}], sandbox.engine
    )
    outcome.seconds = round(time.monotonic() - began, 1)
    outcome.message = done.message or done.output.strip().splitlines()[-1]
    outcome.check(done.code == UNREACHED, f"{done.code}: {done.output[-1000:]}")
    outcome.check("192.0.2.1:" in done.output, f"the address is not named: {done.output[-1000:]}")
    outcome.check(outcome.seconds < 40, f"it took {outcome.seconds} s")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = str(taken.getsockname()[1])
        (done,) = run_by_hand([sandbox.folder], [command], [{**two, "MASTER_PORT": number}], sandbox.engine)
        outcome.check(done.code in (REFUSED, UNREACHED), f"{done.code}: {done.output[-1000:]}")
        outcome.check(number in done.output, f"the port is not named: {done.output[-1000:]}")
    return outcome


@scenario("F42b", "IPv6-only hosts: one, and two that connect")
def _ipv6(sandbox: Sandbox) -> Outcome:
    """Not even the loopback has an IPv4 address. Both runs give the same result as one on this host, which has IPv4."""
    before, outcome = sandbox.reference_digests(), Outcome()
    with make_hosts(IPV6) as names:
        alone = sandbox.run(command=command_on(names[0], *job.train_command("layout.world_size=2")))
        outcome.compare(alone, before, "one host")
        with _start_nodes(sandbox.for_scenario("two"), names, IPV6[0]) as jobs:
            ends = [node.finish() for node in jobs]
        for done in ends:
            outcome.compare(done, before, "two hosts")
    outcome.message = ends[0].line_with("meets the others").removeprefix("unisono: ")
    return outcome


@scenario("F42c", "a firewall that blocks the rendezvous port")
def _firewall(sandbox: Sandbox) -> Outcome:
    outcome, port = _run_behind_firewall(sandbox, UNREACHED, "launch.start_timeout", start_timeout=10.0)
    outcome.check(f"{IPV4[0]}:{port}" in outcome.message and "firewall" in outcome.message, "it is not explained")
    return outcome


@scenario("F42e", "a firewall that allows only the rendezvous port")
def _firewall_between(sandbox: Sandbox) -> Outcome:
    return _run_behind_firewall(sandbox, REFUSED, "firewall", IPV4[0], others=True)[0]


def _run_behind_firewall(
    sandbox: Sandbox, code: int, *says: str, others: bool = False, start_timeout: float = 60.0
) -> tuple[Outcome, int]:
    """Start two nodes while a host drops packets to the rendezvous port, or to all others; return that port, too."""
    outcome = Outcome()
    with make_hosts(IPV4) as names:
        port = free_port()
        drop_packets(names[0], port, others)
        began = time.monotonic()
        with _start_nodes(sandbox, names, IPV4[0], port, start_timeout) as jobs:
            ends = [node.finish(60) for node in jobs]
    outcome.seconds = round(max(done.ended_at for done in ends) - began, 1)
    for number, done in enumerate(ends):
        outcome.expect(done, code, *says, name=f"node {number}")
    outcome.check(outcome.seconds <= 30, f"it took {outcome.seconds} s")
    return outcome, port


@scenario("F42d", "a port that another process wants before it is used; MASTER_PORT already in use")
def _contested_port(sandbox: Sandbox) -> Outcome:
    """A run on one host chooses a free port itself, and reserves it until rank 0 listens."""
    before, outcome = sandbox.reference_digests(), Outcome()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        named = taken.getsockname()[1]
        command = job.train_command("layout.world_size=2")
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{named}", task_fault.ADDRESS_WANTED: "1"}
        with sandbox.job(command=command, variables=variables) as run:
            place, got = _read_address(run), False
            with socket.socket() as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with suppress(OSError):
                    stranger.bind(place)
                    got = True
                outcome.check(not run.step(), "steps had been run")
                done = run.finish()
    outcome.check(place[1] != named, f"port {named} of the environment was taken, and the run wanted it")
    outcome.check(not got, f"another process could have the port {place[1]} before rank 0")
    outcome.compare(done, before)
    outcome.message = f"the port {named} of MASTER_PORT is left alone; the port the run chose is reserved for it"
    return outcome


def _read_address(run: Job) -> tuple[str, int]:
    """The address at which the processes of a run meet, as written by rank 0."""
    address = run.folder / task_fault.ADDRESS
    job.wait_for(lambda: address.exists() or run.process.poll() is not None, 120.0, "the address of rank 0")
    if not address.exists():
        raise AssertionError(run.finish().output[-2000:])
    host, port = address.read_text().split()
    return host, int(port)


@scenario("A8", "a node loses its network (launch.timeout=8)")
def _disconnected_node(sandbox: Sandbox) -> Outcome:
    words = ("task.sleep=0.05", "train.steps=200")
    before = sandbox.reference_digests(*words)
    with (
        make_hosts(IPV4) as names,
        _start_nodes(sandbox, names, IPV4[0], None, 120.0, "launch.timeout=8", *words) as jobs,
    ):
        jobs[0].wait_for_step(5)
        began = time.monotonic()
        run_ip("-n", names[1], "link", "set", "v1", "down")
        ends = [node.finish(120) for node in jobs]
        outcome = Outcome(message=ends[0].message, seconds=round(max(done.ended_at for done in ends) - began, 1))
        outcome.check(
            all(done.code not in (0, 1, 124) for done in ends), f"{[(d.code, d.output[-800:]) for d in ends]}"
        )
        explained = all("(launch.timeout)" in done.output or "node" in done.message for done in ends)
        outcome.check(explained, f"not explained on both nodes: {[done.output[-800:] for done in ends]}")
        outcome.check((outcome.seconds or 0) <= 30, f"it took {outcome.seconds} s")
        outcome.check(not ends[0].orphans, f"processes {ends[0].orphans} are still running")
        outcome.lost_steps = jobs[0].step() - max(job.newest_step(jobs[0].run), 0)
    sandbox.check_resume(outcome, before, *words)
    return outcome


@contextmanager
def make_hosts(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Create two connected network namespaces; with IPv6 addresses they have no IPv4 address at all."""
    if not shutil.which("ip") or os.geteuid() != 0:
        raise AbstainError("simulating hosts by network namespaces needs root and iproute2")
    tag = os.getpid() % 100000
    names = [f"ufa{tag}", f"ufb{tag}"]
    try:
        try:
            for name in names:
                run_ip("netns", "add", name)
            run_ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
            for number, (name, address) in enumerate(zip(names, addresses, strict=True)):
                for link in ("lo", f"v{number}"):
                    run_ip("-n", name, "link", "set", link, "up")
                # Without nodad, duplicate address detection delays an IPv6 address by a second.
                how = ("/64", "nodad") if ":" in address else ("/24",)
                run_ip("-n", name, "addr", "add", f"{address}{how[0]}", "dev", f"v{number}", *how[1:])
                if ":" in address:
                    run_ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
        except subprocess.CalledProcessError as error:
            raise AbstainError(f"cannot create network namespaces here: {error.stderr.strip()}") from error
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def _start_nodes(
    sandbox: Sandbox,
    names: Sequence[str],
    host: str,
    port: int | None = None,
    start_timeout: float = 60.0,
    *words: str,
) -> Iterator[list[Job]]:
    """Start the small task on two hosts, one process on each, as a user would."""
    place = f"[{host}]" if ":" in host else host
    settings = (
        "layout.world_size=2", "launch.nodes=2", f"launch.rendezvous={place}:{port or free_port()}",
        f"launch.start_timeout={start_timeout:g}", *words,
    )  # fmt: skip
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Job(
                    sandbox.folder, output=f"host-{number}.txt",
                    command=command_on(name, *job.train_command(*settings, f"launch.node_rank={number}")),
                )
            )
            for number, name in enumerate(names)
        ]  # fmt: skip


def drop_packets(name: str, port: int, others: bool = False) -> None:
    """Make a host drop packets to a port; with `others`, to every other port except replies to its own connections."""
    rule = ["INPUT", "-p", "tcp", *(["!"] if others else []), "--dport", f"{port}", "-j", "DROP"]
    commands = [["iptables", "-A", *rule]]
    if others:
        commands.insert(0, ["iptables", "-A", "INPUT", "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT"])
    elif not shutil.which("iptables"):
        commands = [["ip", "route", "add", "blackhole", IPV4[1]]]  # no packet returns to the other host
    for command in commands:
        result = subprocess.run(command_on(name, *command), capture_output=True, text=True)
        if result.returncode:
            raise AbstainError(f"cannot set up a firewall here: {result.stderr.strip()}")


def command_on(name: str, *words: str) -> list[str]:
    """A command that runs on a host."""
    return ["ip", "netns", "exec", name, *words]


def run_ip(*words: str) -> None:
    """Change interfaces and namespaces of this machine."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
