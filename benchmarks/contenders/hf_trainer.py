"""Hugging Face Trainer, with its defaults."""

import os

from common import ACCUMULATE, BATCH, BETAS, CLIP, FOLDER, LR, STEPS, Rows, model
from transformers import Trainer, TrainingArguments


def main():
    arguments = TrainingArguments(
        output_dir=FOLDER / "out", use_cpu=True, max_steps=STEPS, gradient_accumulation_steps=ACCUMULATE,
        per_device_train_batch_size=BATCH // ACCUMULATE // int(os.environ.get("WORLD_SIZE", "1")), learning_rate=LR,
        lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=BETAS[0], adam_beta2=BETAS[1],
        max_grad_norm=CLIP, optim="adamw_torch_fused", train_sampling_strategy="sequential", save_strategy="no",
        report_to="none",
    )  # fmt: skip
    Trainer(model(), arguments, train_dataset=Rows()).train()


if __name__ == "__main__":
    main()
