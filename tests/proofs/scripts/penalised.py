"""A regression by hand, with a penalty of its weights, a decay, or groups of parameters, on parts of the rows."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

KIND, FAULT = sys.argv[-1], "fault" in sys.argv
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
ROWS, STEPS, RATE, PENALTY = 21 if KIND == "shards" else 24, 3, 0.02, 0.01
torch.manual_seed(4)
x = torch.randn(ROWS, 5)
y = x.square().sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
model = DistributedDataParallel(net) if WORLD > 1 and KIND in ("groups", "rates") else net
named = list((model if FAULT else net).named_parameters())  # a wrapper begins all names anew
head = [parameter for name, parameter in named if name.startswith("3.")]
body = [parameter for name, parameter in named if not name.startswith("3.")]
if KIND == "groups":
    groups = [{"params": body, "weight_decay": 0.1}, {"params": head, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=RATE)
elif KIND == "rates":
    optimizer = torch.optim.SGD([{"params": body, "lr": RATE}, {"params": head, "lr": 5 * RATE}])
else:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
part = slice(RANK * ROWS // WORLD, (RANK + 1) * ROWS // WORLD)
if KIND == "shards" and FAULT:
    part = slice(RANK * (ROWS // WORLD), (RANK + 1) * (ROWS // WORLD))
mine, targets = x[part], y[part]


def penalty() -> Tensor:
    return PENALTY * torch.stack([parameter.square().sum() for parameter in net.parameters()]).sum()


for _ in range(STEPS):
    optimizer.zero_grad()
    off = (model(mine) - targets).square()
    if KIND == "shards":
        loss = off.sum() / (WORLD * len(mine) if FAULT else ROWS)
    elif KIND == "penalty":
        loss = off.mean() / WORLD + penalty() / (1 if FAULT else WORLD)
    else:
        loss = off.mean() / (1 if model is not net else WORLD)
    loss.backward()
    by_hand = 2 * PENALTY if KIND == "by hand" else 0.0
    for parameter in net.parameters():
        if FAULT:
            parameter.grad += by_hand * parameter.detach()
        if model is net:
            dist.all_reduce(parameter.grad)
        if not FAULT:
            parameter.grad += by_hand * parameter.detach()
    optimizer.step()
    if KIND == "decay":
        with torch.no_grad():
            for parameter in net.parameters():
                parameter *= (1 - RATE * PENALTY) ** (WORLD if FAULT else 1)
dist.destroy_process_group()
