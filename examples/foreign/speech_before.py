"""A small reconstruction of a LoRA trainer for Higgs Audio, with its silent faults; and its corrected twin.

    python examples/foreign/speech_before.py            # all faults at once
    python examples/foreign/speech_before.py wrapper    # one of them: see FAULTS
    python examples/foreign/speech_before.py fixed
    unisono prove examples/foreign/speech_before.py worlds=[1,2] -- plain wrapper   # the script as it is

Text and codes are random, so that nothing but arithmetic is compared. Three of the faults are the same on one process
and on many, or are in files, so no comparison of the arithmetic can see them; they are here to say so.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

from unisono.proof import World, compare

FAULTS = {
    "wrapper": "the forward pass goes to the module inside DDP, so gradients are never reduced",
    "sampler": "the sampler is given the local rank; shown as on nodes with one process each",
    "means": "losses of micro-batches are means, which are averaged",
    "shift": "logits are compared with labels of the same place; the same on one process",
    "saves": "every process writes the checkpoint to the same file (into SPEECH_OUT); nothing of it is arithmetic",
    "last": "micro-batches that fill no window are dropped at the end of an epoch; the same on one process",
}
BOOKS, CODES, WORDS = 4, 16, 40
AUDIO, DELAY, BEGIN = WORDS, WORDS + 1, WORDS + 2
IGNORED = -100
ROWS, GLOBAL_BATCH, MICRO_BATCH, EPOCHS = 20, 8, 2, 2


class Conversations(Dataset):
    """A text, then a stream of codes with the delay pattern; every third has no audio."""

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        draw = torch.Generator().manual_seed(row)
        words = torch.randint(WORDS, (3 + row % 5,), generator=draw)
        count = 0 if row % 3 == 2 else 2 + row % 7
        codes = torch.randint(CODES, (count, BOOKS), generator=draw)
        frames = torch.full((count + BOOKS + 1 if count else 0, BOOKS), CODES + 1)
        for book in range(BOOKS):
            frames[: book + 1, book] = CODES
            frames[book + 1 : book + 1 + count, book] = codes[:, book]
        return {"id": row, "words": words, "frames": frames}


def collate(samples):
    """Ids and frames padded at their ends, and labels beside their own tokens."""
    length = max(len(s["words"]) + 1 + len(s["frames"]) for s in samples)
    most = max(1, *(len(s["frames"]) for s in samples))
    batch = {
        "id": torch.tensor([s["id"] for s in samples]),
        "ids": torch.zeros(len(samples), length, dtype=torch.long),
        "frames": torch.zeros(len(samples), most, BOOKS, dtype=torch.long),
        "real": torch.zeros(len(samples), most, dtype=torch.bool),
        "text": torch.full((len(samples), length), IGNORED),
        "audio": torch.full((len(samples), length, BOOKS), IGNORED),
    }
    for number, sample in enumerate(samples):
        words, frames = sample["words"], sample["frames"]
        place = slice(len(words) + 1, len(words) + 1 + len(frames))
        batch["ids"][number, : len(words)] = batch["text"][number, : len(words)] = words
        batch["ids"][number, len(words)] = BEGIN
        batch["ids"][number, place] = AUDIO
        batch["frames"][number, : len(frames)] = frames
        batch["real"][number, : len(frames)] = True
        batch["audio"][number, place] = torch.where(frames < CODES, frames, IGNORED)
    return batch


class Speaker(nn.Module):
    """Logits of text (batch, length, words) and of codes (batch, length, codebooks, entries)."""

    def __init__(self):
        super().__init__()
        config = HiggsAudioV2Config(
            vocab_size=WORDS + 3, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, num_codebooks=BOOKS, codebook_size=CODES + 2, audio_stream_bos_id=CODES,
            audio_stream_eos_id=CODES + 1, audio_token_id=AUDIO, audio_delay_token_id=DELAY, audio_bos_token_id=BEGIN,
            pad_token_id=0, bos_token_id=None, eos_token_id=1,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        self.higgs = HiggsAudioV2ForConditionalGeneration._from_config(
            config, dtype=torch.get_default_dtype(), use_text_head=True
        )

    def forward(self, ids, frames, real):
        hidden = self.higgs.model(
            input_ids=ids, audio_input_ids=frames, audio_input_ids_mask=real, use_cache=False
        ).last_hidden_state
        return self.higgs.text_lm_head(hidden), self.higgs.audio_lm_head(hidden).unflatten(-1, (BOOKS, -1))


def losses_of(logits, labels, faults):
    """The cross-entropy of a micro-batch and its targets: a sum, or with the fault a mean."""
    if "shift" not in faults:
        logits, labels = logits[:, :-1], labels[:, 1:]
    targets = (labels != IGNORED).sum()
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return (total / targets.clamp(min=1) if "means" in faults else total), targets


def train(world: World, faults=frozenset(FAULTS)):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size = dist.get_world_size()
    local_rank = 0 if "sampler" in faults else dist.get_rank()  # LOCAL_RANK on nodes with one process each
    data = Conversations()
    sampler = DistributedSampler(data, size, local_rank, shuffle=True, seed=0)
    loader = DataLoader(data, MICRO_BATCH, sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(Speaker())
    called = model.module if "wrapper" in faults else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    records = world.records(model, optimizer)
    accumulate = GLOBAL_BATCH // MICRO_BATCH // size
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        batches = list(loader)
        windows = [batches[first : first + accumulate] for first in range(0, len(batches), accumulate)]
        if "last" in faults:
            windows = [window for window in windows if len(window) == accumulate]
        for window in windows:
            counts = torch.zeros(2)
            for batch in window:
                for number, kind in enumerate(("text", "audio")):
                    start = 0 if "shift" in faults else 1
                    counts[number] += (batch[kind][:, start:] != IGNORED).sum()
            dist.all_reduce(counts)
            reported = torch.zeros(())
            for batch in window:
                with nullcontext() if batch is window[-1] else model.no_sync():
                    text, audio = called(batch["ids"], batch["frames"], batch["real"])
                    parts = [losses_of(text, batch["text"], faults)[0], losses_of(audio, batch["audio"], faults)[0]]
                    if "means" in faults:
                        loss = sum(parts) / len(window)
                    else:  # DDP will divide by the number of processes
                        loss = sum(part / count.clamp(min=1) for part, count in zip(parts, counts, strict=True)) * size
                    loss.backward()
                reported += loss.detach() / size
            dist.all_reduce(reported)
            records.gradients()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            records.step(rows=torch.cat([batch["id"] for batch in window]), loss=reported)
        if "SPEECH_OUT" in os.environ and ("saves" in faults or dist.get_rank() == 0):
            torch.save(model.module.state_dict(), Path(os.environ["SPEECH_OUT"], f"epoch-{epoch}.pt"))
    dist.destroy_process_group()
    return records


def train_fixed(world: World):
    return train(world, frozenset())


def train_wrapper(world: World):
    return train(world, frozenset({"wrapper"}))


def train_sampler(world: World):
    return train(world, frozenset({"sampler"}))


def train_means(world: World):
    return train(world, frozenset({"means"}))


def train_shift(world: World):
    return train(world, frozenset({"shift"}))


def train_saves(world: World):
    return train(world, frozenset({"saves"}))


def train_last(world: World):
    return train(world, frozenset({"last"}))


class Unrecorded:
    """In place of what records: `unisono prove` sees a script by itself."""

    def records(self, model, optimizer):
        return self

    def gradients(self):
        pass

    def step(self, **values):
        pass


if __name__ == "__main__":
    if "plain" in sys.argv:
        train(Unrecorded(), frozenset(sys.argv[2:]))
        raise SystemExit
    chosen = globals()[f"train_{sys.argv[1]}"] if len(sys.argv) > 1 else train
    raise SystemExit(compare(chosen).exit_code)
