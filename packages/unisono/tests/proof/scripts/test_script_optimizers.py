"""Scripts whose optimizers hold more than parameters: buffers of integers, and memory that no checkpoint has."""

from __future__ import annotations

from pathlib import Path

import pytest

from packages.unisono.tests.proof.scripts.test_script_proof import prove

SPARSE_BUFFERS = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.randn(8, 3))
        self.register_buffer("own", torch.zeros(4 // world, 3, requires_grad=True), persistent=False)
        self.register_buffer("rows", torch.zeros(4 // world, dtype=torch.int32), persistent=False)

    def forward(self, rows):
        with torch.no_grad():
            self.own.copy_(self.weights[rows])
            self.rows.copy_(rows)
        return self.own


class SignOfRows(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        weights, own, rows = self.param_groups[0]["params"]
        gradients, places = own.grad / world, rows.clone()
        if world > 1:
            parts = [torch.empty_like(gradients) for _ in range(world)]
            dist.all_gather(parts, gradients)
            numbers = [torch.empty_like(places) for _ in range(world)]
            dist.all_gather(numbers, places)
            gradients, places = torch.cat(parts), torch.cat(numbers)
        weights[places.long()] -= 0.1 * gradients.sign()
        own.grad = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = Sparse(), nn.Linear(3, 1)

    def forward(self, rows):
        return self.head(self.rows(rows))


model = Model()
optimizers = [SignOfRows(list(model.rows.buffers())), torch.optim.SGD(model.head.parameters(), lr=0.1)]
for step in range(9):
    whole = torch.arange(4) + step % 3
    model(whole[rank * 4 // world : (rank + 1) * 4 // world]).square().mean().backward()
    for parameter in model.head.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    for optimizer in optimizers:
        optimizer.step()
    optimizers[1].zero_grad()
"""


@pytest.mark.slow
def test_an_optimizer_may_hold_buffers_of_integers_and_scratch_memory_that_no_checkpoint_has(tmp_path: Path) -> None:
    """As those of sparse embeddings do, whose rows each rank has for itself."""
    report = prove(tmp_path, SPARSE_BUFFERS)
    assert report.mark == "PASS", report.lines
    compared = {c.quantity: c.mark for c in report.verdicts[0].compared}
    assert (compared["buffers"], compared["parameters"]) == ("PASS", "PASS")
