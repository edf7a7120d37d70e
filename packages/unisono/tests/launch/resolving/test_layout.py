"""What `auto` comes to on a host, and what a host cannot give: a layout without a word that is still open."""

from __future__ import annotations

from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.configs import configured
from unisono.config.schema.run import RunConfig
from unisono.launch.resolving import layout as layouts
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

TASK = f"{tasks.__file__}:LinearTask"


def config(*overrides: str) -> RunConfig:
    return configured(TASK, *overrides)


def layout(*overrides: str, place: ProcessInfo | None = None) -> tuple[int | str, str, str]:
    found = layouts.resolve_layout(config(*overrides), place).layout
    return found.world_size, found.strategy, found.device


def refusal(*overrides: str, place: ProcessInfo | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        layouts.resolve_layout(config(*overrides), place)
    return str(caught.value)


# what auto comes to -------------------------------------------------------------------------------------------------


NODES = "launch.nodes=2 launch.node_rank=0 launch.rendezvous=10.0.0.1:29400"


def rank_3(local_size: int, launcher: str = "slurm") -> ProcessInfo:
    return ProcessInfo(3, 4, local_size - 1, local_size, launcher)


@pytest.mark.parametrize(
    ("devices", "overrides", "place", "expected"),
    [
        pytest.param("0 cpu", "", None, (1, "single", "cpu"), id="one process without an accelerator"),
        pytest.param("4 cuda", "", None, (4, "ddp", "cuda"), id="a process for each accelerator"),
        pytest.param("4 cuda", "layout.device=cpu", None, (1, "single", "cpu"), id="the cpu if asked for"),
        pytest.param("4 cuda", "layout.strategy=single", None, (1, "single", "cuda"), id="one process if asked for"),
        pytest.param("1 cuda", "layout.world_size=2", None, (2, "ddp", "cpu"), id="more processes than accelerators"),
        pytest.param("1 mps", "train.precision=fp64", None, (1, "single", "cpu"), id="no fp64 on mps"),
        pytest.param("1 cuda", "train.precision=fp64", None, (1, "single", "cuda"), id="fp64 on cuda"),
        pytest.param("0 cpu", "layout.world_size=7", rank_3(2), (4, "ddp", "cpu"), id="a launcher decides the number"),
        pytest.param("2 cuda", "", rank_3(2), (4, "ddp", "cuda"), id="enough devices for this host's processes"),
        pytest.param("2 cuda", "", rank_3(4), (4, "ddp", "cpu"), id="too few devices for this host's processes"),
        pytest.param(
            "0 cpu", "layout.strategy=fsdp layout.world_size=2", None, (2, "fsdp", "cpu"), id="a given strategy"
        ),
        pytest.param("4 cuda", "layout.strategy=dp", None, (1, "dp", "cuda"), id="dp is one process with all devices"),
        pytest.param("0 cpu", "layout.strategy=dp", None, (1, "dp", "cpu"), id="dp on the cpu"),
        pytest.param("4 cuda", NODES, None, (8, "ddp", "cuda"), id="a process for each accelerator of every node"),
        pytest.param("0 cpu", NODES, None, (2, "ddp", "cpu"), id="a process per node without accelerators"),
        pytest.param("2 cuda", f"{NODES} layout.world_size=4", None, (4, "ddp", "cuda"), id="enough devices per node"),
        pytest.param("2 cuda", f"{NODES} layout.world_size=8", None, (8, "ddp", "cpu"), id="too few devices per node"),
    ],
)
def test_auto_gives_the_layout_that_fits_the_host(
    host: Any, devices: str, overrides: str, place: ProcessInfo | None, expected: tuple[int, str, str]
):
    count, kind = devices.split()
    host(kind, int(count))
    assert layout(*overrides.split(), place=place) == expected


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_one_process_with_all_devices_is_refused_where_a_launcher_has_started_several(host: Any, launcher: str):
    host("cuda", 4)
    told = refusal("layout.strategy=dp", place=ProcessInfo(0, 4, 0, 4, launcher))
    assert told.startswith(f"layout.strategy=dp is one process with all devices of its host, but {launcher} started 4")
    assert layout("layout.strategy=dp", place=ProcessInfo(0, 1, 0, 1, launcher)) == (1, "dp", "cuda")


def test_an_ordered_reduction_runs_on_one_thread_per_process(host: Any):
    host("cpu", 0)
    assert layouts.resolve_layout(config("layout.reduction=ordered"), None).layout.threads == 1


def test_a_host_s_cores_are_divided_among_its_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layouts, "usable_cores", lambda: 12)
    assert [layouts.threads_per_process(n) for n in (1, 4, 5, 24)] == [12, 3, 2, 1]


# what a host cannot give --------------------------------------------------------------------------------------------


def started(size: int, launcher: str, local_size: int | None = None) -> ProcessInfo:
    return ProcessInfo(0, size, 0, local_size or size, launcher)


@pytest.mark.parametrize(
    ("devices", "overrides", "place", "told"),
    [
        ("0 cpu", "layout.device=cuda", None, "layout.device=cuda: this host has no accelerator; use auto or cpu"),
        (
            "0 cpu", "layout.reduction=ordered layout.world_size=6", None,
            "layout.reduction=ordered: the number of processes must be a power of two, not 6; use 4 or 8",
        ),
        (
            "0 cpu", "layout.strategy=hsdp layout.shards=2", started(3, "torchrun"),
            "layout.shards=2 does not divide layout.world_size=3; these do: [1, 3]",
        ),
        ("0 cpu", NODES, started(2, "slurm", 1), "launch.nodes=2, but slurm started this process"),
        ("0 cpu", "layout.strategy=single", started(2, "torchrun"), "layout.strategy=single is one process, but "),
        ("0 cpu", "layout.strategy=hsdp layout.world_size=4", None, "layout.strategy=hsdp needs layout.shards"),
        ("0 cpu", f"layout.strategy=hsdp {NODES} layout.world_size=2", None, "strategy=hsdp needs layout.shards"),
        (
            "0 cpu", f"{NODES} launch.shared_folder=false checkpoint.upload.url=file:///a eval.environment=math", None,
            "`unisono evaluate RUN eval.environment=math` on node 0 afterwards",
        ),
    ],
)  # fmt: skip
def test_what_host_nodes_or_launcher_cannot_give_is_refused(
    host: Any, devices: str, overrides: str, place: ProcessInfo | None, told: str
):
    count, kind = devices.split()
    host(kind, int(count))
    assert told in refusal(*overrides.split(), place=place)


def test_several_nodes_share_one_copy_of_the_model_inside_of_a_node(host: Any):
    host("cpu", 0)
    found = layouts.resolve_layout(config(*NODES.split(), "layout.world_size=8", "layout.strategy=hsdp"), None).layout
    assert found.shards == 4
    place = ProcessInfo(3, 6, 1, 2, "slurm")
    assert layouts.resolve_layout(config("layout.strategy=hsdp"), place).layout.shards == 2
    asked = config(*NODES.split(), "layout.world_size=8", "layout.strategy=hsdp", "layout.shards=2")
    assert layouts.resolve_layout(asked, None).layout.shards == 2
