"""`unisono plan`: what it prints, what it refuses, and what the search finds."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unisono.engines.torch
import unisono_plan
from packages.unisono.tests.screen import check_widths
from unisono.runtime.console import say, terminal_width
from unisono.runtime.errors import ConfigError
from unisono.task_config import load_config
from unisono_plan import search as searching
from unisono_plan import torch_trace
from unisono_plan.estimate import for_shards
from unisono_plan.hardware import parse_hardware
from unisono_plan.plan import Plan, PlanSettings, make_plan
from unisono_plan.recording import Trace
from unisono_plan.report import describe, layout_words

from .conftest import TASK, trace
from .zoo.small import PARAMETERS

Command = Callable[..., tuple[int, str, str]]


def plan(*words: str, **settings: Any) -> Plan:
    config = load_config(TASK, ["optim=adamw", "train.precision=bf16", *words])[0]
    return make_plan(config, PlanSettings.model_validate(settings))


def test_the_command_prints_memory_collectives_time_and_a_layout_to_type() -> None:
    lines = "\n".join(describe(plan("train.global_batch=128", "layout.strategy=fsdp", hardware="h100x16")))
    assert f"{PARAMETERS:,} parameters are trained" in lines
    for part in (
        "as configured: fsdp, 1 × 8 rows",
        "optimizer",
        "all_gather",
        "between nodes",
        "a step takes",
        "what binds",
    ):
        assert part in lines
    assert "a simulation cannot see" in lines or "cannot see" in lines


def test_a_plan_wraps_no_line_and_loses_no_word_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plan("train.global_batch=128", "layout.strategy=fsdp", "layout.micro_batch=1", hardware="h100x16")
    check_widths(monkeypatch, lambda: say("\n".join(describe(found, terminal_width()))))


def test_what_is_found_is_no_slower_than_what_was_asked_for_and_fits() -> None:
    found = plan("train.global_batch=128", "layout.strategy=fsdp", "layout.micro_batch=1", hardware="h100x8")
    assert found.best is not None and found.best.fits
    assert found.best.time is not None and found.configured.time is not None
    assert found.best.time.total <= found.configured.time.total
    assert found.considered > 20
    assert "layout.strategy=" in " ".join(layout_words(found.best.layout))


def test_nothing_fits_a_device_that_is_too_small() -> None:
    found = plan("train.global_batch=8", hardware="h100x8", memory_gb=2.001)
    assert (found.configured.fits, found.best) == (False, None)
    assert any(line.startswith("none of") and "fits 2 GB" in line for line in describe(found))


def test_lines_through_two_sizes_foretell_the_trace_of_a_third() -> None:
    """Rows × recomputation × shards by the search's lines: work within 0.1 %, activations within 10 %."""

    def tracer(layout: dict[str, Any], rows: int) -> Trace:
        return trace("train.precision=bf16", rows=rows, **layout)

    family = searching.Family.trace(tracer, {"strategy": "fsdp", "world_size": 2, "shards": None}, 2048)
    for rows, every in ((4096, 0), (1024, 1)):
        of_two, real = (
            trace("train.precision=bf16", rows=rows, world_size=world, activation_checkpointing=every).recording
            for world in (2, 8)
        )
        work = searching._shared_work(family, rows, float(every), 8)
        for phase in ("forward", "backward"):
            assert work[phase].flops == pytest.approx(real.work[phase].flops, rel=0.001)
            assert work[phase].other_bytes == pytest.approx(of_two.work[phase].other_bytes, rel=0.001)
        memory = searching._memory(family, rows, float(every), 1, 8)
        assert memory["optimizer"] == pytest.approx(real.most["optimizer"], rel=0.03)
        assert memory["activations"] == pytest.approx(real.most["activations"], rel=0.1)


