"""What ranks exchange within a pass is noted with the line of the script, and what torch or a count is, told apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

from unisono.proof.scripts.recording import script_collectives
from unisono.proof.scripts.recording.script_collectives import Exchange, ScriptCollectives, merge_exchanges

ROWS, COUNT = torch.zeros(4, 3), torch.tensor(4)
EXCHANGES = [
    "all_gather",
    "all_reduce_coalesced",
    "all_to_all_single",
    "isend",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


@pytest.fixture(autouse=True)
def as_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file is the script, and its calls of torch exchange nothing."""
    monkeypatch.setattr(script_collectives, "is_our_file", lambda file: Path(file).name == "script_collectives.py")
    for name in (*EXCHANGES, "all_reduce"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)


@pytest.mark.parametrize("name", EXCHANGES)
def test_an_exchange_of_rows_within_a_pass_is_noted_with_its_line(name: str) -> None:
    told: list[None] = []
    seen = ScriptCollectives(lambda: True, lambda: told.append(None))
    with seen.installed():
        getattr(dist, name)(ROWS)
    ((line, kind),) = seen.take().items()
    assert line.startswith(f"{name} in {Path(__file__).name}, line ") and kind == Exchange.ROWS
    assert (len(told), seen.take()) == (1, {})


def test_counts_are_told_from_rows_and_what_torch_calls_from_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ScriptCollectives(lambda: True, lambda: None)
    with seen.installed():
        dist.all_reduce(COUNT)
        monkeypatch.setattr(script_collectives, "_TORCH", __file__)
        dist.all_reduce(ROWS)
    (_, count), own = seen.take().items()
    assert count == Exchange.COUNT
    assert own == ("all_reduce", Exchange.WITH_BACKWARD)


def test_one_line_that_exchanges_a_count_and_then_rows_exchanges_rows() -> None:
    seen = ScriptCollectives(lambda: True, lambda: None)
    with seen.installed():
        for value in (COUNT, ROWS, COUNT):
            dist.all_reduce(value)
    assert [*seen.take().values()] == [Exchange.ROWS]


@pytest.mark.parametrize(("gradient", "kind"), [(True, Exchange.WITH_BACKWARD), (False, Exchange.ROWS)])
def test_a_functional_collective_has_a_backward_pass_where_its_result_has_a_gradient(
    monkeypatch: pytest.MonkeyPatch, gradient: bool, kind: Exchange
) -> None:
    monkeypatch.setattr(functional, "all_gather_tensor", lambda tensor, *_: tensor)
    seen = ScriptCollectives(lambda: True, lambda: None)
    with seen.installed():
        functional.all_gather_tensor(ROWS.clone().requires_grad_(gradient), 0, "group")
    assert [*seen.take().values()] == [kind]


def test_a_batch_of_sends_holds_rows_and_is_of_the_functions_that_torch_knows() -> None:
    seen = ScriptCollectives(lambda: True, lambda: None)
    before = distributed_c10d.isend
    with seen.installed():
        assert distributed_c10d.isend is dist.isend
        seen.note("batch_isend_irecv", ([SimpleNamespace(op=dist.isend, tensor=ROWS)],))
    assert distributed_c10d.isend is before
    assert [*seen.take().values()] == [Exchange.ROWS]


def test_outside_of_a_pass_an_exchange_is_told_and_not_noted() -> None:
    told: list[None] = []
    seen = ScriptCollectives(lambda: False, lambda: told.append(None))
    with seen.installed():
        dist.all_gather([ROWS], ROWS)
    assert (len(told), seen.take()) == (1, {})


def test_a_line_that_exchanges_rows_in_one_pass_does_so_whatever_later_passes_and_ranks_exchange() -> None:
    rows, count = {"a": Exchange.ROWS}, {"a": Exchange.COUNT, "b": Exchange.COUNT}
    for each in ((rows, count), (count, rows)):
        assert merge_exchanges(*each) == {"a": "rows", "b": "count"}
