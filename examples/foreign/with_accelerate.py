"""A script of Hugging Face Accelerate, with a learning rate that warms up and decays.

`train` hands its scheduler to `accelerator.prepare`, as the guides show. A prepared scheduler makes as many steps per
update as there are processes, because by default it takes the batch size for that of one process and the schedule for
that of a run on one. Here the schedule counts updates, so two processes run through it twice as fast.
`train_fixed` says by `split_batches` that the batch size is that of all processes; then it is stepped once.

    python examples/foreign/with_accelerate.py
    python examples/foreign/with_accelerate.py fixed
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from tagging import NO_TARGET, Sentences, Tagger
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from unisono.proof import World, compare

GLOBAL_BATCH, EPOCHS = 16, 2


def train(world: World, split_batches=False):
    loading = DataLoaderConfiguration(split_batches=split_batches, use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    set_seed(0)
    data = Sentences(48)
    batch_size = GLOBAL_BATCH if split_batches else GLOBAL_BATCH // accelerator.num_processes
    loader = DataLoader(data, batch_size, shuffle=True)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    updates = EPOCHS * len(data) // GLOBAL_BATCH
    scheduler = LambdaLR(optimizer, lambda done: min((done + 1) / 2, (updates - done) / updates))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    records = world.records(model, optimizer)
    for _ in range(EPOCHS):
        for batch in loader:
            targets = accelerator.reduce((batch["tags"] != NO_TARGET).sum(), "sum")
            logits = model(batch["words"]).flatten(0, 1)
            total = F.cross_entropy(logits, batch["tags"].flatten(), ignore_index=NO_TARGET, reduction="sum")
            accelerator.backward(total / targets * accelerator.num_processes)
            records.gradients()
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            records.step(rows=batch["id"], loss=accelerator.reduce(total.detach(), "sum") / targets)
    accelerator.end_training()
    return records


def train_fixed(world: World):
    return train(world, split_batches=True)


if __name__ == "__main__":
    raise SystemExit(compare(train_fixed if "fixed" in sys.argv else train).exit_code)
