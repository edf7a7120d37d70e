"""Lightning's Trainer: a regression with holes in its targets, validated on rows of its own."""

import argparse
import os
import tempfile

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unisono.proof import LightningCallback

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--fault", default="")
args = parser.parse_args()
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))


def rows(count):
    x = torch.randn(count, 4)
    known = torch.arange(count).unsqueeze(1) % 7 < torch.tensor([5, 2])
    return TensorDataset(x, torch.stack([x.sum(1), x.prod(1)], dim=1), known)


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, _):
        x, y, known = batch
        total = ((self.net(x) - y) ** 2)[known].sum()
        if args.fault == "means":
            return total / known.sum()
        count = self.all_gather(known.sum()).sum()
        loss = total / count
        self.log("train_loss", loss, on_step=True, sync_dist=args.fault != "own_loss", reduce_fx="sum")
        return loss * world

    def validation_step(self, batch, _):
        x, y, _ = batch
        errors = ((self.net(x) - y) ** 2).mean(1)
        if args.fault in ("padded", "sync_dist"):  # its mean divides by the mean of the ranks' counts, as an integer
            self.log("val_loss", errors.mean(), sync_dist=True, batch_size=len(x))
        else:
            self.log("val_loss", errors.sum() / 13, sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(7, verbose=False)
training, validation = rows(80), rows(13)
order = DistributedSampler(training, world, rank, seed=5)  # Lightning's own shuffles on several processes only
part = DistributedSampler(validation, world, rank, shuffle=False) if args.fault == "padded" else range(rank, 13, world)
model = Regression()
with tempfile.TemporaryDirectory() as folder:
    trainer = pl.Trainer(
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_epochs=3,
        default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        gradient_clip_val=0.5, callbacks=[LightningCallback()],
        use_distributed_sampler=False,
    )  # fmt: skip
    held_out = DataLoader(validation, args.batch_size, sampler=part)
    trainer.fit(model, DataLoader(training, args.batch_size, sampler=order), held_out)
