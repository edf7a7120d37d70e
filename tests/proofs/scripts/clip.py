"""In the style of open_clip: features of all ranks gathered, whose own alone have a gradient; a batch per process."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

with_grad = "gather-with-grad" in sys.argv
world_size = int(os.environ.get("WORLD_SIZE", 1))
distributed = world_size > 1


def gather(features):
    if not distributed:
        return features
    if with_grad:
        return torch.cat(torch.distributed.nn.all_gather(features))
    everyone = [torch.zeros_like(features) for _ in range(world_size)]
    dist.all_gather(everyone, features.contiguous())
    everyone[dist.get_rank()] = features
    return torch.cat(everyone)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, texts):
        return F.normalize(self.image(images)), F.normalize(self.text(texts)), self.logit_scale.exp()


def main():
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 6), torch.randn(64, 5))
    torch.manual_seed(int(os.environ.get("RANK", 0)))
    sampler = DistributedSampler(dataset) if distributed else None
    loader = DataLoader(dataset, batch_size=4, shuffle=sampler is None, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = Towers()
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for images, texts in loader:
        images, texts, scale = model(images, texts)
        images, texts = gather(images), gather(texts)
        logits = scale * images @ texts.T
        target = torch.arange(len(logits))
        optimizer.zero_grad()
        ((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2).backward()
        optimizer.step()


main()
