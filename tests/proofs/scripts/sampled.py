"""In the style of minGPT-ddp: a split of the data, a sampler under torchrun alone, texts padded by the collator.

The batch is one per process. On one process the loader shuffles by itself.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--fault", default="")
parser.add_argument("--dropout", type=float, default=0.0)
args = parser.parse_args()

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if world_size > 1:
    dist.init_process_group("gloo")
made = torch.Generator().manual_seed(3)
texts = [torch.randint(1, 20, (int(n),), generator=made) for n in torch.randint(3, 9, (120,), generator=made)]
if args.fault != "split":
    torch.manual_seed(5)
train, held_out = random_split(texts, [100, 20])
torch.manual_seed(5)


def collate(rows):
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Model(nn.Module):
    """Predicts the token before; its loss is the mean over rows of the mean over the tokens of a row."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(20, 8), nn.Dropout(args.dropout), nn.Linear(8, 20)

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.drop(self.embed(input_ids)) * attention_mask[..., None]
        logits = self.head(hidden.cumsum(1))
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        if args.fault == "tokens":
            return each.sum() / attention_mask.sum()
        if args.fault == "padding":
            return each.mean()
        return ((each * attention_mask).sum(1) / attention_mask.sum(1)).mean()


model = Model()
sampler = None
if world_size > 1:
    model = DistributedDataParallel(model)
    sampler = DistributedSampler(range(80) if args.fault == "dropped" else train, seed=1)
loader = DataLoader(train, args.batch_size, shuffle=sampler is None, sampler=sampler, collate_fn=collate)
lr = 1e-3 * world_size
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
for epoch in range(100):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(**batch)
        if args.fault == "factor":  # for models that divide by the tokens of all processes, as this one does not
            loss = loss * world_size
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
