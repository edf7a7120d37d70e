"""What is wrong with a host, as a table: one line for each thing that has cost somebody a day.

A rule fails where a run would fail, hang or be wrong, warns where it would be slow or hard to understand, and abstains
where the host does not tell. Values of variables are patterns for the whole value, without regard to case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.doctor.facts import HostFacts
from unisono.launch.host import host_variables
from unisono.launch.host.host_variables import HostFinding, Level
from unisono.launch.nodes import network


@dataclass(frozen=True)
class Condition:
    """A rule about anything else.

    Attributes:
        name: of the rule.
        level: of the finding.
        describe: what is wrong, or None.
        remedy: what to do.
        needs: facts without which nothing can be said, separated by spaces.
    """

    name: str
    level: Level
    describe: Callable[[HostFacts], str | None]
    remedy: str
    needs: str = ""


CONDITIONS = (
    Condition(
        "stale launcher", "FAIL", lambda facts: _describe_stale_launcher(facts.environment),
        "unset them, or open a new shell; otherwise a run waits for processes that nobody starts",
    ),
    Condition(
        "GLOO_SOCKET_IFNAME", "FAIL", lambda facts: _describe_missing_interfaces(facts, network.GLOO, whole=True),
        "name an interface that is up, or unset it",
    ),
    Condition(
        "NCCL_SOCKET_IFNAME", "FAIL", lambda facts: _describe_missing_interfaces(facts, network.NCCL, whole=False),
        "name an interface that is up, or unset it",
    ),
    Condition(
        "misspelt variables", "WARNING",
        lambda facts: "; ".join(host_variables.find_misspelt_variables(facts.environment)) or None,
        "correct the name, or unset it",
    ),
    Condition(
        "proxy", "WARNING", lambda facts: _describe_proxy(facts.environment),
        "add localhost,127.0.0.1 to no_proxy",
    ),
    Condition(
        "host name", "WARNING",
        lambda facts: None if facts.resolves else f"the name of this host, {facts.host!r}, does not resolve",
        "add it to /etc/hosts: gloo looks it up on accelerators unless GLOO_SOCKET_IFNAME names an interface",
        needs="resolves",
    ),
    Condition(
        "host name of a node", "WARNING", lambda facts: _describe_loopback_name(facts),
        "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes", needs="resolves",
    ),
    Condition(
        "threads", "WARNING", lambda facts: _describe_thread_count(facts),
        "unset it: `unisono train` divides the cores among its processes",
    ),
    Condition(
        "memory", "WARNING",
        lambda facts: f"only {facts.memory_gib:.1f} GiB of memory are free" if (facts.memory_gib or 0) < 2 else None,
        "stop other processes that use it", needs="memory_gib",
    ),
    Condition(
        "shared memory", "WARNING",
        lambda facts: f"only {facts.shared_gib:.2f} GiB are free in /dev/shm, where NCCL exchanges data"
        if (facts.shared_gib or 0) < 1 else None,
        "give the container more: docker run --shm-size=16g, or --ipc=host", needs="shared_gib",
    ),
    Condition(
        "open files", "WARNING",
        lambda facts: f"a process may open only {facts.files} files" if 0 <= (facts.files or 0) < 4096 else None,
        "run ulimit -n 65536", needs="files",
    ),
    Condition(
        "locked memory", "WARNING",
        lambda facts: f"a process may lock only {facts.locked_memory} bytes of memory, but InfiniBand needs far more"
        if facts.infiniband and 0 <= (facts.locked_memory or 0) < 2**30 else None,
        "run ulimit -l unlimited", needs="locked_memory",
    ),
    Condition(
        "unseen accelerators", "WARNING",
        lambda facts: f"the driver offers accelerators ({facts.driver_devices}), but this build of torch sees none"
        if facts.driver_devices and not facts.devices else None,
        "install a torch build for them, or a newer driver", needs="driver_devices",
    ),
    Condition(
        "unlike accelerators", "WARNING",
        lambda facts: f"the accelerators are of different kinds: {', '.join(sorted(set(facts.devices)))}"
        if len(set(facts.devices)) > 1 else None,
        "select equal ones by CUDA_VISIBLE_DEVICES: the slowest sets the pace",
    ),
    Condition(
        "memory of accelerators", "WARNING", lambda facts: _describe_used_memory(facts.device_memory or ()),
        "stop those processes (nvidia-smi), or select other devices by CUDA_VISIBLE_DEVICES",
    ),
    Condition(
        "compiler", "WARNING", lambda facts: None if facts.compiler else "there is no C++ compiler",
        "install g++: layout.compile=true needs it",
    ),
    Condition(
        "audio core", "WARNING",
        lambda facts: None if facts.audio_core != "" else "the native core of unisono-audio was not built: recordings "
        "are decoded with NumPy, at a third of the speed, and in worker processes",
        "install g++ and the Python headers, then reinstall unisono-audio; or install its wheel",
    ),
    Condition(
        "clock", "WARNING",
        lambda facts: f"the clock is {facts.clock_behind:.0f} s behind the time at which unisono was installed"
        if facts.clock_behind > 60 else None,
        "correct it: server certificates and names of runs depend on it",
    ),
    Condition(
        "run directory", "FAIL",
        lambda facts: f"{facts.directory} cannot be written to: {facts.writable}" if facts.writable else None,
        "choose another run.dir",
    ),
    Condition(
        "disk full", "FAIL",
        lambda facts: f"only {facts.disk_gib:.2f} GiB are free at {facts.directory}"
        if (facts.disk_gib or 0) < 1 else None,
        "free some space, or choose another run.dir", needs="disk_gib",
    ),
    Condition(
        "disk space", "WARNING",
        lambda facts: f"only {facts.disk_gib:.1f} GiB are free at {facts.directory}"
        if 1 <= (facts.disk_gib or 0) < 10 else None,
        "set checkpoint.keep=1, or choose another run.dir", needs="disk_gib",
    ),
)  # fmt: skip


def check_rules(facts: HostFacts) -> Iterator[HostFinding]:
    """What the rules find, in the order of the tables."""
    yield from host_variables.check_variables(facts.environment)
    for condition in CONDITIONS:
        unknown = [name for name in condition.needs.split() if getattr(facts, name) is None]
        if unknown:
            why = f"not checked: this system does not report {', '.join(unknown)}"
            yield HostFinding("ABSTAIN", condition.name, why)
        elif found := condition.describe(facts):
            yield HostFinding(condition.level, condition.name, found, condition.remedy)


def _describe_stale_launcher(environment: Mapping[str, str]) -> str | None:
    """Variables of a launcher that has not started this process."""
    if {"TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"} & environment.keys():
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in names if name in environment]
    return f"{', '.join(found)} are set as by torchrun, but torchrun did not start this process" if found else None


def _describe_missing_interfaces(facts: HostFacts, name: str, *, whole: bool) -> str | None:
    up = [interface.name for interface in facts.interfaces if interface.up]
    return host_variables.describe_missing_interfaces(facts.environment, up, name, whole=whole)


def _describe_proxy(environment: Mapping[str, str]) -> str | None:
    lower = {name.lower(): value for name, value in environment.items()}
    proxies = [name for name in ("http_proxy", "https_proxy", "all_proxy") if lower.get(name)]
    free = {part.strip() for part in lower.get("no_proxy", "").split(",")}
    if not proxies or {"localhost", "*"} & free:
        return None
    return f"{', '.join(proxies)} is set and also catches requests to this host (trackers, stores, dashboards)"


def _describe_loopback_name(facts: HostFacts) -> str | None:
    several = int(facts.environment.get("SLURM_JOB_NUM_NODES", "1")) > 1
    if not (several and (facts.resolves or "").startswith("127.")):
        return None
    return f"the name of this host, {facts.host!r}, resolves to {facts.resolves}, which other nodes cannot reach"


def _describe_thread_count(facts: HostFacts) -> str | None:
    threads = facts.environment.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal() or int(threads) <= facts.cores:
        return None
    return f"OMP_NUM_THREADS={threads}, but there are {facts.cores} cores"


def _describe_used_memory(free: Sequence[float]) -> str | None:
    if min(free, default=1.0) >= 0.8:
        return None
    return f"others use the accelerators: {', '.join(f'{part:.0%}' for part in free)} of their memory is free"
