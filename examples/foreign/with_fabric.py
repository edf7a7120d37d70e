"""A script of Lightning Fabric, on a data set whose size the number of processes does not divide.

`train` leaves it to `fabric.setup_dataloaders` to deal out the rows. The DistributedSampler that it puts in gives every
process equally many, and repeats rows at the end of every epoch to do so. `train_fixed` brings a sampler of its own,
which deals out every row once.

    python examples/foreign/with_fabric.py
    python examples/foreign/with_fabric.py fixed
"""

import sys

import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from tagging import NO_TARGET, Sentences, Tagger
from torch.utils.data import DataLoader, Sampler

from unisono.proof import World, compare

GLOBAL_BATCH, EPOCHS = 16, 2


class EveryRowOnce(Sampler):
    """Every `size`-th row of a shuffled epoch; the last batch of some processes is one row shorter."""

    def __init__(self, rows, rank, size):
        self.rows, self.rank, self.size, self.epoch = rows, rank, size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.rank :: self.size].tolist())

    def __len__(self):
        return len(range(self.rank, self.rows, self.size))


def train(world: World, own_sampler=False):
    fabric = Fabric(accelerator="cpu", devices=world.size, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    data = Sentences(45)
    sampler = EveryRowOnce(len(data), fabric.global_rank, fabric.world_size) if own_sampler else None
    loader = DataLoader(data, GLOBAL_BATCH // fabric.world_size, shuffle=sampler is None, sampler=sampler)
    loader = fabric.setup_dataloaders(loader, use_distributed_sampler=not own_sampler)
    model = Tagger()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    records = world.records(model, optimizer)
    for epoch in range(EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for batch in loader:
            targets = fabric.all_reduce((batch["tags"] != NO_TARGET).sum(), reduce_op="sum")
            logits = model(batch["words"]).flatten(0, 1)
            total = F.cross_entropy(logits, batch["tags"].flatten(), ignore_index=NO_TARGET, reduction="sum")
            fabric.backward(total / targets * fabric.world_size)
            records.gradients()
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            records.step(rows=batch["id"], loss=fabric.all_reduce(total.detach(), reduce_op="sum") / targets)
    return records


def train_fixed(world: World):
    return train(world, own_sampler=True)


if __name__ == "__main__":
    raise SystemExit(compare(train_fixed if "fixed" in sys.argv else train).exit_code)
