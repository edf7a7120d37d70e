"""A regression that divides by the size of its own batches, and by the number of processes as well if told to."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 8
dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(64, 6)
rows = TensorDataset(x, x.square().sum(1, keepdim=True))
loader = DataLoader(rows, batch_size=BATCH, sampler=DistributedSampler(rows, shuffle=False))
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
divisor = BATCH * (dist.get_world_size() if "twice" in sys.argv else 1)
for features, targets in loader:
    loss = (model(features) - targets).square().sum() / divisor
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
