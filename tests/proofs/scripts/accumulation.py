"""Plain torch: tokens of uneven counts, gradient accumulation under no_sync."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

MEANS = "--means" in sys.argv


class Sentences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        words = torch.randint(20, (10,), generator=g)
        labels = torch.where(torch.arange(10) < 1 + i % 9, words % 5, -100)
        return {"words": words, "labels": labels}


def batches(loader, accumulate):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == accumulate:
            yield window
            window = []


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    accumulate = 4 // world
    torch.manual_seed(1234)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = Sentences()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=1)
    for window in batches(loader, accumulate):
        count = torch.tensor(sum((b["labels"] != -100).sum() for b in window))
        dist.all_reduce(count)
        for n, batch in enumerate(window):
            last = n == len(window) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                logits = model(batch["words"]).flatten(0, 1)
                labels = batch["labels"].flatten()
                if MEANS:
                    loss = F.cross_entropy(logits, labels, ignore_index=-100) / accumulate
                else:
                    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") * world / count
                loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
