"""What is wrong with a host, as a table: one line for each thing that has cost somebody a day.

A rule fails where a run would fail, hang or be wrong, warns where it would be slow or hard to understand, and abstains
where the host does not tell. Values of variables are patterns for the whole value, without regard to case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from unisono.doctor.facts import Facts
from unisono.launch import network

Level = Literal["FAIL", "WARNING", "ABSTAIN"]
ON = r"1|true|yes|on|y"
OFF = r"0|false|no|off|n"
SET = r".+"
# A pair of options, as torch's ConfigTokenizer reads it (c10/core/AllocatorConfig.h): spaces do not count.
_PAIR = r"\s*[a-z0-9_]+\s*:\s*(\[[^\]]*\]|[^,:=\[\]\s]+)\s*"


@dataclass(frozen=True)
class Variable:
    """A rule about variables of the environment.

    Attributes:
        names: of variables, separated by spaces.
        level: of the finding.
        bad: pattern of values that are not right.
        why: what such a value does.
        remedy: what to do.
    """

    names: str
    level: Level
    bad: str
    why: str
    remedy: str


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


@dataclass(frozen=True)
class Finding:
    """What a rule has to say.

    Attributes:
        level: FAIL, WARNING or ABSTAIN.
        rule: its name: that of the variable, or of the condition.
        what: what is wrong, or why nothing can be said.
        remedy: what to do.
    """

    level: Level
    rule: str
    what: str
    remedy: str = ""


def but(good: str) -> str:
    """The pattern of all values that another does not fit.

    >>> bool(re.fullmatch(but("a|b"), "c")), bool(re.fullmatch(but("a|b"), "a"))
    (True, False)
    """
    return rf"(?!(?:{good})\Z).*"


VARIABLES = (
    # memory of accelerators
    Variable(
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF", "FAIL", but(rf"({_PAIR}(,{_PAIR})*)?"),
        "torch cannot read it, and refuses to start on an accelerator",
        "write option:value, with commas between several, as in max_split_size_mb:128",
    ),
    Variable(
        "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF", "WARNING", SET,
        "the old name, kept as an alias", "call it PYTORCH_ALLOC_CONF",
    ),
    Variable(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", "WARNING", ON, "every allocation goes to the driver", "unset it",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", "WARNING", r"\s*|-1|none|NoDevFiles",
        "it hides every accelerator, so runs go to the CPU", "unset it, or name devices",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", "FAIL",
        r"(.*,)?\s*([^,\s]+)\s*,(.*,)?\s*\2\s*(,.*)?",
        "a device is named twice: the driver hides what follows", "name each device once",
    ),
    # left on after a search for a fault
    Variable(
        "CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING", "WARNING", ON, "the CPU waits for every kernel",
        "unset it, unless you look for the kernel that fails",
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", "FAIL", but("off|info|detail|"), "torch refuses the value",
        "OFF, INFO or DETAIL, or unset it",
    ),
    Variable(
        "TORCH_DISTRIBUTED_DEBUG", "WARNING", "detail", "every collective is compared on all ranks before it runs",
        "unset it, unless you look for ranks that disagree",
    ),
    Variable(
        "NCCL_DEBUG", "WARNING", "info|trace", "NCCL writes a line for every communicator, or for every call",
        "WARN, or unset it",
    ),
    Variable(
        "PYTHONOPTIMIZE", "WARNING", but("0|"), "assertions are left out, also those that guard results", "unset it",
    ),
    Variable(
        "TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE", "WARNING", ON, "layout.compile=true compiles nothing", "unset it",
    ),
    Variable(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "WARNING", ON, "every start compiles anew", "unset it",
    ),
    # waiting
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING", "FAIL", "0",
        "NCCL's deadline ends no process: where one rank is gone, the others wait for ever", "unset it",
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT", "WARNING", ON,
        "the CPU waits for every collective, so that nothing overlaps", "unset it; there is a deadline without it",
    ),
    Variable(
        "NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_DESYNC_DEBUG NCCL_ENABLE_TIMING", "WARNING", SET,
        "the old name of a setting of torch", "write TORCH_ before it, or unset it",
    ),
    Variable(
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "WARNING", SET, "the old name of a setting of torch",
        "call it TORCH_FR_BUFFER_SIZE",
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING", "WARNING", OFF, "a stuck watchdog of NCCL is no longer ended", "unset it",
    ),
    Variable(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "WARNING", OFF,
        "processes that are started again may read the addresses of those before (pytorch/pytorch#135712)", "unset it",
    ),
    # ways between devices
    Variable(
        "NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE", "WARNING", ON, "NCCL leaves its fastest way out",
        "unset it, unless that way is broken here",
    ),
    # numbers
    Variable(
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "WARNING", "1",
        "fp32 products are computed with 10 bits of mantissa", "unset it; train.precision says what is computed with",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG", "WARNING", but(r"(:\d+:\d+)+|"), "cuBLAS cannot read it",
        ":4096:8, or unset it",
    ),
    # the CPU
    Variable(
        "OMP_NUM_THREADS MKL_NUM_THREADS", "WARNING", but(r"[1-9]\d*(,[1-9]\d*)*|"), "not a number of threads",
        "unset it: `unisono train` divides the cores among its processes",
    ),
    Variable(
        "OMP_PROC_BIND", "WARNING", but(f"{OFF}|"),
        "every process of this host binds its threads to the same first cores", "unset it",
    ),
    Variable(
        "TOKENIZERS_PARALLELISM", "WARNING", OFF, "documents are tokenised on one core", "unset it",
    ),
    # left over from elsewhere
    Variable(
        "UNISONO_RUN_ID UNISONO_NODE", "FAIL", SET,
        "left over from a process of a run: another would take itself for one", "unset it, or open a new shell",
    ),
    Variable(
        "TRANSFORMERS_CACHE PYTORCH_TRANSFORMERS_CACHE", "WARNING", SET, "not read any more", "set HF_HOME",
    ),
    Variable(
        "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE", "WARNING", ON,
        "nothing is downloaded: models and data must be here", "unset it where there is a network",
    ),
)  # fmt: skip

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
    for rule in VARIABLES:
        for name in rule.names.split():
            value = facts.environment.get(name)
            if value is not None and re.fullmatch(rule.bad, value, re.IGNORECASE):
                yield Finding(rule.level, name, f"{name}={value}: {rule.why}", rule.remedy)
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
    """A variable that names interfaces that are not there and up.

    Gloo needs all of them (`whole`); one is enough for NCCL, which takes beginnings of names, whole ones after `=`,
    and all others after `^`.
    """
    value = facts.environment.get(name, "")
    if not value or value.startswith("^"):
        return None
    up = [interface.name for interface in facts.interfaces if interface.up]
    exact = whole or value.startswith("=")
    found = [
        any(there == one or (not exact and there.startswith(one)) for there in up)
        for one in value.removeprefix("=").split(",")
    ]
    if all(found) if whole else any(found):
        return None
    return f"{name}={value}, but the interfaces that are up are {', '.join(up)}"


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
