"""Plain torch: DDP, a DistributedSampler, AdamW, clipping."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--fault", default="")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
x = torch.randn(96, 5)
dataset = TensorDataset(x, x.sum(1, keepdim=True) ** 2)
hidden = {"batch_norm": nn.BatchNorm1d(8), "dropout": nn.Dropout(0.2)}.get(args.fault, nn.LayerNorm(8))
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), hidden, nn.Linear(8, 1))
if args.fault == "ignored":
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["3.weight"])
model = DistributedDataParallel(net)
if args.fault == "no_sampler":
    loader = DataLoader(dataset, args.batch_size, shuffle=True)
    sampler = None
else:
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler)
lr = args.lr * world_size if args.fault == "rate" else args.lr
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
forward = model.module if args.fault == "round" else model

for epoch in range(100):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(forward(inputs), targets)
        if args.fault == "scaled":  # DDP has averaged already
            loss = loss / world_size
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if args.fault != "not_cleared":
            optimizer.zero_grad()
    with torch.no_grad():
        if rank == 0:
            print(f"epoch {epoch}: {F.mse_loss(net(x), dataset.tensors[1]).item():.4f}")
dist.destroy_process_group()
