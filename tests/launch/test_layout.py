"""What `auto` comes to on a host, and what a host cannot give: a layout without a word that is still open."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tasks
from unisono.config.schema.run import RunConfig
from unisono.launch import layout as layouts
from unisono.runtime.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task_config import load_config

TASK = f"{tasks.__file__}:LinearTask"


def config(*overrides: str) -> RunConfig:
    return load_config(TASK, overrides)[0]


def layout(*overrides: str, place: ProcessInfo | None = None) -> tuple[int | str, str, str]:
    found = layouts.resolve_layout(config(*overrides), place).layout
    return found.world_size, found.strategy, found.device


def refusal(*overrides: str, place: ProcessInfo | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        layouts.resolve_layout(config(*overrides), place)
    return str(caught.value)


# what auto comes to -------------------------------------------------------------------------------------------------


def test_without_an_accelerator_a_run_is_one_process_on_the_cpu(host: Any):
    host("cpu", 0)
    assert layout() == (1, "single", "cpu")


def test_with_accelerators_a_run_has_one_process_for_each(host: Any):
    host("cuda", 4)
    assert layout() == (4, "ddp", "cuda")


def test_a_run_that_asks_for_the_cpu_is_one_process_though_there_are_accelerators(host: Any):
    host("cuda", 4)
    assert layout("layout.device=cpu") == (1, "single", "cpu")


def test_a_run_that_asks_for_one_process_gets_one_though_there_are_more_accelerators(host: Any):
    host("cuda", 4)
    assert layout("layout.strategy=single") == (1, "single", "cuda")


def test_more_processes_than_accelerators_run_on_the_cpu(host: Any):
    host("cuda", 1)
    assert layout("layout.world_size=2") == (2, "ddp", "cpu")


def test_double_precision_runs_on_the_cpu_where_the_accelerator_has_none(host: Any):
    host("mps", 1)
    assert layout("train.precision=fp64") == (1, "single", "cpu")


def test_double_precision_runs_on_cuda(host: Any):
    host("cuda", 1)
    assert layout("train.precision=fp64") == (1, "single", "cuda")


def test_a_launcher_decides_the_number_of_processes(host: Any):
    host("cpu", 0)
    assert layout("layout.world_size=7", place=ProcessInfo(3, 4, 1, 2, "torchrun")) == (4, "ddp", "cpu")


def test_a_launcher_s_processes_on_this_host_decide_the_device(host: Any):
    host("cuda", 2)
    assert layout(place=ProcessInfo(3, 4, 1, 2, "slurm")) == (4, "ddp", "cuda")
    assert layout(place=ProcessInfo(3, 4, 3, 4, "slurm")) == (4, "ddp", "cpu")


def test_a_strategy_that_was_asked_for_is_kept(host: Any):
    host("cpu", 0)
    assert layout("layout.strategy=fsdp", "layout.world_size=2") == (2, "fsdp", "cpu")


def test_one_process_takes_all_accelerators_where_rows_are_shared_out_among_devices(host: Any):
    host("cuda", 4)
    assert layout("layout.strategy=dp") == (1, "dp", "cuda")
    host("cpu", 0)
    assert layout("layout.strategy=dp") == (1, "dp", "cpu")


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


def test_a_device_that_is_not_there_is_refused(host: Any):
    host("cpu", 0)
    assert refusal("layout.device=cuda") == "layout.device=cuda: this host has no accelerator; use auto or cpu"


def test_a_device_of_another_kind_is_refused_with_the_kind_that_is_there(host: Any):
    host("xpu", 2)
    assert refusal("layout.device=cuda") == "layout.device=cuda: this host has 2 × xpu; use auto or cpu"


def test_more_processes_than_devices_are_refused_where_the_device_was_asked_for(host: Any):
    host("cuda", 1)
    assert refusal("layout.device=cuda", "layout.world_size=2") == (
        "layout.device=cuda: 2 processes on this host, but only 1 cuda device; use layout.world_size=1 or "
        "layout.device=cpu"
    )


@pytest.mark.parametrize("override", ["layout.strategy=fsdp", "layout.strategy=ddp", "train.precision=fp64"])
def test_what_mps_cannot_do_is_refused(host: Any, override: str):
    host("mps", 1)
    told = refusal("layout.device=mps", "layout.world_size=1", override)
    assert told.startswith("layout.device=mps: one process (layout.strategy=single) in fp32 or bf16 only")


def test_an_ordered_reduction_over_an_odd_number_of_processes_is_refused_with_the_next_powers_of_two(host: Any):
    host("cpu", 0)
    told = refusal("layout.reduction=ordered", "layout.world_size=6")
    assert told == "layout.reduction=ordered: the number of processes must be a power of two, not 6; use 4 or 8"


def test_what_a_launcher_s_number_of_processes_makes_impossible_is_refused(host: Any):
    host("cpu", 0)
    told = refusal("layout.strategy=hsdp", "layout.shards=2", place=ProcessInfo(0, 3, 0, 3, "torchrun"))
    assert told == "layout.shards=2 does not divide layout.world_size=3; these do: [1, 3]"


NODES = ("launch.nodes=2", "launch.node_rank=0", "launch.rendezvous=10.0.0.1:29400")


def test_every_accelerator_of_several_nodes_gets_a_process(host: Any):
    host("cuda", 4)
    assert layout(*NODES) == (8, "ddp", "cuda")
    host("cpu", 0)
    assert layout(*NODES) == (2, "ddp", "cpu")


def test_the_device_is_decided_by_the_processes_of_one_node(host: Any):
    host("cuda", 2)
    assert layout(*NODES, "layout.world_size=4") == (4, "ddp", "cuda")
    assert layout(*NODES, "layout.world_size=8") == (8, "ddp", "cpu")


def test_several_nodes_share_one_copy_of_the_model_inside_of_a_node(host: Any):
    host("cpu", 0)
    found = layouts.resolve_layout(config(*NODES, "layout.world_size=8", "layout.strategy=hsdp"), None).layout
    assert found.shards == 4
    place = ProcessInfo(3, 6, 1, 2, "slurm")
    assert layouts.resolve_layout(config("layout.strategy=hsdp"), place).layout.shards == 2
    asked = config(*NODES, "layout.world_size=8", "layout.strategy=hsdp", "layout.shards=2")
    assert layouts.resolve_layout(asked, None).layout.shards == 2


@pytest.mark.parametrize("words", [["layout.world_size=4"], [*NODES, "layout.world_size=2"]])
def test_shards_have_to_be_given_where_nodes_do_not_say_them(host: Any, words: list[str]):
    host("cpu", 0)
    assert refusal("layout.strategy=hsdp", *words).startswith("layout.strategy=hsdp needs layout.shards")


def test_nodes_are_not_for_processes_of_another_launcher(host: Any):
    host("cpu", 0)
    told = refusal(*NODES, place=ProcessInfo(0, 2, 0, 1, "slurm"))
    assert told.startswith("launch.nodes=2, but slurm started this process")


def test_several_processes_of_a_launcher_cannot_be_a_single_one(host: Any, monkeypatch: pytest.MonkeyPatch):
    host("cpu", 0)
    told = refusal("layout.strategy=single", place=ProcessInfo(0, 2, 0, 2, "torchrun"))
    assert "layout.strategy=single is one process, but layout.world_size=2" in told
