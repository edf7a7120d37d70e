"""The Trainer of transformers, on a small language model with labels of uneven counts."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--local_tokens", action="store_true")
args = parser.parse_args()
set_seed(3)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = torch.randint(40, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": torch.where(torch.arange(12) < 3 + i % 8, words, -100)}


config = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
with tempfile.TemporaryDirectory() as folder:
    training = TrainingArguments(
        folder, use_cpu=True, max_steps=6, learning_rate=1e-3, report_to=[], save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=args.per_device_train_batch_size, logging_steps=100,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        average_tokens_across_devices=not args.local_tokens,
    )  # fmt: skip
    Trainer(LlamaForCausalLM(config), training, train_dataset=Texts()).train()
