"""`layout.offload`: shards of FSDP in the host's memory, with the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import unisono
from packages.unisono.tests.launch import jobs
from unisono.config.schema.layout import Layout
from unisono.engines.torch.parallel import wrap
from unisono.observe.events import read_events


class Step(nn.Module):
    """Two blocks and a norm, as a step module has them in `model`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)) for _ in range(2)))


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("offload", [True, False])
def test_every_unit_is_sharded_into_the_memory_of_the_host(
    strategy: Any, precision: str, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: blocks, norms and the rest alike, with pinned pages for a device and without them on a CPU."""
    seen: list[Any] = []
    monkeypatch.setattr(wrap, "fully_shard", lambda module, **options: seen.append(options["offload_policy"]))
    monkeypatch.setattr(wrap, "init_device_mesh", lambda *_, **__: type("Mesh", (), {"get_all_groups": lambda _: []})())
    layout = Layout(strategy=strategy, offload=offload, shards=1 if strategy == "hsdp" else None)
    for kind in ("cuda", "cpu"):
        seen.clear()
        step = Step()
        wrap._shard_module(step, wrap.find_blocks(step.model), layout, precision, torch.device(kind), 1, 10.0)  # type: ignore[arg-type]
        assert len(seen) == (4 if precision == "bf16" else 3)
        expected = CPUOffloadPolicy(pin_memory=kind != "cpu") if offload else OffloadPolicy()
        assert all(type(one) is type(expected) and one == expected for one in seen)


@pytest.mark.slow
def test_an_offloaded_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(jobs.SMALL, encoding="utf-8")
    found = {}
    for name, more in {"kept": (), "offloaded": ("layout.offload=true",)}.items():
        words = ("train.steps=4", "layout.world_size=2", "layout.strategy=fsdp", f"run.name={name}", *more)
        done = jobs.unisono("train", "small.py:Small", *jobs.QUIET, *words, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        [folder] = tmp_path.rglob(f"{name}/events.jsonl")
        weights = dict(unisono.load_model(folder.parent, task="small.py:Small").named_parameters())
        losses = [event["loss"] for event in read_events(folder) if "loss" in event and not event.get("eval")]
        found[name] = losses, weights
    assert len(found["kept"][0]) == 4
    assert found["kept"][0] == found["offloaded"][0]
    first, second = found["kept"][1], found["offloaded"][1]
    assert all(torch.equal(first[name], second[name]) for name in first)
