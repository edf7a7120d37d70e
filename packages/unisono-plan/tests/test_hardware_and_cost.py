"""Words for hardware, the links of groups, and the time of a step by hand."""

from __future__ import annotations

import pytest

from unisono.runtime.errors import ConfigError
from unisono_plan.cost import CENTRAL, FAST, SLOW, Shares, ring_seconds, step_time
from unisono_plan.hardware import DEVICES, parse_hardware
from unisono_plan.recording import Collective, Work

PLAIN = Shares(product=0.5, memory=0.5, fused=0.25, link=0.5, hop=0.0, call=0.0, message=0.0)


@pytest.mark.parametrize(
    ("text", "count", "node", "nodes"),
    [("h100x64", 64, 8, 8), ("a100x4", 4, 4, 1), ("H200x12/4", 12, 4, 3), ("b200x4096", 4096, 8, 512)]
)  # fmt: skip
def test_a_word_names_devices_and_nodes(text: str, count: int, node: int, nodes: int) -> None:
    hardware = parse_hardware(text)
    assert (hardware.count, hardware.node, hardware.nodes) == (count, node, nodes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h101x8", "did you mean 'h100'"),
        ("h100x0", "from 1 to 4,096"),
        ("h100x5000", "from 1 to 4,096"),
        ("h100x12", "give the devices of a node as h100x12/N"),
        ("64", "known:"),
        ("h100 x 8", "write DEVICExCOUNT"),
    ],
)
def test_a_word_that_does_not_fit_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match="hardware=") as refused:
        parse_hardware(text)
    assert why in str(refused.value)


def test_every_device_has_a_peak_rate_and_a_source() -> None:
    for name, device in DEVICES.items():
        assert parse_hardware(name).peak("bf16"), name
        assert device.source


def test_a_group_sends_within_its_node_or_through_the_adapters_of_all_its_members_there() -> None:
    hardware = parse_hardware("h100x64")
    assert hardware.rate(tuple(range(8))) == 450e9
    assert hardware.rate((0, 1, 8, 9)) == 2 * 50e9
    assert hardware.rate(tuple(range(64))) == 8 * 50e9
    assert hardware.rate((0, 8, 16)) == 50e9


def test_a_ring_moves_its_message_once_and_a_sum_twice() -> None:
    hardware, ranks = parse_hardware("h100x8"), tuple(range(8))
    gather, reduce = (Collective(kind, 8 * 450_000_000, ranks, "forward") for kind in ("all_gather", "all_reduce"))
    assert ring_seconds(gather, hardware, PLAIN) == pytest.approx(7 * 450e6 / (450e9 * 0.5))
    assert ring_seconds(reduce, hardware, PLAIN) == pytest.approx(2 * ring_seconds(gather, hardware, PLAIN))
    assert ring_seconds(Collective("all_gather", 1, (0,), "forward"), hardware, PLAIN) == 0


def test_a_step_adds_products_memory_and_what_no_computation_hides() -> None:
    hardware, peak = parse_hardware("h100x8"), 1e12
    work = {"forward": Work(1e12, 0, 3.35e12, 10), "backward": Work(2e12, 0, 0, 10)}
    ranks = tuple(range(8))
    calls = [Collective("all_gather", round(450e9 * 8 / 7), ranks, "forward") for _ in range(4)]  # 2 s each
    step = step_time(work, calls, 1, hardware, peak, PLAIN, compiled=False)
    assert step.compute == pytest.approx(2 + 4)
    assert step.memory == pytest.approx(2)
    assert step.sent == pytest.approx(8)
    assert step.network == pytest.approx(2 + 6 - 4)  # the first is waited for, and 4 s of the others are hidden
    assert step.binds == "compute"
    compiled = step_time(work, calls, 1, hardware, peak, PLAIN, compiled=True)
    assert compiled.memory == pytest.approx(0.5)
    twice = step_time(work, [], 2, hardware, peak, PLAIN, compiled=False)
    assert twice.total == pytest.approx(2 * 8)


def test_rows_that_come_too_slowly_bind() -> None:
    step = step_time({"forward": Work(1e12)}, [], 1, parse_hardware("h100"), 1e12, PLAIN, False, loading=10.0)
    assert step.binds == "loader"
    assert step.total == pytest.approx(10)


def test_shares_are_ranges_around_the_central_ones() -> None:
    for name in ("product", "memory", "link"):
        assert getattr(SLOW, name) < getattr(CENTRAL, name) < getattr(FAST, name)
    for name in ("fused", "hop", "call", "message"):
        assert getattr(FAST, name) < getattr(CENTRAL, name) < getattr(SLOW, name)
