"""Accelerate, as its guide to gradient accumulation writes it."""

import torch
from accelerate import Accelerator
from common import ACCUMULATE, BATCH, BETAS, CLIP, LR, Rows, model
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, betas=BETAS, weight_decay=0, fused=True)
    loader = DataLoader(Rows(), BATCH // ACCUMULATE // accelerator.num_processes)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()