def test_a_micro_batch_of_thousands_of_rows_is_foretold_by_traces_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a trace of it shows: FLOPs and bytes, memory at the peak, collectives; and no step is traced twice."""
    traced = list[tuple[str, int, int]]()

    def record(*given: Any) -> Trace:
        traced.append((given[1].layout.model_dump_json(), given[2].size, given[3]))
        return trace_step(*given)

    trace_step = torch_trace.trace_torch_step
    monkeypatch.setattr(torch_trace, "trace_torch_step", record)
    words = ("train.global_batch=16384", "layout.strategy=fsdp")
    found = plan(*words, hardware="h100x2").configured
    assert max(size for _, size, _ in traced) == 1024, "a row has 128 numbers"
    assert len(traced) == len({*traced})
    real = trace("train.precision=bf16", rows=8192, world_size=2)
    assert found.flops == real.work["flops"]
    for phase in ("forward", "backward", "optimizer"):
        assert found.work[phase].flops == real.recording.work[phase].flops
        assert found.work[phase].other_bytes == real.recording.work[phase].other_bytes
    assert found.memory == sum(real.recording.peak.values())
    assert list(found.collectives) == real.recording.collectives


def test_a_step_of_4096_devices_has_as_many_operators_as_one_of_8() -> None:
    """So that a plan takes as long for thousands of devices as for a node."""

    def operators(world_size: int) -> dict[str, int]:
        return {phase: work.calls for phase, work in trace(world_size=world_size).recording.work.items()}

    assert operators(4096) == operators(8)
    assert min(operators(8).values()) > 0


@pytest.mark.parametrize("shards", [2, 4])
def test_collectives_for_other_shards_are_those_of_a_trace_of_them(shards: int) -> None:
    base = trace(world_size=2).recording.collectives
    real = trace(world_size=8, strategy="hsdp", shards=shards).recording.collectives
    assert sorted(for_shards(base, "hsdp", shards, 8), key=repr) == sorted(real, key=repr)


@pytest.mark.parametrize(
    ("words", "settings", "why"),
    [
        (["layout.world_size=4"], {"hardware": "h100x8"}, "layout.world_size=4, but hardware names 8 devices"),
        (["layout.strategy=dp"], {"hardware": "h100"}, "layout.strategy=dp is for one process"),
        (["layout.strategy=fsdp", "layout.offload=true"], {"hardware": "h100"}, "layout.offload is not planned"),
        (["adapter=lora", "adapter.base_dtype=nf4"], {"hardware": "h100"}, "adapter.base_dtype=nf4 is not planned"),
        (["train.global_batch=12"], {"hardware": "h100x8"}, "train.global_batch=12 cannot be split evenly"),
        ([], {"hardware": "h99x8"}, "no such device"),
    ],
)
def test_what_cannot_be_planned_is_refused(words: list[str], settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(*words, **settings)
    assert why in str(refused.value)


def test_a_task_that_looks_at_content_is_refused_with_the_reason() -> None:
    config = load_config(TASK.replace("SmallTask", "PeekingTask"), ["optim=adamw", "train.global_batch=8"])[0]
    with pytest.raises(ConfigError, match="PeekingTask: a step cannot be traced") as refused:
        make_plan(config, PlanSettings(hardware="h100x8"))
    assert "small.py:" in str(refused.value) and "needs the content of tensors" in str(refused.value)


def test_the_verb_reads_its_own_words(command: Command) -> None:
    pytest.importorskip("unisono_plan.verbs")
    from importlib.metadata import entry_points

    if "plan" not in entry_points(group="unisono.verbs").names:
        pytest.skip("unisono-plan is not installed")
    words = ("optim=adamw", "train.global_batch=8", "hardware=a100x8", "search=false")
    code, out, _ = command("plan", TASK, *words)
    assert code == 0
    assert "8 × NVIDIA A100-SXM4-80GB (1 node of 8)" in out


def test_links_are_named_by_the_nodes_that_a_group_spans() -> None:
    hardware = parse_hardware("h100x16/4")
    assert hardware.is_local((0, 1, 2, 3)) and not hardware.is_local((3, 4))


def test_the_plan_uses_public_names_of_unisono_alone() -> None:
    """A private name that moves would be noticed by nobody: what a plan sets would not be read any more."""
    ours, theirs = (_nodes(Path(module.__file__).parent) for module in (unisono_plan, unisono.engines.torch))
    imported = [one for one in ours if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("unisono.")]
    assert not [name.name for one in imported for name in one.names if name.name.startswith("_")]
    private = {one.attr for one in _private(theirs) if ast.unparse(one.value) == "self"}
    used = [one for one in _private(ours) if ast.unparse(one.value) != "self"]
    own = {one.attr for one in _private(ours) if ast.unparse(one.value) == "self"}
    assert private and not [ast.unparse(one) for one in used if one.attr in private - own]


def _nodes(folder: Path) -> list[ast.AST]:
    return [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


def _private(nodes: list[ast.AST]) -> list[ast.Attribute]:
    return [node for node in nodes if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)]
