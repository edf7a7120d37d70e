"""A script for GPUs alone: NCCL, streams, events, autocast, a scaler, a fused optimizer, a compiled model."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group(backend="nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
rank, world_size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
torch.cuda.set_device(rank)
device = torch.device("cuda", rank)
assert device.type == "cuda" and torch.cuda.device_count() == world_size
torch.manual_seed(0)
torch.cuda.manual_seed_all(rank)
drawn = torch.Generator(device="cuda").manual_seed(3)
net = torch.compile(nn.Sequential(nn.Linear(4, 8, device=device), nn.Tanh(), nn.Linear(8, 2).cuda(rank)))
model = nn.parallel.DistributedDataParallel(net.to(rank), device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scaler = torch.cuda.amp.GradScaler()
rows = torch.randn(4, 8, 4, generator=drawn, device="cuda").pin_memory()
begun = torch.cuda.Event(enable_timing=True)
begun.record()
for batch in rows:
    batch = batch[rank::world_size].to(rank, non_blocking=True)
    with torch.autocast("cuda", dtype=torch.float16), torch.cuda.stream(torch.cuda.Stream()):
        loss = model(batch).square().mean()
    if "scaled" in sys.argv:
        loss = loss * world_size
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    shown = loss.detach().clone()
    dist.all_reduce(shown, op=dist.ReduceOp.AVG)
    torch.cuda.synchronize()
    if rank == 0:
        print(f"{shown.item():.3f}, {torch.cuda.max_memory_allocated() >> 20} MiB")
dist.destroy_process_group()
