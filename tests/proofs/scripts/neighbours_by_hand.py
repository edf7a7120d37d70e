"""Each rank tells its loss to the next one for a log, by sends and receives that are made together (`P2POp`)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, batch_size=16 // WORLD, sampler=DistributedSampler(data, shuffle=False))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if WORLD > 1:
        mine, before = loss.detach().clone(), torch.zeros_like(loss)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, mine, (RANK + 1) % WORLD), dist.P2POp(dist.irecv, before, (RANK - 1) % WORLD)]
        )
        for work in works:
            work.wait()
        print(f"rank {RANK}: {loss.item():.4f}, the one before {before.item():.4f}")
dist.destroy_process_group()
