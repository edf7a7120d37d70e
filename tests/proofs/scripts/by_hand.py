"""Plain torch without a wrapper: gradients are reduced by hand, and clipped before or after; two optimizers."""

import argparse

import torch
import torch.distributed as dist
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--clip", choices=["before", "after", "never"], default="after")
parser.add_argument("--reduce", choices=["mean", "sum", "last"], default="mean")
parser.add_argument("--seed-by-rank", action="store_true")
args = parser.parse_args()


def average_gradients(model):
    for p in list(model.parameters())[-1:] if args.reduce == "last" else model.parameters():
        dist.all_reduce(p.grad)
        if args.reduce != "sum":
            p.grad /= dist.get_world_size()


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank if args.seed_by_rank else 7)
model = nn.ModuleDict({"body": nn.Linear(4, 6), "head": nn.Linear(6, 1)})
optimizers = [torch.optim.SGD(model["body"].parameters(), lr=0.1), torch.optim.Adam(model["head"].parameters())]
generator = torch.Generator().manual_seed(3)
for _ in range(10):
    whole = torch.randn(8, 4, generator=generator)
    mine = whole[rank::world]
    loss = (model["head"](torch.tanh(model["body"](mine))) - mine.sum(1, keepdim=True)).pow(2).mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    if args.clip == "before":
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    average_gradients(model)
    if args.clip == "after":
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    for optimizer in optimizers:
        optimizer.step()
