"""In the style of nanoGPT: random crops drawn by rank, micro-batches, synchronisation with the last of them."""

import os
import sys

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

gradient_accumulation_steps, batch_size, block_size = 4, 2, 8
never_synchronised = "never" in sys.argv
seed_offset, ddp_world_size = 0, 1
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    seed_offset = int(os.environ["RANK"])
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337)
data = torch.randint(30, (1000,))
model = nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30))
torch.manual_seed(1337 + seed_offset)


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
if ddp:
    model = DistributedDataParallel(model)
X, Y = get_batch()
iter_num = 0
while iter_num < 600:
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1 and not never_synchronised
        logits = model(X)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), Y.view(-1)) / gradient_accumulation_steps
        X, Y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
if ddp:
    destroy_process_group()
