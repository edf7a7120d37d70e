"""What launchers that place runs on other hosts refuse alike."""

from __future__ import annotations

from pathlib import Path

from unisono.launch.launcher import Hosts, Job
from unisono.runtime.errors import ConfigError

PORT = 29400  # at which the launchers of a run meet on its first host
_START_TIMEOUT = 1800  # seconds: hosts of a cluster appear when an image is there


def refuse_misfit(job: Job, hosts: Hosts) -> None:
    """Refuse a run that cannot be divided among hosts as asked.

    Args:
        job: of the run.
        hosts: of each run.

    Raises:
        ConfigError: naming the remedy.
    """
    nodes, gpus = hosts.nodes, hosts.gpus
    if nodes > 1 and job.one_host:
        raise ConfigError(f"nodes={nodes}: {job.name} runs on one host; {job.one_host}")
    if job.processes % nodes:
        raise ConfigError(
            f"nodes={nodes}: {job.name} has {job.processes} process{'es' * (job.processes != 1)}, which cannot be "
            f"divided among them; set layout.world_size to a multiple of {nodes}"
        )
    here = job.processes // nodes
    if gpus and here > gpus:
        raise ConfigError(
            f"gpus={gpus}: {job.name} has {here} processes on each node; use gpus={here}, or a smaller "
            "layout.world_size"
        )
    if job.devices > gpus * nodes:
        raise ConfigError(
            f"{job.name} needs {job.devices} accelerators: add gpus={job.devices // nodes}, or layout.device=cpu"
        )


def join_words(job: Job, nodes: int, number: str, address: str) -> list[str]:
    """The words by which the launcher of one host finds those of the others; none for a single host.

    Args:
        job: of the run.
        nodes: hosts of the run.
        number: of this host.
        address: of the first one, with a port.
    """
    if nodes == 1:
        return []
    words = [f"launch.nodes={nodes}", f"launch.node_rank={number}", f"launch.rendezvous={address}"]
    given = any(word.startswith("launch.start_timeout=") for word in job.command)
    return words if given else [*words, f"launch.start_timeout={_START_TIMEOUT}"]


def list_cores(job: Job, nodes: int, cpus: int | None, memory_gb: float | None) -> int:
    """Cores of a run on each host: as asked, else as many as its memory, its workers or its processes suggest."""
    here = job.processes // nodes
    return cpus or max(int((memory_gb or 0) // 10), -(-job.workers // nodes), here)


def console_of(job: Job, node: int) -> Path:
    """The file for what a run prints on one of its hosts."""
    return job.console if node == 0 else job.console.with_suffix(f".node-{node}.log")
