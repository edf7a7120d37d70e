"""A loop by hand that is right: targets are counted over the global batch before the first backward pass."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ACCUMULATE, BATCH, BETAS, CLIP, LR, NO_TARGET, STEPS, Rows, model
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    data = Rows()
    sampler = DistributedSampler(data, world, rank, shuffle=False)
    batches = iter(DataLoader(data, BATCH // ACCUMULATE // world, sampler=sampler))
    net = model()
    if world > 1:
        net = DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, betas=BETAS, weight_decay=0, fused=True)
    for _ in range(STEPS):
        window = [next(batches) for _ in range(ACCUMULATE)]
        targets = sum((batch["labels"][:, 1:] != NO_TARGET).sum() for batch in window)
        if world > 1:
            dist.all_reduce(targets)
        for batch in window:
            with net.no_sync() if world > 1 and batch is not window[-1] else nullcontext():
                logits = net(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
                wanted = batch["labels"][:, 1:].flatten()
                loss = F.cross_entropy(logits, wanted, ignore_index=NO_TARGET, reduction="sum")
                (loss * world / targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
