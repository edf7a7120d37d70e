"""FSDP2: the optimizer is built after the model is sharded, or before it; the whole model is sharded, or a layer."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for layer in (model[0],) if "layer" in sys.argv else (model[0], model[2], model):
    fully_shard(layer)
if "stale" not in sys.argv:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randn(10, 16, 6, generator=torch.Generator().manual_seed(1))
for batch in data:
    rows = batch.chunk(dist.get_world_size())[dist.get_rank()]
    loss = (model(rows) - rows.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if "layer" not in sys.argv:  # torch cannot
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
