"""What ranks exchange within a pass is noted with the line of the script, and what torch or a count is, told apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from unisono.proof.scripts.recording import script_collectives
from unisono.proof.scripts.recording.script_collectives import HARMLESS, ScriptCollectives

ROWS, COUNT = torch.zeros(4, 3), torch.tensor(4)


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the script, and its calls of torch exchange nothing."""
    monkeypatch.setattr(script_collectives, "is_our_file", lambda file: Path(file).name == "script_collectives.py")
    for name in ("all_gather", "all_reduce", "all_to_all_single", "reduce_scatter_tensor", "scatter", "send"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all_single", "reduce_scatter_tensor", "scatter", "send"])
def test_an_exchange_of_rows_within_a_pass_is_noted_with_its_line(name: str) -> None:
    told: list[None] = []
    seen = ScriptCollectives(lambda: True, lambda: told.append(None))
    with seen.installed():
        getattr(dist, name)(ROWS)
    (line,) = seen.take()
    assert line.startswith(f"{name} in {Path(__file__).name}, line ") and not line.endswith(HARMLESS)
    assert (len(told), seen.take()) == (1, [])


def test_counts_are_told_from_rows_and_what_torch_calls_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ScriptCollectives(lambda: True, lambda: None)
    with seen.installed():
        dist.all_reduce(COUNT)
        monkeypatch.setattr(script_collectives, "_TORCH", __file__)
        dist.all_reduce(ROWS)
    count, own = seen.take()
    assert count.endswith(HARMLESS[1])
    assert own == f"all_reduce{HARMLESS[0]}"


def test_outside_of_a_pass_an_exchange_is_told_and_not_noted() -> None:
    told: list[None] = []
    seen = ScriptCollectives(lambda: False, lambda: told.append(None))
    with seen.installed():
        dist.all_gather([ROWS], ROWS)
    assert (len(told), seen.take()) == (1, [])
