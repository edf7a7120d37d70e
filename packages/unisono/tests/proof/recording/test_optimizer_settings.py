"""The numbers that an optimizer computes with, and which of two runs' are others."""

from __future__ import annotations

import torch

from unisono.proof.recording.optimizer_settings import (
    describe_other,
    find_groups,
    find_other,
    find_other_members,
    read_settings,
)


def test_settings_are_the_numbers_beside_rates() -> None:
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], lr=0.3, betas=(0.8, 0.9), weight_decay=0.2, foreach=True
    )
    (group,) = read_settings(optimizer)
    assert (group["betas"], group["weight_decay"], group["amsgrad"]) == ([0.8, 0.9], [0.2], [0.0])
    assert not {"lr", "params", "foreach"} & {*group}


def test_the_first_setting_that_is_another_is_found_and_told() -> None:
    ours, theirs = [{"eps": [1e-8]}, {"betas": [0.9, 0.998]}], [{"eps": [1e-8]}, {"betas": [0.9, 0.999]}]
    which = find_other(ours, theirs, 1e-9)
    assert which == (1, "betas")
    told = describe_other(which, ours, theirs, "instead of {}")
    assert told == "betas of group 1 of the optimizer is 0.9 and 0.998 instead of 0.9 and 0.999"
    assert find_other(ours, ours, 1e-9) is None and find_other(ours, theirs[:1], 1e-9) is None


def test_parameters_that_groups_hold_otherwise_have_other_settings_although_groups_are_alike() -> None:
    """A name that a wrapper changes puts all parameters into the first of two groups."""
    weight, bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    parameters = {"weight": weight, "bias": bias}
    some = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], weight_decay=0.1)
    every = torch.optim.AdamW([{"params": [weight, bias]}, {"params": [], "weight_decay": 0.0}], weight_decay=0.1)
    held = [find_groups(optimizer, parameters) for optimizer in (every, some)]
    assert held == [{"weight": 0, "bias": 0}, {"weight": 0, "bias": 1}]
    ours, theirs = read_settings(every), read_settings(some)
    assert find_other(ours, theirs, 1e-9) is None
    assert find_other_members(ours, theirs, held, 1e-9) == ("weight_decay", ["bias"])
    assert find_other_members(ours, theirs, [held[0], held[0]], 1e-9) is None
