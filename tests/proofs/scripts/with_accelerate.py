"""Accelerate: prepared loader, accumulation, and a schedule that prepare() steps once per process."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset


def training_function(args):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
    set_seed(42)
    features = torch.randn(80, 6)
    dataset = TensorDataset(features, (features.sum(1) > 0).long())
    train_dataloader = DataLoader(dataset, batch_size=args.batch_size)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lr_scheduler = LambdaLR(optimizer, lambda done: 1 / (1 + done))
    if args.prepare_scheduler:
        lr_scheduler = accelerator.prepare(lr_scheduler)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)
    for _ in range(3):
        model.train()
        for inputs, labels in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                if args.prepare_scheduler or accelerator.sync_gradients:
                    lr_scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--prepare_scheduler", action="store_true")
    training_function(parser.parse_args())
