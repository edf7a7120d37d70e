"""What the three scripts train: a small tagger, on generated sentences of very different lengths."""

import torch
from torch import nn
from torch.utils.data import Dataset

WORDS, TAGS, LONGEST = 50, 7, 12
NO_TARGET = -100


class Sentences(Dataset):
    """Words and their tags; where a sentence has ended there is no target."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.words = torch.randint(WORDS, (count, LONGEST), generator=generator)
        lengths = torch.randint(1, LONGEST + 1, (count, 1), generator=generator)
        self.tags = torch.where(torch.arange(LONGEST) < lengths, self.words % TAGS, NO_TARGET)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, row):
        return {"id": row, "words": self.words[row], "tags": self.tags[row]}


class Tagger(nn.Sequential):
    """Logits of the tags of every word: (batch, word, tag)."""

    def __init__(self):
        super().__init__(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, TAGS))
