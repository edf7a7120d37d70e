"""What ranks have read is given to one process: their batches side by side or in turn, and targets past the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unisono.engines.torch.numerics.precision import PromoteToDouble
from unisono.proof.scripts.replay.loss_inputs import LossInputs
from unisono.proof.scripts.replay.row_exchange import RowExchange, RowKeeper, RowReplay


def keep_batches(folder: Path, by_rank: list[list[Any]]) -> None:
    for rank, batches in enumerate(by_rank):
        keeper, source = RowKeeper(folder, rank, len(by_rank)), object()
        for batch in batches:
            keeper.take_batch(source, batch, len(batch))
        keeper.close()


def test_batches_are_given_side_by_side_or_in_turn(tmp_path: Path) -> None:
    keep_batches(tmp_path, [[torch.tensor([1]), torch.tensor([2])], [torch.tensor([3]), torch.tensor([4])]])
    source, native = object(), torch.tensor([9])
    beside = RowReplay(tmp_path, [0, 1], "side by side")
    assert [beside.take_batch(source, native, 1).tolist() for _ in range(3)] == [[1, 3], [2, 4], [9]]
    turns = RowReplay(tmp_path, [0, 1], "in turn")
    assert [turns.take_batch(source, native, 1).tolist() for _ in range(4)] == [[1], [3], [2], [4]]


def test_the_rows_of_one_rank_are_given_from_a_step_on_and_those_of_all_before_it(tmp_path: Path) -> None:
    keep_batches(tmp_path, [[torch.tensor([1]), torch.tensor([2])], [torch.tensor([3]), torch.tensor([4])]])
    replay, source, native = RowReplay(tmp_path, [1], "side by side", 1, 2), object(), torch.tensor([9])
    first = replay.take_batch(source, native, 1)
    replay.step = 1
    assert [first.tolist(), replay.take_batch(source, native, 1).tolist()] == [[1, 3], [4]]


def test_what_cannot_be_given_is_told_and_changes_nothing(tmp_path: Path) -> None:
    keep_batches(tmp_path, [[torch.zeros(2, 3)], [torch.zeros(2, 4)]])
    replay, native = RowReplay(tmp_path, [0, 1], "side by side"), torch.ones(1, 3)
    assert replay.take_batch(object(), native, 1) is native
    assert "no attention_mask" in replay.reason


Made = Callable[[Tensor], Tensor]


def run_passes(exchange: RowExchange, batches: list[tuple[Tensor, Tensor]], loss: Callable[..., Tensor]) -> list[float]:
    """Losses of passes of a model that doubles its input, of a script without a `DataLoader`."""
    model, seen = nn.Linear(1, 1, bias=False), []
    nn.init.constant_(model.weight, 2.0)
    with LossInputs() as inputs:
        inputs.exchange = exchange
        for x, y in batches:
            inputs.begin_forward()
            ((x,), _) = inputs.exchange_inputs(((x,), {}))
            outputs = model(x)
            inputs.end_forward(outputs)
            seen.append(float(loss(outputs, y).detach()))
            inputs.end_pass()
    return seen


def keep_passes(folder: Path, by_rank: list[list[tuple[Tensor, Tensor]]], loss: Callable[..., Tensor]) -> None:
    for rank, batches in enumerate(by_rank):
        keeper = RowKeeper(folder, rank, len(by_rank))
        run_passes(keeper, batches, loss)
        keeper.close()


def column(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values])[:, None]


OF_RANKS = [[(column(1), column(1)), (column(2), column(0))], [(column(3), column(2)), (column(4), column(3))]]
NATIVE = [(column(9, 9), column(9, 9))] * 2


def squared(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs - y) ** 2).sum()


def test_inputs_and_the_targets_that_go_past_the_model_are_given(tmp_path: Path) -> None:
    keep_passes(tmp_path, OF_RANKS, squared)
    losses = run_passes(RowReplay(tmp_path, [0, 1], "side by side"), NATIVE, squared)
    assert losses == [(2 - 1) ** 2 + (6 - 2) ** 2, (4 - 0) ** 2 + (8 - 3) ** 2]
    turns = run_passes(RowReplay(tmp_path, [0, 1], "in turn"), [(column(9), column(9))] * 4, squared)
    assert turns == [1, 16, 16, 25]


def test_what_is_made_of_outputs_or_anew_or_never_changes_is_no_target(tmp_path: Path) -> None:
    weight = torch.tensor([0.5])

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        numbers = torch.arange(len(outputs))[:, None]
        return (weight * (outputs * outputs.detach() + numbers * outputs - y)).sum()

    keep_passes(tmp_path, OF_RANKS, loss)
    replay = RowReplay(tmp_path, [0, 1], "side by side")
    first, _ = run_passes(replay, NATIVE, loss)
    assert (first, replay.reason) == (0.5 * ((2 * 2 + 0 - 1) + (6 * 6 + 6 - 2)), "")
    weight.fill_(1.0)  # perhaps a fault of the ranks, which must not be given to one process
    replay = RowReplay(tmp_path, [0, 1], "side by side")
    run_passes(replay, NATIVE, loss)
    assert "is the same in every pass of a rank, and another on one process" in replay.reason


def test_places_of_a_rank_alone_are_given_although_they_never_change(tmp_path: Path) -> None:
    places = torch.zeros(1, dtype=torch.long)

    def pairs(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs @ y.T, places, reduction="sum")

    keep_passes(tmp_path, OF_RANKS, pairs)
    places = torch.arange(2)
    replay = RowReplay(tmp_path, [1], "side by side")
    assert (run_passes(replay, NATIVE, pairs), replay.reason) == ([0.0, 0.0], "")  # one row, which pairs with itself


@pytest.mark.parametrize(
    ("loss", "drawn"),
    [
        (lambda outputs, y: (outputs * torch.rand(1)).sum(), True),
        (lambda outputs, y: nn.functional.dropout(outputs, 0.5).sum(), True),
        (lambda outputs, y: (outputs - y).sum() + 0 * float(torch.rand(2)[0] < 2), False),
    ],
)
def test_draws_of_a_batch_to_come_are_told_from_those_of_the_loss(loss: Made, drawn: bool) -> None:
    model = nn.Linear(1, 1)
    with LossInputs() as inputs:
        inputs.begin_forward()
        outputs = model(column(1))
        inputs.end_forward(outputs)
        loss(outputs, column(2))  # type: ignore[call-arg]
        assert (inputs.draws, inputs.drawn) == (True, drawn)


def test_numbers_that_are_read_of_tensors_which_are_not_drawn_are_noted() -> None:
    with LossInputs() as inputs:
        [int(one) for one in torch.randint(9, (3,))]
        assert not inputs.numbers
        (column(1, 2) > 0).sum().item()
        assert inputs.numbers


def test_optimizers_and_scalers_keep_their_own_precision_while_everything_is_watched() -> None:
    """They are known by who has called torch, which what is watched must not hide."""
    model = nn.Linear(2, 1).double()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with PromoteToDouble(), LossInputs():
        scaler.scale(model(torch.ones(1, 2, dtype=torch.float64)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert optimizer.state[model.weight]["step"].dtype == torch.float32


def test_a_state_that_a_pass_has_left_is_computed_by_one_process_and_is_no_row(tmp_path: Path) -> None:
    """If one process were given the ranks' states, a state that ranks exchange by mistake would not show."""

    def carry(exchange: RowExchange, rows: list[Tensor], leave: Made) -> list[Tensor]:
        state, seen = torch.zeros(len(rows[0]), 1), []
        with LossInputs() as inputs:
            inputs.exchange = exchange
            for row in rows:
                inputs.begin_forward()
                ((row, state), _) = inputs.exchange_inputs(((row, state), {}))
                plain = inputs.leave_out_carried((row, state))
                assert (plain[1] is None) == bool(seen)
                outputs = (row + state).requires_grad_()
                inputs.end_forward(outputs)
                seen.append(outputs.detach())
                inputs.end_pass()
                state = leave(outputs.detach() * 1)
        return seen

    keepers = [RowKeeper(tmp_path, rank, 2) for rank in range(2)]
    for rank, keeper in enumerate(keepers):
        carry(keeper, [column(rank + 1), column(10 * rank + 1)], lambda state: state + 100)  # a fault of many
        keeper.close()
    seen = carry(RowReplay(tmp_path, [0, 1], "side by side"), [column(7, 7), column(7, 7)], lambda state: state)
    assert [one.flatten().tolist() for one in seen] == [[1.0, 2.0], [2.0, 13.0]]
