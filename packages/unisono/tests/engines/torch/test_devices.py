"""Which device a layout gets on a host with these accelerators, and what is said where it cannot have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.config.schema.layout import Layout
from unisono.engines.torch import devices
from unisono.runtime.communication.communicator import ProcessInfo
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


def test_accelerators_are_counted_and_can_be_asked_for(host: Host) -> None:
    host("cuda", 0)
    assert devices.accelerators() == ("cpu", 0)
    host("xpu", 3)
    assert devices.accelerators() == ("xpu", 3)
    host("cuda", 4)
    assert (resolved("cpu", 2), resolved("cuda", 4, "fp64")) == ("cpu", "cuda")
    host("mps", 1)
    assert resolved("mps", 1, "bf16", "single") == "mps"


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


@pytest.mark.parametrize(
    ("there", "asked", "told"),
    [
        (("cuda", 0), ("cuda", 1), "layout.device=cuda: this host has no accelerator; use auto or cpu"),
        (("xpu", 2), ("cuda", 1), "layout.device=cuda: this host has 2 × xpu; use auto or cpu"),
        (("cuda", 1), ("cuda", 3), "only 1 cuda device; use layout.world_size=1 or layout.device=cpu"),
        (("cuda", 2), ("cuda", 3), "only 2 cuda devices; use layout.world_size=2 or layout.device=cpu"),
        (("mps", 1), ("mps", 1, "fp32", "ddp"), "layout.device=mps: one process (layout.strategy=single) in fp32 or"),
        (("mps", 1), ("mps", 1, "fp64", "single"), "layout.device=mps: one process (layout.strategy=single) in fp32"),
    ],
)
def test_a_device_that_the_host_cannot_give_is_refused_with_a_way_out(
    host: Host, there: tuple[str, int], asked: Any, told: str
) -> None:
    host(*there)
    with pytest.raises(ConfigError) as refused:
        resolved(*asked)
    assert told in str(refused.value)


def test_a_process_gets_the_device_of_its_local_rank_and_makes_it_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    place = ProcessInfo(rank=5, world_size=8, local_rank=1, local_world_size=4)
    assert devices.select_device("cuda", place) == torch.device("cuda", 1)
    assert devices.select_device("cpu", place) == torch.device("cpu"), "which has no number"
    assert current == [1]


def test_a_device_is_called_what_its_maker_calls_it_or_by_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Model {device.index}")
    found = (torch.device("cuda", 3), torch.device("cpu"), torch.device("meta"))
    assert [devices.device_name(device) for device in found] == ["Model 3", "cpu", "meta"]


def test_a_verb_on_a_run_takes_the_accelerator_that_computes_in_its_precision(host: Host) -> None:
    host("mps", 1)
    assert [devices.find_device("auto", kind) for kind in ("fp32", "bf16", "fp64")] == ["mps", "mps", "cpu"]
    assert devices.find_device("cpu", "fp32") == "cpu"
    with pytest.raises(ConfigError, match="device=cuda: this host has 1 × mps"):
        devices.find_device("cuda", "fp32")
    host("cpu", 0)
    assert devices.find_device("auto", "bf16") == "cpu"
