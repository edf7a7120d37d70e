"""What decides an update beside gradients and state is found: draws, values kept elsewhere, norms over elements."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from unisono.engines.observers import ModelView
from unisono.proof.probes.update_probe import probe_update
from unisono.proof.recording.trace import Array, RunFacts


class Noisy(torch.optim.SGD):
    """Draws beside every update."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value.add_(torch.randn_like(value))


class Counting(torch.optim.SGD):
    """Counts its updates where no checkpoint looks."""

    made = 0

    def step(self, closure: Any = None) -> Any:
        self.made = self.made + 1
        return super().step(closure)


class Normalised(torch.optim.SGD):
    """Divides a gradient by its norm."""

    def step(self, closure: Any = None) -> Any:
        for value in self.param_groups[0]["params"]:
            value.grad /= value.grad.norm()
        return super().step(closure)


def probe(kind: type[torch.optim.SGD], gradient: Array) -> RunFacts:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer, facts = kind([weight], lr=0.1), RunFacts(optimizer="")
    view = cast("ModelView", SimpleNamespace(whole=lambda _: {"weight": weight.detach().numpy()}))

    def load() -> None:
        weight.data.fill_(1.0)

    def update(gradients: Mapping[str, Array]) -> None:
        for value in gradients.values():
            weight.grad = torch.from_numpy(value.copy())
        optimizer.step()

    probe_update(facts, view, optimizer, {"weight": gradient} if len(gradient) else {}, load, update)
    return facts


@pytest.mark.parametrize(
    ("kind", "draws", "kept", "coupled"),
    [
        (torch.optim.SGD, False, "", ""),
        (Noisy, True, "", ""),
        (Counting, False, "made", ""),
        (Normalised, False, "", "weight"),
    ],
)
def test_each_is_found_of_the_optimizer_that_does_it_alone(
    kind: type[torch.optim.SGD], draws: bool, kept: str, coupled: str
) -> None:
    found = probe(kind, np.array([0.5, -1.0, 2.0, 0.25]))
    assert bool(found.update_draws) == draws
    assert (found.kept_by_optimizer, found.coupled) == (kept, coupled)


def test_draws_are_named_with_their_line() -> None:
    assert "test_update_probe.py" in probe(Noisy, np.ones(4)).update_draws


def test_without_a_second_update_nothing_is_said() -> None:
    found = probe(Noisy, np.ones(0))
    assert (found.update_draws, found.kept_by_optimizer, found.coupled) == ("", "", "")
