"""A training loop with an evaluation between updates, a warm-up, a frozen part and a closure for the optimizer."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(5)
x = torch.randn(120, 7)
dataset = TensorDataset(x, x[:, :3].sum(1, keepdim=True))
training, held_out = Subset(dataset, range(96)), Subset(dataset, range(96, 120))
net = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1))
net[0].requires_grad_(False)
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
updates_per_call = dist.get_world_size() if "per-process" in sys.argv else 1
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
sampler = DistributedSampler(training, seed=2)
train_loader = DataLoader(training, 8 // dist.get_world_size(), sampler=sampler)
test_loader = DataLoader(held_out, 6)


@torch.no_grad()
def evaluate():
    model.eval()
    total = sum((model(inputs) - targets).square().sum() for inputs, targets in test_loader)
    model.train()
    return total / len(held_out)


for inputs, targets in train_loader:

    def closure(inputs=inputs, targets=targets):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    for _ in range(updates_per_call):
        schedule.step()
    evaluate()
