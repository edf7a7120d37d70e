"""What a trial step of a search for the largest micro-batch computes, and where a limit of memory means something."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests.runs import configuration
from packages.unisono.tests.tasks import LinearTask
from unisono.engines.protocol import EngineJob
from unisono.engines.torch import devices
from unisono.launch.autobatch import probe
from unisono.launch.resolving import layout
from unisono.runtime.communication.communicator import ProcessInfo, SingleProcess
from unisono.runtime.errors import ConfigError


class Pairs(LinearTask):
    """Its loss looks at all rows of the global batch."""

    cross_sample = "rows"


class Rows(list[Any]):
    """Rows that are longer the later they come."""

    lengths = np.arange(1, 25)


class Lengths(LinearTask):
    """Its source says how long its rows are."""

    def data(self) -> Rows:
        return Rows(super().data())


class BuiltError(Exception):
    """Stands in for an engine, of which only the job matters."""


@pytest.mark.parametrize(
    ("task", "balanced", "passes"), [(LinearTask, False, 2), (Pairs, False, 6), (Lengths, False, 2), (Lengths, True, 6)]
)
def test_a_step_is_measured_whole_where_its_first_micro_batches_do_not_stand_for_all(
    task: type[LinearTask], balanced: bool, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim: two of them would find too large a size.

    A loss over pairs keeps the outputs of all rows; of micro-batches of equal cost, the last have the most rows.
    """

    def create(job: EngineJob) -> Any:
        raise BuiltError(job.split.passes)

    monkeypatch.setattr(probe, "create_engine", create)
    data = {"group_by_length": "balanced"} if balanced else {}
    searched = probe.Probe(task(), configuration(data=data), ProcessInfo(), SingleProcess())
    with pytest.raises(BuiltError) as built:
        searched.peak(2, "resident")
    assert built.value.args == (passes,)


def test_a_limit_of_memory_is_refused_where_nothing_would_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim: on a CPU it is for `layout.micro_batch=auto` alone; it was accepted and ignored."""
    import packages.unisono.tests.tasks

    where = f"{packages.unisono.tests.tasks.__file__}:LinearTask"
    config = configuration(layout={"max_memory_gb": 2.0, "micro_batch": 4}).model_copy(update={"recipe": where})
    with pytest.raises(ConfigError, match=r"layout.max_memory_gb=2 is for layout.micro_batch=auto on a cpu"):
        layout.resolve_layout(config, None)
    found = config.model_copy(update={"layout": config.layout.model_copy(update={"micro_batch": "auto"})})
    assert layout.resolve_layout(found, None).layout.max_memory_gb == 2


def test_a_gpu_gives_a_process_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, Any]] = []
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Gpu", (), {"total_memory": 8e9}))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    devices.limit_memory(configuration(layout={"max_memory_gb": 2.0}).layout, gpu)
    devices.limit_memory(configuration().layout, gpu)
    assert limits == [(0.25, gpu)]
