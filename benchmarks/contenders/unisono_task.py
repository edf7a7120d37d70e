"""Unisono: a task, and the numbers on the command line."""

import torch.nn.functional as F
from common import NO_TARGET, Rows, model

import unisono


class Peer(unisono.Task):
    """Next-token prediction with targets that differ from row to row."""

    def data(self):
        return Rows("rows_of_order")  # such that the order of a run deals them out as the others read them

    def build(self):
        return model()

    def counts(self, batch):
        return {"token": (batch["labels"][:, 1:] != NO_TARGET).sum()}

    def outputs(self, model, batch, context):
        return model(input_ids=batch["input_ids"]).logits

    def loss(self, logits, batch, context):
        wanted = batch["labels"][:, 1:].flatten()
        logits = logits[:, :-1].flatten(0, 1)
        return unisono.Loss({"token": F.cross_entropy(logits, wanted, ignore_index=NO_TARGET, reduction="sum")})
