"""What is wrong with a host, as a table: one line for each thing that has cost somebody a day.

A rule fails where a run would fail, hang or be wrong, warns where it would be slow or hard to understand, and abstains
where the host does not tell. Values of variables are patterns for the whole value, without regard to case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.doctor.facts import Facts
from unisono.launch.host import host_variables
from unisono.launch.host.host_variables import Finding, Level
from unisono.launch.nodes import network


@dataclass(frozen=True)
class Condition:
    """A rule about anything else.

    Attributes:
        name: of the rule.
        level: of the finding.
        finds: what is wrong, or None.
        remedy: what to do.
        needs: facts without which nothing can be said, separated by spaces.
    """

    name: str
    level: Level
    finds: Callable[[Facts], str | None]
    remedy: str
    needs: str = ""


CONDITIONS = (
    Condition(
        "stale launcher", "FAIL", lambda facts: _stale(facts.environment),
        "unset them, or open a new shell: a run would wait for processes that nobody starts",
    ),
    Condition(
        "GLOO_SOCKET_IFNAME", "FAIL", lambda facts: _absent(facts, network.GLOO, whole=True),
        "name an interface that is up, or unset it",
    ),
    Condition(
        "NCCL_SOCKET_IFNAME", "FAIL", lambda facts: _absent(facts, network.NCCL, whole=False),
        "name an interface that is up, or unset it",
    ),
    Condition(
        "misspelt variables", "WARNING", lambda facts: _misspelt(facts.environment), "correct the name, or unset it",
    ),
    Condition(
        "proxy", "WARNING", lambda facts: _proxied(facts.environment),
        "add localhost,127.0.0.1 to no_proxy",
    ),
    Condition(
        "host name", "WARNING",
        lambda facts: None if facts.resolves else f"the name of this host, {facts.host!r}, leads to no address",
        "add it to /etc/hosts: gloo asks for it on accelerators, unless GLOO_SOCKET_IFNAME names an interface",
        needs="resolves",
    ),
    Condition(
        "host name of a node", "WARNING", lambda facts: _loopback_of_many(facts),
        "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes", needs="resolves",
    ),
    Condition(
        "threads", "WARNING", lambda facts: _more_threads_than_cores(facts),
        "unset it: `unisono train` divides the cores among its processes",
    ),
    Condition(
        "cpu quota", "WARNING",
        lambda facts: f"{facts.cores} cores are shown, but the container may use {facts.quota:.1f}"
        if 0 < (facts.quota or 0) < facts.cores else None,
        "set layout.threads so that all processes together use no more", needs="quota",
    ),
    Condition(
        "memory", "WARNING",
        lambda facts: f"{facts.memory_gib:.1f} GiB of memory are left" if (facts.memory_gib or 0) < 2 else None,
        "end what else uses it", needs="memory_gib",
    ),
    Condition(
        "shared memory", "WARNING",
        lambda facts: f"{facts.shared_gib:.2f} GiB are free in /dev/shm, by which NCCL's processes exchange data"
        if (facts.shared_gib or 0) < 1 else None,
        "give the container more: docker run --shm-size=16g, or --ipc=host", needs="shared_gib",
    ),
    Condition(
        "open files", "WARNING",
        lambda facts: f"a process may have {facts.files} open files" if 0 <= (facts.files or 0) < 4096 else None,
        "ulimit -n 65536", needs="files",
    ),
    Condition(
        "locked memory", "WARNING",
        lambda facts: f"a process may lock {facts.locked_memory} bytes of memory, and InfiniBand needs to lock much"
        if facts.infiniband and 0 <= (facts.locked_memory or 0) < 2**30 else None,
        "ulimit -l unlimited", needs="locked_memory",
    ),
    Condition(
        "unseen accelerators", "WARNING",
        lambda facts: f"a driver offers accelerators ({facts.driver_devices}), and this build of torch sees none"
        if facts.driver_devices and not facts.devices else None,
        "install a build of torch for them, or a newer driver", needs="driver_devices",
    ),
    Condition(
        "unlike accelerators", "WARNING",
        lambda facts: f"the accelerators are not alike: {', '.join(sorted(set(facts.devices)))}"
        if len(set(facts.devices)) > 1 else None,
        "choose by CUDA_VISIBLE_DEVICES: the slowest decides",
    ),
    Condition(
        "memory of accelerators", "WARNING", lambda facts: _used_by_others(facts.device_memory or ()),
        "end those processes (nvidia-smi), or choose others by CUDA_VISIBLE_DEVICES",
    ),
    Condition(
        "compiler", "WARNING", lambda facts: None if facts.compiler else "there is no C++ compiler",
        "install g++: layout.compile=true needs it",
    ),
    Condition(
        "audio core", "WARNING",
        lambda facts: None if facts.audio_core else "the native core of unisono.audio was not built: recordings are decoded "
        "by NumPy's path, at a third of the speed, and in worker processes",
        "install g++ and the Python headers, then install unisono again; or take its wheel",
    ),
    Condition(
        "clock", "WARNING",
        lambda facts: f"the clock is {facts.clock_behind:.0f} s behind the time at which unisono was installed"
        if facts.clock_behind > 60 else None,
        "set it: certificates of servers and names of runs depend on it",
    ),
    Condition(
        "run directory", "FAIL",
        lambda facts: f"{facts.directory} cannot be written to: {facts.writable}" if facts.writable else None,
        "choose another run.dir",
    ),
    Condition(
        "disk full", "FAIL",
        lambda facts: f"{facts.disk_gib:.2f} GiB are free at {facts.directory}" if (facts.disk_gib or 0) < 1 else None,
        "free some, or choose another run.dir", needs="disk_gib",
    ),
    Condition(
        "disk space", "WARNING",
        lambda facts: f"{facts.disk_gib:.1f} GiB are free at {facts.directory}"
        if 1 <= (facts.disk_gib or 0) < 10 else None,
        "checkpoint.keep=1, or another run.dir", needs="disk_gib",
    ),
)  # fmt: skip


def examine(facts: Facts) -> Iterator[Finding]:
    """What the rules find, in the order of the tables."""
    yield from host_variables.examine(facts.environment)
    for condition in CONDITIONS:
        unknown = [name for name in condition.needs.split() if getattr(facts, name) is None]
        if unknown:
            yield Finding("ABSTAIN", condition.name, f"this system does not tell {', '.join(unknown)}")
        elif found := condition.finds(facts):
            yield Finding(condition.level, condition.name, found, condition.remedy)


def _stale(environment: Mapping[str, str]) -> str | None:
    """Variables of a launcher that has not started this process."""
    if {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"} & environment.keys():
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in environment]
    return f"{', '.join(found)} are set, as in a process of torchrun, which this is not" if found else None


def _absent(facts: Facts, name: str, *, whole: bool) -> str | None:
    up = [interface.name for interface in facts.interfaces if interface.up]
    return host_variables.absent(facts.environment, up, name, whole=whole)


def _misspelt(environment: Mapping[str, str]) -> str | None:
    return "; ".join(host_variables.misspelt(environment)) or None


def _proxied(environment: Mapping[str, str]) -> str | None:
    lower = {name.lower(): value for name, value in environment.items()}
    proxies = [name for name in ("http_proxy", "https_proxy", "all_proxy") if lower.get(name)]
    free = {part.strip() for part in lower.get("no_proxy", "").split(",")}
    if not proxies or {"localhost", "*"} & free:
        return None
    return f"{', '.join(proxies)} is set, and takes in what is meant for this host (trackers, stores, dashboards)"


def _loopback_of_many(facts: Facts) -> str | None:
    several = int(facts.environment.get("SLURM_JOB_NUM_NODES", "1")) > 1
    if not (several and (facts.resolves or "").startswith("127.")):
        return None
    return f"the name of this host, {facts.host!r}, leads to {facts.resolves}, where no other node finds it"


def _more_threads_than_cores(facts: Facts) -> str | None:
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or int(threads) <= facts.cores:
        return None
    return f"OMP_NUM_THREADS={threads}, but there are {facts.cores} cores"


def _used_by_others(free: Sequence[float]) -> str | None:
    if min(free, default=1.0) >= 0.8:
        return None
    return f"others use the accelerators: {', '.join(f'{part:.0%}' for part in free)} of their memory is free"
