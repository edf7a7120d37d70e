"""Tensors without content: who can tell, and what is computed with them all the same."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono import linear_cross_entropy
from unisono.recipe_tools import has_content, real_tensors


def test_meta_and_fake_tensors_have_no_content():
    assert has_content(torch.ones(2)) and has_content(nn.Linear(2, 2)) and has_content(nn.ReLU())
    with torch.device("meta"):
        assert not has_content(torch.ones(2)) and not has_content(nn.Linear(2, 2))
    with FakeTensorMode():
        assert not has_content(torch.ones(2)) and not has_content(nn.Linear(2, 2))


def test_a_model_can_be_built_with_content_amid_one_without():
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            with real_tensors():
                assert float(torch.ones(2).sum()) == 2
            assert not has_content(torch.ones(2))


def test_the_loss_of_hidden_states_has_a_gradient_where_nobody_knows_what_is_padding():
    with FakeTensorMode():
        hidden = torch.zeros(6, 4, requires_grad=True)
        total, _ = linear_cross_entropy(hidden, torch.zeros(8, 4), None, torch.zeros(6, dtype=torch.int64), chunk=4)
        total.backward()
    assert hidden.grad is not None and hidden.grad.shape == (6, 4)
