"""The Trainer of transformers, on a small language model with labels of uneven counts."""

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from unisono.proof import TransformersCallback

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--local_tokens", action="store_true")
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--padded", action="store_true")
args = parser.parse_args()
set_seed(3)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        words = torch.randint(40, (12,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": words, "labels": torch.where(torch.arange(12) < 3 + i % 8, words, -100)}


class Evaluating(Trainer):
    """Evaluates by itself, as trainers do that generate: the loss of each row, gathered."""

    def evaluate(self, *_, **__):
        gather = self.accelerator.gather if args.padded else self.accelerator.gather_for_metrics
        losses = []
        self.model.eval()
        for batch in self.get_eval_dataloader():
            with torch.no_grad():
                logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1].transpose(1, 2)
            each = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:], reduction="none")
            losses.append(gather(each.sum(1)))
        metrics = {"eval_loss": float(torch.cat(losses).mean())}
        self.model.train()
        self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


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
        eval_strategy="epoch" if args.evaluate else "no", per_device_eval_batch_size=args.per_device_train_batch_size,
    )  # fmt: skip
    seen = torch.utils.data.Subset(Texts(), range(11)) if args.evaluate else None
    trainer = Evaluating if args.evaluate else Trainer
    callbacks = [TransformersCallback()] if args.evaluate else []
    trainer(LlamaForCausalLM(config), training, train_dataset=Texts(), eval_dataset=seen, callbacks=callbacks).train()
