"""A contrastive loss over the pairs of all ranks: gathered with or without a gradient, or the local pairs alone."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ContrastiveLoss(nn.Module):
    def gather(self, features):
        if "local" in sys.argv:
            return features
        if "detached" in sys.argv:
            everyone = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, features)
            return torch.cat(everyone)
        return torch.cat(torch.distributed.nn.all_gather(features))

    def forward(self, images, texts):
        images, texts = self.gather(F.normalize(images)), self.gather(F.normalize(texts))
        logits = images @ texts.T / 0.1
        target = torch.arange(len(logits))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, images, texts):
        return self.image(images), self.text(texts)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 6), torch.randn(64, 5))
    sampler = DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=8 // int(os.environ["WORLD_SIZE"]), sampler=sampler)
    model, criterion = DistributedDataParallel(Towers()), ContrastiveLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, texts in loader:
        optimizer.zero_grad()
        criterion(*model(images, texts)).backward()
        optimizer.step()


main()
