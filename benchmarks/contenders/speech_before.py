"""A LoRA trainer of Higgs Audio as a small team writes it by hand, under torchrun; see benchmarks/speech.py.

Each recording is opened twice for each use, once for a waveform and once for codes, which are made anew every time.
Rows stand in the sampler's order. All logits of all places are made. `variant=bypassed` calls the module inside DDP, as
the original did, so that no gradient is reduced; `variant=reduced` calls DDP, in every micro-batch of an update.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from speech_counters import reductions
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import unisono_audio as audio
from unisono import SampleContext, generator
from unisono_speech import settings
from unisono_speech.data import labels
from unisono_speech.task import Speech

IGNORED = -100
TOWER_RATE = 16000  # Hz, of the waveform that the original kept for its Whisper tower
READS = {"reads": 0, "samples": 0}


class Recordings(Dataset):
    """The samples of the recipe, their audio read as the original read it."""

    def __init__(self, task):
        self.task, self.source = task, task.data()

    def __len__(self):
        return len(self.source)

    def codes(self, clip):
        for rate in (TOWER_RATE, self.task.codec.rate):
            decoded = audio.decode(clip.path.read_bytes())
            waveform = audio.resample(decoded.samples, decoded.rate, rate)
            READS["reads"] += 1
        return self.task.codec.encode(waveform)

    def __getitem__(self, number):
        context = SampleContext(generator("before", number), training=True)
        conversation = self.task.library.conversation(self.source[number], context)
        READS["samples"] += 1
        return labels.row_of(conversation, self.task.tokens, self.task.stream, self.codes)


class Model(nn.Module):
    """Logits of text and of all codebooks, at every place."""

    def __init__(self, higgs, books):
        super().__init__()
        self.higgs, self.books = higgs, books

    def forward(self, ids, frames, real):
        plain = self.higgs.base_model.model
        hidden = plain.model(
            input_ids=ids, audio_input_ids=frames, audio_input_ids_mask=real, use_cache=False
        ).last_hidden_state
        return plain.text_lm_head(hidden), plain.audio_lm_head(hidden).unflatten(-1, (self.books, -1))


def collate(rows, task):
    """Rows padded to the longest; labels beside their own tokens."""
    length, most = max(len(row.ids) for row in rows), max(1, *(len(row.frames) for row in rows))
    books = task.stream.codebooks
    ids, text = np.zeros((len(rows), length), np.int64), np.full((len(rows), length), IGNORED)
    codes = np.full((len(rows), length, books), IGNORED)
    frames, real = np.zeros((len(rows), most, books), np.int64), np.zeros((len(rows), most), bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)], text[number, : len(row.ids)] = row.ids, row.text_labels
        codes[number, np.flatnonzero(labels.audio_places(row.ids, task.tokens))] = row.audio_labels
        frames[number, : len(row.frames)], real[number, : len(row.frames)] = row.frames, True
    return tuple(torch.from_numpy(array) for array in (ids, frames, real, text, codes))


def main():
    given = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    task = Speech(
        settings.SpeechConfig(),
        model=settings.FromConfig(kind="config", settings=given["model"]),
        data=settings.Folder(kind="folder", **given["data"]),
    )
    task.setup()
    torch.manual_seed(0)
    lora = LoraConfig(r=32, lora_alpha=64, lora_dropout=0.05, target_modules=r".*(self_attn|mlp|audio_mlp)\..*_proj")
    wrapped = DistributedDataParallel(Model(get_peft_model(task.build(), lora), task.stream.codebooks))
    called = wrapped.module if given["variant"] == "bypassed" else wrapped
    data = Recordings(task)
    sampler = DistributedSampler(data, world, int(os.environ["LOCAL_RANK"]), seed=0)
    loader = DataLoader(data, given["micro_batch"], sampler=sampler, collate_fn=lambda rows: collate(rows, task))
    optimizer = torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=2e-4, betas=(0.9, 0.95))

    def batches():
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def update():
        for _ in range(given["accumulate"]):
            ids, frames, real, text, codes = next(stream)
            text_logits, logits = called(ids, frames, real)
            loss = F.cross_entropy(text_logits.flatten(0, 1), text.flatten(), ignore_index=IGNORED)
            for book in range(task.stream.codebooks):
                own = codes[..., book].flatten()
                loss = loss + F.cross_entropy(logits[..., book, :].flatten(0, 1), own, ignore_index=IGNORED) / 8
            (loss / given["accumulate"]).backward()
            loss.item()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    stream, times = batches(), []
    for _ in range(given["steps"]):
        began = time.perf_counter()
        update()
        times.append(time.perf_counter() - began)
    with reductions() as counted:
        update()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    made = {"times": times, "memory": peak, **READS, **counted}
    Path(given["out"], f"rank-{rank}.json").write_text(json.dumps(made))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
