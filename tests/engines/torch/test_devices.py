"""Which device a layout gets on a host with these accelerators, and what is said where it cannot have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.config.schema.layout import Layout
from unisono.engines.torch import devices
from unisono.runtime.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError

Host = Callable[[str, int], None]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """Make this host one with so many accelerators of a kind."""

    def pretend(kind: str, count: int) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind) if count else None)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)

    return pretend


def resolved(device: str, processes: int, precision: str = "fp32", strategy: str = "auto") -> str:
    layout = Layout.model_validate({"device": device, "strategy": strategy})
    return devices.resolve(layout, processes, precision)


def test_a_host_without_accelerators_has_none(host: Host) -> None:
    host("cuda", 0)
    assert devices.accelerators() == ("cpu", 0)


def test_accelerators_are_counted(host: Host) -> None:
    host("xpu", 3)
    assert devices.accelerators() == ("xpu", 3)


@pytest.mark.parametrize(
    ("kind", "count", "processes", "precision", "expected"),
    [
        ("cuda", 0, 1, "fp32", "cpu"),
        ("cuda", 1, 1, "fp32", "cuda"),
        ("cuda", 8, 8, "bf16", "cuda"),
        ("cuda", 2, 3, "fp32", "cpu"),  # not one for each process
        ("cuda", 2, 2, "fp64", "cuda"),
        ("cuda", 2, 3, "fp64", "cpu"),
        ("xpu", 2, 2, "fp64", "cpu"),  # not every kind has fp64
        ("xpu", 2, 2, "bf16", "xpu"),
        ("mps", 1, 1, "fp32", "mps"),
        ("mps", 1, 1, "fp64", "cpu"),
    ],
)
def test_auto_is_the_accelerator_if_each_process_has_one_that_can(
    host: Host, kind: str, count: int, processes: int, precision: str, expected: str
) -> None:
    host(kind, count)
    assert resolved("auto", processes, precision) == expected


def test_the_cpu_can_be_asked_for_where_there_are_accelerators(host: Host) -> None:
    host("cuda", 4)
    assert resolved("cpu", 2) == "cpu"


def test_an_accelerator_that_is_there_can_be_asked_for(host: Host) -> None:
    host("cuda", 4)
    assert resolved("cuda", 4, "fp64") == "cuda"


def test_an_accelerator_on_a_host_without_any_is_refused(host: Host) -> None:
    host("cuda", 0)
    with pytest.raises(ConfigError, match=r"layout\.device=cuda: this host has no accelerator; use auto or cpu"):
        resolved("cuda", 1)


def test_an_accelerator_of_another_kind_is_refused(host: Host) -> None:
    host("xpu", 2)
    with pytest.raises(ConfigError, match=r"layout\.device=cuda: this host has 2 × xpu"):
        resolved("cuda", 1)


@pytest.mark.parametrize(("count", "said"), [(1, "only 1 cuda device;"), (2, "only 2 cuda devices;")])
def test_more_processes_than_devices_are_refused_with_a_way_out(host: Host, count: int, said: str) -> None:
    host("cuda", count)
    with pytest.raises(ConfigError) as refused:
        resolved("cuda", 3)
    assert said in str(refused.value)
    assert f"use layout.world_size={count} or layout.device=cpu" in str(refused.value)


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("single", "fp64")])
def test_mps_is_refused_what_it_cannot_do(host: Host, strategy: str, precision: str) -> None:
    host("mps", 1)
    with pytest.raises(ConfigError, match="one process"):
        resolved("mps", 1, precision, strategy)


def test_mps_computes_on_one_process(host: Host) -> None:
    host("mps", 1)
    assert resolved("mps", 1, "bf16", "single") == "mps"


def test_a_process_gets_the_device_of_its_local_rank_and_makes_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    assert devices.select_device(
        "cuda", ProcessInfo(rank=5, world_size=8, local_rank=1, local_world_size=4)
    ) == torch.device("cuda", 1)
    assert current == [1]


def test_the_cpu_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: pytest.fail("the CPU is not an index"))
    assert devices.select_device("cpu", ProcessInfo(1, 2, 1, 2)) == torch.device("cpu")


def test_the_cpu_is_called_cpu() -> None:
    assert devices.device_name(torch.device("cpu")) == "cpu"


def test_a_device_is_called_what_its_maker_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Model {device.index}")
    assert devices.device_name(torch.device("cuda", 3)) == "Model 3"


def test_a_device_whose_maker_says_nothing_is_called_by_its_kind() -> None:
    assert devices.device_name(torch.device("meta")) == "meta"
