"""`layout.deterministic`: in force while the engine computes, told, and refused where a kernel has none."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from packages.unisono.tests.processes import alone
from packages.unisono.tests.runs import configuration, traces
from packages.unisono.tests.tasks import LinearTask, TransformerTask
from unisono.config.schema.layout import Layout
from unisono.engines.torch import devices
from unisono.engines.torch.numerics import determinism
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import Context

ASKED = Layout(engine="torch", deterministic=True, device="cpu")


class Seeing(LinearTask):
    """Writes down whether deterministic algorithms are in force."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        self.seen = torch.are_deterministic_algorithms_enabled()
        return super().outputs(model, batch, context)


class Putting(LinearTask):
    """Uses a kernel that has no deterministic implementation."""

    def outputs(self, model: Any, batch: Any, context: Context) -> Any:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().outputs(model, batch, context)


@pytest.mark.parametrize("asked", [True, False])
def test_it_is_in_force_in_every_pass_of_the_engine_and_nowhere_else(asked: bool) -> None:
    """The claim: `layout.deterministic` does something in torch; it was accepted and ignored."""
    task = Seeing()
    alone(traces, [(task, configuration(layout={"deterministic": asked}))])
    assert task.seen is asked
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_without_a_deterministic_implementation_is_refused_by_its_name() -> None:
    alone(traces, [(Putting(), configuration())])
    with pytest.raises(
        ConfigError, match=r"layout.deterministic=true: put_ has no deterministic implementation on cpu"
    ):
        alone(traces, [(Putting(), configuration(layout={"deterministic": True}))])
    assert not torch.are_deterministic_algorithms_enabled()


def test_two_runs_are_equal_bit_for_bit() -> None:
    asked = configuration(layout={"deterministic": True})
    one, two = (alone(traces, [(TransformerTask(), asked)])[0] for _ in range(2))
    assert one.losses == two.losses and len(set(one.losses)) > 1
    assert all((one.parameters[name] == two.parameters[name]).all() for name in one.parameters)


def test_it_is_told_with_the_machine() -> None:
    assert devices.machine(ASKED, ProcessInfo())["deterministic"]
    assert "deterministic" not in devices.machine(Layout(engine="torch", device="cpu"), ProcessInfo())


def test_the_workspace_of_cublas_is_set_before_the_first_use_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name, on_gpu = "CUBLAS_WORKSPACE_CONFIG", ASKED.model_copy(update={"device": "cuda"})
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    determinism.prepare(ASKED)
    assert name not in os.environ
    determinism.prepare(on_gpu)
    assert os.environ[name] == ":4096:8"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    determinism.prepare(on_gpu)  # what it set itself is in force
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match="CUDA was used in this process before"):
        determinism.prepare(on_gpu)
    monkeypatch.setenv(name, ":0:0")
    with pytest.raises(ConfigError, match=f"{name}=:0:0 lets cuBLAS choose"):
        determinism.prepare(on_gpu)
