"""A table of environment variables with values known to be harmful, and a check of network interface names.

`unisono doctor` reports all of them; those that prevent any run from starting are refused before a run starts
(`unisono.launch.host.host_check`).

Values are matched case-insensitively as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from unisono.launch.nodes import network

Level = Literal["FAIL", "WARNING", "ABSTAIN"]
ON = r"1|true|yes|on|y"
OFF = r"0|false|no|off|n"
SET = r".+"
# An option pair as parsed by torch's ConfigTokenizer (c10/core/AllocatorConfig.h), which ignores spaces.
_PAIR = r"\s*[a-z0-9_]+\s*:\s*(\[[^\]]*\]|[^,:=\[\]\s]+)\s*"


@dataclass(frozen=True)
class VariableRule:
    """A rule about environment variables.

    Attributes:
        names: Of the variables, separated by spaces.
        level: Of the finding.
        bad: Pattern of harmful values.
        why: What such a value does.
        remedy: What to do.
    """

    names: str
    level: Level
    bad: str
    why: str
    remedy: str


@dataclass(frozen=True)
class HostFinding:
    """What a rule found.

    Attributes:
        level: FAIL, WARNING or ABSTAIN.
        rule: Name of the variable or condition.
        what: What is wrong, or why the rule abstains.
        remedy: What to do.
    """

    level: Level
    rule: str
    what: str
    remedy: str = ""


def anything_but(good: str) -> str:
    """Return a pattern for all values that do not match another pattern.

    >>> bool(re.fullmatch(anything_but("a|b"), "c")), bool(re.fullmatch(anything_but("a|b"), "a"))
    (True, False)
    """
    return rf"(?!(?:{good})\Z).*"


VARIABLES = (
    # accelerator memory
    VariableRule(
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF", "FAIL",
        anything_but(rf"({_PAIR}(,{_PAIR})*)?"),
        "torch cannot parse it, and refuses to start on an accelerator",
        "write option:value, separated by commas, as in max_split_size_mb:128",
    ),
    VariableRule(
        "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF", "WARNING", SET,
        "this is the old name, kept as an alias", "rename it to PYTORCH_ALLOC_CONF",
    ),
    VariableRule(
        "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF", "WARNING",
        r"(?=.*max_split_size_mb\s*:)(?=.*expandable_segments\s*:\s*true).*",
        "with both options reserved memory grows without bound (pytorch #123548)", "set one of them",
    ),
    VariableRule(
        "PYTORCH_NO_CUDA_MEMORY_CACHING", "WARNING", ON, "every allocation goes to the driver", "unset it",
    ),
    VariableRule(
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", "WARNING", r"\s*|-1|none|NoDevFiles",
        "it hides every accelerator, so runs use the CPU", "unset it, or name devices",
    ),
    VariableRule(
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES", "FAIL",
        r"(.*,)?\s*([^,\s]+)\s*,(.*,)?\s*\2\s*(,.*)?",
        "a device is named twice, and the driver hides all devices after it", "name each device once",
    ),
    VariableRule(
        "CUDA_VISIBLE_DEVICES", "FAIL", anything_but(r"\s*|-1|none|NoDevFiles|[^,;:\s]+(\s*,\s*[^,;:\s]+)*,?"),
        "the driver cannot parse it, and hides every device after the first mistake", "write numbers with commas: 0,1",
    ),
    # left over from debugging
    VariableRule(
        "CUDA_LAUNCH_BLOCKING HIP_LAUNCH_BLOCKING", "WARNING", ON, "the CPU waits for every kernel",
        "unset it, unless you are debugging a failing kernel",
    ),
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG", "FAIL", anything_but("off|info|detail|"), "torch refuses this value",
        "set it to OFF, INFO or DETAIL, or unset it",
    ),
    VariableRule(
        "TORCH_DISTRIBUTED_DEBUG", "WARNING", "detail", "every collective is compared on all ranks before it runs",
        "unset it, unless you are looking for ranks that disagree",
    ),
    VariableRule(
        "NCCL_DEBUG", "WARNING", "info|trace", "NCCL logs a line for every communicator, or for every call",
        "set it to WARN, or unset it",
    ),
    VariableRule(
        "PYTHONOPTIMIZE", "WARNING", anything_but("0|"), "it removes assertions, including those that guard results",
        "unset it",
    ),
    VariableRule(
        "TORCHDYNAMO_DISABLE TORCH_COMPILE_DISABLE", "WARNING", ON, "layout.compile=true compiles nothing", "unset it",
    ),
    VariableRule(
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "WARNING", ON, "every start compiles everything again", "unset it",
    ),
    # waiting
    VariableRule(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING", "FAIL", "0",
        "NCCL's timeout ends no process: if one rank is gone, the others wait forever", "unset it",
    ),
    VariableRule(
        "TORCH_NCCL_BLOCKING_WAIT NCCL_BLOCKING_WAIT", "WARNING", ON,
        "the CPU waits for every collective, so nothing overlaps", "unset it; collectives have a timeout without it",
    ),
    VariableRule(
        "NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_DESYNC_DEBUG NCCL_ENABLE_TIMING", "WARNING", SET,
        "this is the old name of a torch setting", "put TORCH_ before it, or unset it",
    ),
    VariableRule(
        "TORCH_NCCL_TRACE_BUFFER_SIZE", "WARNING", SET, "this is the old name of a torch setting",
        "rename it to TORCH_FR_BUFFER_SIZE",
    ),
    VariableRule(
        "TORCH_NCCL_ENABLE_MONITORING", "WARNING", OFF, "a stuck watchdog of NCCL is no longer ended", "unset it",
    ),
    VariableRule(
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "WARNING", OFF,
        "restarted processes may read the addresses of the previous ones (pytorch/pytorch#135712)", "unset it",
    ),
    VariableRule(
        "TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_ENABLE_TIMING "
        "TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_USE_COMM_NONBLOCKING TORCH_NCCL_AVOID_RECORD_STREAMS", "FAIL",
        anything_but(rf"{ON}|t|{OFF}|f|"), "torch accepts only on or off", "set it to 1 or 0, or unset it",
    ),
    VariableRule(
        "NCCL_DEBUG", "WARNING", anything_but("version|warn|info|trace|abort|none|"), "NCCL ignores this value",
        "set it to WARN, or unset it",
    ),
    # transports between devices
    VariableRule(
        "NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE", "WARNING", ON, "it turns off NCCL's fastest transport",
        "unset it, unless that transport is broken here",
    ),
    # numerics
    VariableRule(
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "WARNING", "1",
        "fp32 products are computed with a 10-bit mantissa", "unset it; train.precision sets the precision",
    ),
    VariableRule(
        "CUBLAS_WORKSPACE_CONFIG", "WARNING", anything_but(r"(:\d+:\d+)+|"), "cuBLAS cannot parse it",
        "set it to :4096:8, or unset it",
    ),
    # the CPU
    VariableRule(
        "OMP_NUM_THREADS MKL_NUM_THREADS", "WARNING", anything_but(r"[1-9]\d*(,[1-9]\d*)*|"),
        "it is not a number of threads",
        "unset it: `unisono train` divides the cores among its processes",
    ),
    VariableRule(
        "OMP_PROC_BIND", "WARNING", anything_but(f"{OFF}|"),
        "every process of this host binds its threads to the same first cores", "unset it",
    ),
    VariableRule(
        "TOKENIZERS_PARALLELISM", "WARNING", OFF, "documents are tokenised on one core", "unset it",
    ),
    # left over from other tools
    VariableRule(
        "UNISONO_RUN_ID", "FAIL", SET,
        "it is left over from a process of a run, and a new one would take itself for such a process",
        "unset it, or open a new shell",
    ),
    VariableRule(
        "TRANSFORMERS_CACHE PYTORCH_TRANSFORMERS_CACHE", "WARNING", SET, "it is no longer read", "set HF_HOME",
    ),
    VariableRule(
        "HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE", "WARNING", ON,
        "nothing is downloaded, so models and data must be on this host", "unset it if this host has a network",
    ),
)  # fmt: skip

# Variables read by NCCL 2.2x and torch 2.x, to recognise misspellings.
KNOWN_VARIABLES = frozenset(
    """
    NCCL_ALGO NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_BUFFSIZE NCCL_CHECKS_DISABLE NCCL_COLLNET_ENABLE
    NCCL_COMM_BLOCKING NCCL_COMM_ID NCCL_CONF_FILE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG
    NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS NCCL_DESYNC_DEBUG NCCL_DMABUF_ENABLE NCCL_ENABLE_TIMING NCCL_GRAPH_MIXING_SUPPORT
    NCCL_GRAPH_REGISTER NCCL_HOSTID NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_CUDA_SUPPORT NCCL_IB_DISABLE NCCL_IB_GID_INDEX
    NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_PKEY NCCL_IB_QPS_PER_CONNECTION
    NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY
    NCCL_LAUNCH_MODE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MAX_NRINGS NCCL_MIN_CTAS
    NCCL_MIN_NCHANNELS NCCL_MIN_NRINGS NCCL_NCHANNELS_PER_NET_PEER NCCL_NET NCCL_NET_DISABLE_INTRA NCCL_NET_FORCE_FLUSH
    NCCL_NET_GDR_C2C NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_MERGE_LEVEL NCCL_NET_PLUGIN NCCL_NET_SHARED_BUFFERS
    NCCL_NET_SHARED_COMMS NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVB_DISABLE NCCL_NVLS_ENABLE NCCL_OOB_NET_ENABLE
    NCCL_OOB_NET_IFNAME NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROFILER_PLUGIN NCCL_PROTO
    NCCL_PXN_DISABLE NCCL_RAS_ENABLE NCCL_RINGS NCCL_RUNTIME_CONNECT NCCL_SHM_DISABLE NCCL_SHM_USE_CUDA_MEMCPY
    NCCL_SINGLE_RING_THRESHOLD NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_SOCKET_POLL_TIMEOUT_MSEC
    NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SPINS_BEFORE_CHECK_ABORT NCCL_TOPO_DUMP_FILE NCCL_TOPO_FILE
    NCCL_TREE_THRESHOLD NCCL_TUNER_PLUGIN NCCL_WIN_ENABLE NCCL_VERSION TORCH_NCCL_ABORT_IN_DESTROY_PG
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BCAST_UNIQUEID TORCH_NCCL_BLOCKING_WAIT
    TORCH_NCCL_COORD_CHECK_MILSEC TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DEBUG_INFO_PIPE_FILE
    TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING
    TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK
    TORCH_NCCL_PROPAGATE_ERROR TORCH_NCCL_RETHROW_CUDA_ERRORS TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING
    TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_TRACE_CPP_STACK TORCH_NCCL_USE_COMM_NONBLOCKING
    TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC TORCH_DISTRIBUTED_DEBUG
    GLOO_SOCKET_IFNAME GLOO_SOCKET_FAMILY PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF
    PYTORCH_NO_CUDA_MEMORY_CACHING PYTORCH_NVML_BASED_CUDA_CHECK PYTORCH_ENABLE_MPS_FALLBACK PYTORCH_TRANSFORMERS_CACHE
    PYTORCH_JIT PYTORCH_KERNEL_CACHE_PATH PYTORCH_TUNABLEOP_ENABLED PYTORCH_TUNABLEOP_FILENAME
    """.split()  # noqa: SIM905
)


def check_variables(environment: Mapping[str, str]) -> Iterator[HostFinding]:
    """Return what the rules find, in table order."""
    for rule in VARIABLES:
        for name in rule.names.split():
            value = environment.get(name)
            if value is not None and re.fullmatch(rule.bad, value, re.IGNORECASE):
                yield HostFinding(rule.level, name, f"{name}={value}: {rule.why}", rule.remedy)


def find_fatal_variables(environment: Mapping[str, str], up: Sequence[str] | None) -> Iterator[HostFinding]:
    """Return the findings with which a run cannot start or would wait forever.

    Args:
        environment: Of the process.
        up: Usable interfaces; None if the run needs none.
    """
    yield from (
        one for one in check_variables(environment) if one.level == "FAIL" and not one.rule.startswith("UNISONO_")
    )
    for name, whole in ((network.GLOO, True), (network.NCCL, False)):
        if up is not None and (found := describe_missing_interfaces(environment, up, name, whole=whole)):
            yield HostFinding("FAIL", name, found, "name an interface that is up, or unset it")


def find_misspelt_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """Find variables that neither NCCL nor torch reads but that resemble one that they do."""
    for name in sorted(environment.keys() - KNOWN_VARIABLES):
        theirs = name.startswith(("NCCL", "TORCH_NCCL", "PYTORCH_", "TORCH_DIST", "GLOO_"))
        if theirs and (close := get_close_matches(name, KNOWN_VARIABLES, n=1, cutoff=0.9)):
            yield f"{name} is set, but nothing reads it; did you mean {close[0]}?"


def describe_missing_interfaces(
    environment: Mapping[str, str], up: Sequence[str], name: str, *, whole: bool
) -> str | None:
    """Describe a variable that names interfaces which are missing or down.

    Gloo needs all of them (`whole`). NCCL needs only one, and accepts prefixes, exact names after `=`, and exclusions
    after `^`.
    """
    value = environment.get(name, "")
    if not value or value.startswith("^"):
        return None
    exact = whole or value.startswith("=")
    found = [
        any(there == one or (not exact and there.startswith(one)) for there in up)
        for one in value.removeprefix("=").split(",")
    ]
    if all(found) if whole else any(found):
        return None
    return f"{name}={value}, but only these interfaces are up: {', '.join(up)}"
