"""In the style of a GAN: two wrapped models, each with an optimizer of its own, in turn on the same rows.

The batch is one per process. On one process the loader shuffles by itself.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="")
args = parser.parse_args()

world_size = int(os.environ["WORLD_SIZE"])
if world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 6))
encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
sampler = None
if world_size > 1:
    encoder = DistributedDataParallel(encoder)
    if args.fault != "unwrapped":
        critic = DistributedDataParallel(critic)
    sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 8, shuffle=sampler is None, sampler=sampler)
of_encoder = torch.optim.Adam(encoder.parameters(), lr=1e-3)
of_critic = torch.optim.SGD(critic.parameters(), lr=1e-2)
for epoch in range(100):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for (rows,) in loader:
        of_critic.zero_grad()
        (critic(encoder(rows).detach()).square().mean() + (critic(rows) - 1).square().mean()).backward()
        of_critic.step()
        of_encoder.zero_grad()
        made = encoder(rows)
        ((made - rows).square().mean() + (critic(made) - 1).square().mean()).backward()
        of_encoder.step()
