"""Every rule finds its fault, and nothing on a host that has none; each case names the rule that it is for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from unisono.doctor import rules
from unisono.doctor.facts import HostFacts
from unisono.doctor.rules import CONDITIONS
from unisono.launch.host.host_variables import VARIABLES, HostFinding
from unisono.launch.nodes.network import Interface

HEALTHY = HostFacts(
    environment={"PATH": "/bin", "HOME": "/root", "LANG": "C.UTF-8"},
    versions={"torch": "2.13.0"}, host="node7", resolves="10.0.0.7", cores=16, memory_gib=100.0,
    interfaces=(
        Interface("lo", ("127.0.0.1",), up=True), Interface("eth0", ("10.0.0.7",), up=True),
        Interface("ib0", (), up=False),
    ),
    shared_gib=32.0, files=65536, locked_memory=-1, infiniband=True, accelerator="cuda", devices=("NVIDIA H200",) * 2,
    device_memory=(0.99, 0.99), driver_devices=2, directory="runs", disk_gib=500.0,
)  # fmt: skip


def found(**variables: str) -> list[tuple[str, str]]:
    """Level and rule of each finding, on a healthy host with these variables."""
    facts = replace(HEALTHY, environment={**HEALTHY.environment, **variables})
    return [(finding.level, finding.rule) for finding in rules.check_rules(facts)]


def on(**facts: Any) -> list[HostFinding]:
    return list(rules.check_rules(replace(HEALTHY, **facts)))


def test_nothing_is_found_on_a_healthy_host():
    assert on() == []


FINE = {
    "PYTORCH_ALLOC_CONF": [
        "", "expandable_segments:True", "max_split_size_mb:128,garbage_collection_threshold:0.8",
        "backend:cudaMallocAsync", "a:1, b:2",
        "roundup_power2_divisions:[64:8,256:4,>:1],expandable_segments:True",
    ],
    "CUDA_VISIBLE_DEVICES": ["0", "0,1", "1,11,111", "GPU-5c,GPU-5d"],
    "CUDA_LAUNCH_BLOCKING": ["0", ""],
    "TORCH_DISTRIBUTED_DEBUG": ["OFF", "info", ""],
    "NCCL_DEBUG": ["WARN", "VERSION"],
    "PYTHONOPTIMIZE": ["0", ""],
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ["1", "3"],
    "TORCH_NCCL_BLOCKING_WAIT": ["0"],
    "TORCH_NCCL_ENABLE_MONITORING": ["1"],
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": ["1"],
    "NCCL_P2P_DISABLE": ["0"],
    "NVIDIA_TF32_OVERRIDE": ["0"],
    "CUBLAS_WORKSPACE_CONFIG": [":4096:8", ":16:8", ":4096:2:16:8", ""],
    "OMP_NUM_THREADS": ["1", "16", "4,2", ""],
    "OMP_PROC_BIND": ["false", ""],
    "TOKENIZERS_PARALLELISM": ["true"],
    "HF_HUB_OFFLINE": ["0"],
    "GLOO_SOCKET_IFNAME": ["eth0", "lo,eth0", ""],
    "NCCL_SOCKET_IFNAME": ["eth", "=eth0", "wlan,eth", "^docker", ""],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FINE.items() for value in values])
def test_values_that_are_right_are_left_alone(name: str, value: str):
    assert found(**{name: value}) == []


ALLOC = "PYTORCH_ALLOC_CONF"
BAD = [  # one at least for every rule of the table, in its order
    (0, ALLOC, ["max_split_size_mb=128", "max_split_size_mb", "a:1;b:2", "a:", ":1", "a:1,", "a:[1:2"]),
    (0, "PYTORCH_CUDA_ALLOC_CONF", ["max_split_size_mb=128"]),
    (1, "PYTORCH_CUDA_ALLOC_CONF", ["max_split_size_mb:128"]),
    (2, ALLOC, ["max_split_size_mb:128,expandable_segments:True", "expandable_segments: true , max_split_size_mb: 64"]),
    (3, "PYTORCH_NO_CUDA_MEMORY_CACHING", ["1"]),
    (4, "CUDA_VISIBLE_DEVICES", ["", "-1", "NoDevFiles"]),
    (5, "CUDA_VISIBLE_DEVICES", ["0,0", "0,1,0", "1, 2,2", "3,0,1,0"]),
    (6, "CUDA_VISIBLE_DEVICES", ["0;1", "0:1", "0 1", ",0"]),
    (7, "CUDA_LAUNCH_BLOCKING", ["1"]),
    (8, "TORCH_DISTRIBUTED_DEBUG", ["1", "VERBOSE"]),
    (9, "TORCH_DISTRIBUTED_DEBUG", ["DETAIL"]),
    (10, "NCCL_DEBUG", ["INFO", "trace"]),
    (11, "PYTHONOPTIMIZE", ["1", "2"]),
    (12, "TORCH_COMPILE_DISABLE", ["1"]),
    (13, "TORCHINDUCTOR_FORCE_DISABLE_CACHES", ["1"]),
    (14, "TORCH_NCCL_ASYNC_ERROR_HANDLING", ["0"]),
    (15, "TORCH_NCCL_BLOCKING_WAIT", ["1"]),
    (16, "NCCL_ASYNC_ERROR_HANDLING", ["1"]),
    (17, "TORCH_NCCL_TRACE_BUFFER_SIZE", ["2000"]),
    (18, "TORCH_NCCL_ENABLE_MONITORING", ["0"]),
    (19, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", ["0"]),
    (20, "TORCH_NCCL_ENABLE_MONITORING", ["maybe", "2"]),
    (21, "NCCL_DEBUG", ["1", "debug"]),
    (22, "NCCL_IB_DISABLE", ["1"]),
    (23, "NVIDIA_TF32_OVERRIDE", ["1"]),
    (24, "CUBLAS_WORKSPACE_CONFIG", ["4096:8", "1"]),
    (25, "OMP_NUM_THREADS", ["0", "auto", "-1"]),
    (26, "OMP_PROC_BIND", ["true", "close"]),
    (27, "TOKENIZERS_PARALLELISM", ["false"]),
    (28, "UNISONO_RUN_ID", ["unisono-7"]),
    (29, "TRANSFORMERS_CACHE", ["/data"]),
    (30, "HF_HUB_OFFLINE", ["1"]),
]


@pytest.mark.parametrize(
    ("number", "name", "value"), [(number, name, value) for number, name, values in BAD for value in values]
)
def test_values_that_are_wrong_are_found(number: int, name: str, value: str):
    rule = VARIABLES[number]
    assert name in rule.names.split()
    told = [finding for finding in on(environment={name: value}) if rule.why in finding.what]
    assert [(f.level, f.rule, f.remedy) for f in told] == [(rule.level, name, rule.remedy)]
    assert told[0].what.startswith(f"{name}={value}: ")


def test_every_rule_of_a_variable_has_a_wrong_value_here():
    assert {number for number, _, _ in BAD} == set(range(len(VARIABLES)))


def test_a_value_in_the_wrong_syntax_under_the_old_name_is_two_findings():
    assert found(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb=128") == [
        ("FAIL", "PYTORCH_CUDA_ALLOC_CONF"), ("WARNING", "PYTORCH_CUDA_ALLOC_CONF"),
    ]  # fmt: skip


# other conditions ---------------------------------------------------------------------------------------------------

SICK: list[tuple[str, dict[str, Any], str]] = [
    ("stale launcher", {"environment": {"RANK": "0", "MASTER_ADDR": "a"}}, "RANK, MASTER_ADDR are set as by"),
    ("GLOO_SOCKET_IFNAME", {"environment": {"GLOO_SOCKET_IFNAME": "eth1"}}, "GLOO_SOCKET_IFNAME=eth1, but only"),
    ("GLOO_SOCKET_IFNAME", {"environment": {"GLOO_SOCKET_IFNAME": "ib0"}}, "GLOO_SOCKET_IFNAME=ib0, but"),
    ("GLOO_SOCKET_IFNAME", {"environment": {"GLOO_SOCKET_IFNAME": "eth"}}, "GLOO_SOCKET_IFNAME=eth, but"),
    ("GLOO_SOCKET_IFNAME", {"environment": {"GLOO_SOCKET_IFNAME": "lo,eth1"}}, "GLOO_SOCKET_IFNAME=lo,eth1, but"),
    ("NCCL_SOCKET_IFNAME", {"environment": {"NCCL_SOCKET_IFNAME": "ib"}}, "NCCL_SOCKET_IFNAME=ib, but"),
    ("NCCL_SOCKET_IFNAME", {"environment": {"NCCL_SOCKET_IFNAME": "=eth"}}, "NCCL_SOCKET_IFNAME==eth, but"),
    (
        "misspelt variables", {"environment": {"NCCL_SOCKET_IFNAMES": "eth0"}},
        "NCCL_SOCKET_IFNAMES is set, but nothing reads it; did you mean NCCL_SOCKET_IFNAME?",
    ),
    ("proxy", {"environment": {"HTTPS_PROXY": "http://me:secret@proxy"}}, "https_proxy is set"),
    ("host name", {"resolves": ""}, "the name of this host, 'node7', does not resolve"),
    (
        "host name of a node", {"resolves": "127.0.1.1", "environment": {"SLURM_JOB_NUM_NODES": "2"}},
        "the name of this host, 'node7', resolves to 127.0.1.1",
    ),
    ("threads", {"environment": {"OMP_NUM_THREADS": "17"}}, "OMP_NUM_THREADS=17, but there are 16 cores"),
    ("memory", {"memory_gib": 0.5}, "only 0.5 GiB of memory are free"),
    ("shared memory", {"shared_gib": 0.0625}, "only 0.06 GiB are free in /dev/shm"),
    ("open files", {"files": 1024}, "a process may open only 1024 files"),
    ("locked memory", {"locked_memory": 65536}, "a process may lock only 65536 bytes"),
    ("unseen accelerators", {"devices": (), "device_memory": None}, "the driver offers accelerators (2), "),
    ("unlike accelerators", {"devices": ("A", "B")}, "the accelerators are of different kinds: A, B"),
    ("memory of accelerators", {"device_memory": (0.99, 0.4)}, "others use the accelerators: 99%, 40% of"),
    ("compiler", {"compiler": False}, "there is no C++ compiler"),
    ("audio core", {"audio_core": ""}, "the native core of unisono-audio was not built"),
    ("clock", {"clock_behind": 3600.0}, "the clock is 3600 s behind"),
    ("run directory", {"writable": "Read-only file system"}, "runs cannot be written to: Read-only file system"),
    ("disk full", {"disk_gib": 0.5}, "only 0.50 GiB are free at runs"),
    ("disk space", {"disk_gib": 5.0}, "only 5.0 GiB are free at runs"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "facts", "told"), SICK)
def test_what_is_wrong_with_a_host_is_found(name: str, facts: dict[str, Any], told: str):
    (condition,) = [condition for condition in CONDITIONS if condition.name == name]
    (finding,) = on(**facts)
    assert (finding.level, finding.rule, finding.remedy) == (condition.level, name, condition.remedy)
    assert finding.what.startswith(told)
    assert "secret" not in finding.what


def test_every_condition_has_a_host_here():
    assert {name for name, _, _ in SICK} == {condition.name for condition in CONDITIONS}


@pytest.mark.parametrize(
    "facts",
    [
        {"environment": {"RANK": "0", "TORCHELASTIC_RUN_ID": "a"}},
        {"environment": {"https_proxy": "http://proxy", "NO_PROXY": "a.b, localhost"}},
        {"environment": {"SLURM_JOB_NUM_NODES": "1"}, "resolves": "127.0.0.1"},
        {"environment": {"SLURM_JOB_NUM_NODES": "4"}},
        {"files": -1},
        {"infiniband": False, "locked_memory": 65536},
        {"devices": (), "driver_devices": 0, "device_memory": None},
    ],
)
def test_a_host_that_only_looks_so_is_left_alone(facts: dict[str, Any]):
    assert on(**facts) == []


NEEDED = sorted({name for condition in CONDITIONS for name in condition.needs.split()})


@pytest.mark.parametrize("name", NEEDED)
def test_what_the_host_does_not_tell_is_said(name: str):
    told = on(**{name: None})
    assert told
    assert {(finding.level, finding.what) for finding in told} == {
        ("ABSTAIN", f"not checked: this system does not report {name}")
    }


def test_a_host_that_tells_nothing_is_abstained_from_and_not_blamed():
    told = list(rules.check_rules(HostFacts(environment={})))
    assert {finding.level for finding in told} == {"ABSTAIN"}
    assert [finding.rule for finding in told] == [condition.name for condition in CONDITIONS if condition.needs]
