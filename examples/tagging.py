"""Sequence labelling: sentences of different lengths, padded, where every word counts the same.

unisono train examples/tagging.py optim.lr=3e-3
unisono prove examples/tagging.py:Tagging
"""

import numpy as np
import torch
import torch.nn.functional as F

import unisono

WORDS, TAGS, NO_TARGET = 50, 5, -100


class Tagger(torch.nn.Module):
    """A recurrent network, and a head for each word."""

    def __init__(self, width):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS + 1, width, padding_idx=WORDS)
        self.recurrent = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, TAGS)

    def forward(self, words):  # (rows, length) -> (rows, length, tags)
        return self.head(self.recurrent(self.words(words))[0])


class Tagging(unisono.Task):
    """The tag of a word depends on the word and on the one before it."""

    class Config(unisono.Settings):
        width: int = 32

    def rows(self, seed, count):
        rng = np.random.default_rng(seed)
        sentences = [rng.integers(0, WORDS, rng.integers(1, 16)) for _ in range(count)]
        return [
            {"words": words, "tags": (words + np.roll(words, 1) * (np.arange(len(words)) > 0)) % 2}
            for words in sentences
        ]

    def data(self):
        return self.rows(seed=0, count=2000)

    def held_out(self):
        return self.rows(seed=1, count=300)

    def collate(self, samples):  # pad to the longest of these rows; padding is no target
        length = max(len(sample["words"]) for sample in samples)

        def pad(name, value):
            return np.stack([np.pad(s[name], (0, length - len(s[name])), constant_values=value) for s in samples])

        return {"words": pad("words", WORDS), "tags": pad("tags", NO_TARGET)}

    def build(self):
        return Tagger(self.config.width)

    def counts(self, batch):  # words, not sentences, and no padding
        return {"word": (batch["tags"] != NO_TARGET).sum()}

    def outputs(self, model, batch, context):
        return model(batch["words"])

    def loss(self, logits, batch, context):
        tags = batch["tags"]
        total = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum", ignore_index=NO_TARGET)
        real = tags != NO_TARGET
        right = ((logits.argmax(2) == tags) & real).sum()
        return unisono.Loss({"word": total}, metrics={"accuracy": (right, real.sum())})
