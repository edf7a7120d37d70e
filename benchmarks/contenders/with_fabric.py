"""Lightning Fabric, as its guide to gradient accumulation writes it."""

import os

import torch
from common import ACCUMULATE, BATCH, BETAS, CLIP, LR, Rows, model
from lightning_fabric import Fabric
from torch.utils.data import DataLoader


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto")
    fabric.launch()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, betas=BETAS, weight_decay=0, fused=True)
    net, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Rows(), BATCH // ACCUMULATE // world))
    for number, batch in enumerate(loader, start=1):
        accumulating = number % ACCUMULATE != 0
        with fabric.no_backward_sync(net, enabled=accumulating and world > 1):
            fabric.backward(net(**batch).loss / ACCUMULATE)
        if not accumulating:
            fabric.clip_gradients(net, optimizer, max_norm=CLIP)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
