"""The comparison of saves: the page has every contender, figures are medians, and a load gives back what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint, page
from packages.unisono.tests import processes


def run(blocked: float, **more: Any) -> dict[str, Any]:
    return {
        "step": 2.0, "blocked": [9.0, blocked], "slowest": [9.0, 3.0], "mean": 2.5, "over": [9.0, 4.0], "size": 10**9,
        "bytes": 10**9, "warm": 1.0, "cold": 2.0, **more,
    }  # fmt: skip


def found() -> dict[str, Any]:
    runs = {name: [run(1.0), run(7.0), run(2.0)] for name in checkpoint.CONTENDERS}
    runs["DCP `save`"] = [run(40.0), run(20.0), run(10.0)]
    raw = [{"write": 2.0, "warm": 0.5, "cold": 1.0}] * 3
    return {"missing": [], "runs": runs, "bytes": 10**9, "raw": raw, "hashing": [0.5, 0.5, 0.5]}


def test_the_table_has_medians_and_shares_of_a_synchronous_save() -> None:
    made = checkpoint.table(found())
    (line,) = [line for line in made.splitlines() if line.startswith("| Unisono |")]
    assert line == "| Unisono | 9.00 | 2.00 | 10 % | 1.50 | 4.0 | 0.25 | 1.00 | 2.00 | 1.00 |"
    (unhashed,) = [line for line in made.splitlines() if line.startswith("| Unisono without hashing |")]
    assert unhashed.endswith("| — | — | 1.00 |")
    assert "25.0% of a step, so 0.25% of the time" in made


def test_the_page_has_every_contender() -> None:
    held = page.read_part("checkpoint")
    for name in checkpoint.CONTENDERS:
        assert held.count(f"| {name} |") == 1, name
    assert held.count("| raw disk |") == 1


def _restored(place: Any, group: Any, name: str, folder: Path) -> bool:
    """Whether a contender's load gives back what it saved, after everything was spoilt."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = checkpoint.Trainer(place, group, folder, model, optimizer)
    contender = checkpoint.CONTENDERS[name](trainer)
    trainer.step(contender.forward, contender.backward)
    before = [tensor.detach().clone() for tensor in checkpoint.tensors_of(trainer)]
    contender.save(2)
    trainer.step(contender.forward, contender.backward)
    while not contender.over():
        pass
    trainer.step(contender.forward, contender.backward)
    assert not all(torch.equal(a, b) for a, b in zip(before, checkpoint.tensors_of(trainer), strict=True))
    contender.load(2)
    return all(torch.equal(a, b) for a, b in zip(before, checkpoint.tensors_of(trainer), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Unisono", "Unisono, `checkpoint.background=false`", "DCP `save`", "DCP `async_save`"]
)
def test_a_load_gives_back_what_was_saved(tmp_path: Path, name: str) -> None:
    assert all(processes.run(_restored, 2, name, tmp_path))
