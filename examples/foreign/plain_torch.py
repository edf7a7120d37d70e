"""A plain torch script: DistributedDataParallel and gradient accumulation, with a cross-entropy over real targets.

`train` is how it is often written: every micro-batch is divided by its own number of targets, and DDP averages what
comes out, so the words of a process with short sentences count for more. `train_fixed` counts first.

    python examples/foreign/plain_torch.py
    python examples/foreign/plain_torch.py fixed
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tagging import NO_TARGET, Sentences, Tagger
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from unisono.proof import World, compare

GLOBAL_BATCH, ACCUMULATE, EPOCHS = 16, 2, 2


def mean_loss(logits, tags, targets):
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=NO_TARGET) / ACCUMULATE


def summed_loss(logits, tags, targets):
    total = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return total / targets * dist.get_world_size()  # DDP will divide by the number of processes


def train(world: World, loss_of=mean_loss):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Sentences(48)
    sampler = DistributedSampler(data, shuffle=True, seed=0)
    loader = DataLoader(data, GLOBAL_BATCH // ACCUMULATE // dist.get_world_size(), sampler=sampler)
    model = DistributedDataParallel(Tagger())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    records = world.records(model, optimizer)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches = list(loader)
        for first in range(0, len(batches), ACCUMULATE):
            window = batches[first : first + ACCUMULATE]
            targets = sum((batch["tags"] != NO_TARGET).sum() for batch in window)
            dist.all_reduce(targets)
            reported = torch.zeros(())
            for batch in window:
                with nullcontext() if batch is window[-1] else model.no_sync():
                    loss = loss_of(model(batch["words"]), batch["tags"], targets)
                    loss.backward()
                reported += loss.detach() / dist.get_world_size()
            dist.all_reduce(reported)
            records.gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            records.step(rows=torch.cat([batch["id"] for batch in window]), loss=reported)
    dist.destroy_process_group()
    return records


def train_fixed(world: World):
    return train(world, summed_loss)


if __name__ == "__main__":
    raise SystemExit(compare(train_fixed if "fixed" in sys.argv else train).exit_code)
