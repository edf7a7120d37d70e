"""The numbers that an optimizer computes with, and which of two runs' are others."""

from __future__ import annotations

import torch

from unisono.proof.recording.optimizer_settings import describe_other, find_other, read_settings


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
