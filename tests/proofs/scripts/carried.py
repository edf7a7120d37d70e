"""In the style of word_language_model: a recurrent network whose state goes on from one stretch of text to the next."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1] if len(sys.argv) > 1 else ""
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
STREAMS, LENGTH, WORDS = 4, 6, 11  # of a process


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.cell = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, WORDS)

    def forward(self, words, state):
        made, state = self.cell(self.words(words), state)
        return self.head(made), state


def main():
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    corpus = torch.randint(WORDS, (world_size * STREAMS, 60))[rank * STREAMS : (rank + 1) * STREAMS]
    torch.manual_seed(0)
    model = Network()
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = None
    for start in range(0, 54, LENGTH):
        words, following = (corpus[:, start + n : start + n + LENGTH] for n in (0, 1))
        logits, state = model(words, None if state is None else state.detach())
        if fault == "broadcast" and world_size > 1:
            dist.broadcast(state, 0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten()).backward()
        optimizer.step()


main()
