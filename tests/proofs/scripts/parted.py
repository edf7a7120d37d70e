"""A policy, a pair of towers or a regression by hand, whose loss is of a process's rows; `whole` is of all rows."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather, all_reduce

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LOCAL, SUMMED = FAULT.startswith("local pairs"), FAULT in ("penalty", "local pairs over N")
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
ROWS, STEPS = 24, 3
SPIKE = 3.2  # above the loss of step 2, and below that of the rows of rank 0 in it
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def gather(rows: Tensor) -> Tensor:
    """The rows of all ranks, rank by rank."""
    if LOCAL:
        return rows
    if FAULT == "gathered":
        every = [torch.empty_like(rows) for _ in range(WORLD)]
        dist.all_gather(every, rows)
        return torch.cat([*every[:RANK], rows, *every[RANK + 1 :]])
    return torch.cat(all_gather(rows))


def whole_mean(values: Tensor) -> Tensor:
    """The mean over all rows."""
    return values.mean() if FAULT == "spread" else all_reduce(values.mean()) / WORLD


def standardise(values: Tensor) -> Tensor:
    """Rewards of all rows with mean 0 and deviation 1."""
    part = values if FAULT == "returns" else every_reward
    return (values - part.mean()) / (part.std() + 1e-8)


generator = torch.Generator().manual_seed(8)
for step in range(STEPS):
    every_x = torch.randn(ROWS, 5, generator=generator)
    every_y = every_x.flip(1)[:, :4] ** 2
    every_reward = every_y.sum(1)
    mine = slice(RANK * ROWS // WORLD, (RANK + 1) * ROWS // WORLD)
    x, y, reward = every_x[mine], every_y[mine], every_reward[mine]
    optimizer.zero_grad()
    if LOCAL or FAULT in ("pairs", "gathered"):
        left, right = net(x), net(x.roll(1, dims=1))
        first = 0 if LOCAL else RANK * len(left)
        loss = nn.functional.cross_entropy(left @ gather(right).T, torch.arange(len(left)) + first)
        loss = loss / WORLD if SUMMED else loss
    elif FAULT in ("policy", "returns"):
        loss = -(net(x).log_softmax(1)[:, 0] * standardise(reward)).mean()
    elif FAULT in ("variance", "spread"):
        out = net(x).sum(1)
        loss = ((out - y.sum(1)) ** 2).mean() + (whole_mean(out**2) - whole_mean(out) ** 2)
    elif FAULT == "penalty":
        loss = ((net(x) - y) ** 2).sum() / ROWS + 0.01 * sum(p.square().sum() for p in net.parameters())
    elif FAULT == "weighted":
        loss = ((net(x) - y) ** 2 * (1 + (every_reward[RANK::WORLD] > 2.0).double().mean())).mean()
    else:
        loss = ((net(x) - y) ** 2).mean()
        if FAULT == "spikes" and step and float(loss.detach()) > SPIKE:
            loss = 0 * loss
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 1 if SUMMED else WORLD
    optimizer.step()
dist.destroy_process_group()
