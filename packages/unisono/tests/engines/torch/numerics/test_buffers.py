"""Which buffers are those of one process, and what is said of them."""

from __future__ import annotations

import logging

import pytest
from torch import nn

from unisono.engines.torch.numerics.buffers import Buffers
from unisono.runtime.communication.communicator import ProcessInfo


@pytest.mark.parametrize(
    ("norm", "advice"),
    [
        (nn.BatchNorm1d(3), "With layout.sync_batch_norm=true they agree."),
        (nn.InstanceNorm1d(3, track_running_stats=True), "Set track_running_stats=False in 0."),
    ],
)
def test_what_makes_running_statistics_agree_depends_on_the_kind_of_layer(
    norm: nn.Module, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "unisono"):
        found = Buffers(nn.Sequential(norm), ProcessInfo(world_size=2))
    assert set(found.local) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    assert caplog.messages[0].endswith(advice)
