"""Sign SGD by rows: its formula, on rows that have a gradient only, beside whichever optimizer has the rest."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from unisono.config.schema.optimizers import Optimizer
from unisono.optim.optimizers import build_optimizer
from unisono.optim.sign_sgd import RowSignSgd


def test_rows_with_a_gradient_move_by_its_sign_and_decay_and_others_stay() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.float64))
    weight.grad = torch.tensor([[0.3, -1e-9], [0.0, 0.0], [0.0, 7.0]], dtype=torch.float64)
    RowSignSgd([weight], lr=0.1, weight_decay=0.5).step()
    expected = [[1.0 * 0.95 - 0.1, -2.0 * 0.95 + 0.1], [3.0, 4.0], [5.0 * 0.95, 6.0 * 0.95 - 0.1]]
    torch.testing.assert_close(weight.detach(), torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", ["adamw", "adam_atan2", "muon"])
def test_a_pattern_gives_rows_to_it_and_the_optimizer_keeps_the_rest(kind: str) -> None:
    groups = [{"match": "0.weight", "rule": "sign_sgd", "weight_decay": 0.0}]
    config = TypeAdapter(Optimizer).validate_python({"kind": kind, "lr": 0.25, "groups": groups})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer(config, model, [model[1]])
    model(torch.tensor([1, 3])).square().sum().backward()
    gradient = model[0].weight.grad.clone()
    optimizer.step()
    change = model[0].weight.detach() - before["0.weight"]
    assert gradient[[1, 3]].all() and not gradient[[0, 2, 4]].any()
    torch.testing.assert_close(change, -0.25 * gradient.sign(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(model[1].weight, before["1.weight"])
    saved = optimizer.state_dict()
    again = build_optimizer(config, model, [model[1]])
    again.load_state_dict(saved)
    assert again.state_dict().keys() == saved.keys()


def test_a_group_has_one_rule() -> None:
    with pytest.raises(ValidationError, match="muon=true and rule=sign_sgd; choose one"):
        groups = [{"match": "*", "muon": True, "rule": "sign_sgd"}]
        TypeAdapter(Optimizer).validate_python({"kind": "muon", "groups": groups})
