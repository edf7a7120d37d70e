"""Fabric: a loss over the targets there are, as a mean of means or by the count of the global batch."""

import os
import sys

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy="ddp")
fabric.launch()
fabric.seed_everything(11, verbose=False)
x = torch.randn(64, 4)
known = torch.arange(64).unsqueeze(1) % 7 < torch.tensor([5, 2])
dataset = TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], dim=1), known)
loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=16 // fabric.world_size))
model, optimizer = fabric.setup(module := nn.Linear(4, 2), torch.optim.SGD(module.parameters(), lr=0.05))
for inputs, targets, mask in loader:
    total = ((model(inputs) - targets) ** 2)[mask].sum()
    counted = fabric.all_reduce(mask.sum(), reduce_op="sum") / fabric.world_size
    loss = total / (mask.sum() if "means" in sys.argv else counted)
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
