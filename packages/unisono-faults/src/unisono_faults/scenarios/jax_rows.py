"""Faults of the other modules, with the small task in JAX. Their keys end in `j`."""

from __future__ import annotations

import time

from unisono_faults import job
from unisono_faults.job import free_port
from unisono_faults.matrix import SCENARIOS, UNREACHED, Outcome, Sandbox, scenario
from unisono_faults.scenarios import death, network, storage  # noqa: F401 - their rows are added again
from unisono_faults.scenarios.kills import kill_rank
from unisono_faults.scenarios.setup import run_by_hand


def _add(key: str, *, quick: bool = False) -> None:
    """Add the row of the same fault in torch, with the task in JAX."""
    row = SCENARIOS[key]

    @scenario(f"{key}j", f"JAX: {row.text}", quick=quick)
    def _act(sandbox: Sandbox) -> Outcome:
        return row.act(sandbox.in_jax())


_add("A1", quick=True)
for _key in ("A5", "A9", "B10", "B12", "B13", "F42", "C20", "C24", "C27"):
    _add(_key)


@scenario("F42k", "JAX: a firewall that blocks JAX's coordinator between two hosts")
def _coordinator(sandbox: Sandbox) -> Outcome:
    outcome, port = Outcome(), str(free_port())
    with network.make_hosts(network.IPV4) as names:
        network.drop_packets(names[0], int(port), others=True)
        commands = [network.command_on(name, *job.train_command()) for name in names]
        host = {"MASTER_ADDR": network.IPV4[0], "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        began = time.monotonic()
        variables = [{**host, "GLOO_SOCKET_IFNAME": name} for name in ("v0", "v1")]
        ends = run_by_hand([sandbox.folder] * 2, commands, variables, "jax")
    outcome.seconds = round(time.monotonic() - began, 1)
    for rank, done in reversed([*enumerate(ends)]):  # the message of the first
        outcome.expect(done, UNREACHED, name=f"rank {rank}")
    said = "JAX's coordinator at" in outcome.message and "firewall" in outcome.message
    outcome.check(said, f"it is not explained: {ends[0].output[-1000:]}")
    outcome.check(outcome.seconds < 60, f"it took {outcome.seconds} s")
    return outcome


@scenario("A4j", "JAX: kill -9 of rank 0 at random instants")
def _first(sandbox: Sandbox) -> Outcome:
    return kill_rank(sandbox.in_jax(), 0)


@scenario("A4k", "JAX: kill -9 of rank 1 at random instants")
def _second(sandbox: Sandbox) -> Outcome:
    return kill_rank(sandbox.in_jax(), 1)
