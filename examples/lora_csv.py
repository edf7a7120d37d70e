"""LoRA on a CSV: a transformers model that stays as it is, with small matrices beside it that learn your labels.

pip install 'unisono[lora,export]'
python examples/lora_csv.py                        # writes reviews.csv and, for want of a download, a tiny model
unisono train examples/lora_csv.py adapter=lora adapter.rank=4 optim.lr=1e-2
unisono prove examples/lora_csv.py:Reviews adapter=lora

With a model of yours: task.model=FOLDER, as `save_pretrained` writes it, and its tokenizer in `sample`.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import unisono

GOOD, BAD = ["great", "lovely", "fine", "superb", "charming"], ["awful", "dull", "poor", "boring", "weak"]


class Reviews(unisono.Task):
    """Is a review good or bad?"""

    class Config(unisono.Settings):
        file: Path = Path("reviews.csv")
        model: Path = Path("tiny-bert")
        length: int = 32

    def setup(self):
        if not (self.config.model / "config.json").exists():
            raise unisono.ConfigError(
                f"task.model={self.config.model} is no model; python examples/lora_csv.py makes one"
            )
        rows = unisono.open_source(str(self.config.file), expect={"text": "string", "label": "string"})
        held_out = np.arange(len(rows)) % 5 == 0
        self.training = unisono.Subset(rows, np.flatnonzero(~held_out))
        self.rest = unisono.Subset(rows, np.flatnonzero(held_out))

    def data(self):
        return self.training

    def held_out(self):
        return self.rest

    def sample(self, record, context):  # a byte is a token, so that the example needs no tokenizer
        tokens = np.frombuffer(record["text"].encode()[: self.config.length], np.uint8)
        padded = np.pad(tokens.astype(np.int64), (0, self.config.length - len(tokens)))
        return {"tokens": padded, "mask": (padded > 0).astype(np.int64), "label": int(record["label"] == "good")}

    def build(self):
        from transformers import AutoModel

        return Classifier(AutoModel.from_pretrained(self.config.model, add_pooling_layer=False))

    def outputs(self, model, batch, context):
        return model(batch["tokens"], batch["mask"])

    def loss(self, logits, batch, context):
        total = F.cross_entropy(logits, batch["label"], reduction="sum")
        right = (logits.argmax(1) == batch["label"]).sum()
        return unisono.Loss({"row": total}, metrics={"accuracy": (right, len(logits))})


class Classifier(torch.nn.Module):
    """The mean of a model's last states, and a fixed head: what learns is inside of the model."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.lm_head = torch.nn.Linear(body.config.hidden_size, 2)  # a head gets no adapter, by its name

    def forward(self, tokens, mask):
        states = self.body(input_ids=tokens, attention_mask=mask).last_hidden_state
        mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.lm_head(mean)


def main() -> None:
    from transformers import BertConfig, BertModel

    rng = np.random.default_rng(0)
    words = [(rng.choice(GOOD if good else BAD), "good" if good else "bad") for good in rng.integers(0, 2, 400)]
    lines = [f"the film was {word},{label}" for word, label in words]
    Path("reviews.csv").write_text("\n".join(["text,label", *lines]) + "\n", "utf-8")
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=256, max_position_embeddings=64, **size, **quiet)
    BertModel(config, add_pooling_layer=False).save_pretrained("tiny-bert")


if __name__ == "__main__":
    main()
