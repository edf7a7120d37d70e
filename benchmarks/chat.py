"""Conversations and preferences beside TRL: the same labels, the same loss, and how long tokenising takes.

    pip install trl
    python -m benchmarks.chat [--conversations 2000] [--templates]

Conversations are made up, with several turns, system prompts and tools. `--templates` also compares the templates that
TRL ships for training, which mark the assistant's tokens, for every family of models that it knows.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from recipes.language.tests.chats import (
    CHATML,
    CONVERSATIONS,
    MARKED,
    PAIRS,
    PREFERENCES,
    assistant,
    change,
    chat_model,
    preference_task,
    user,
    write_rows,
)
from recipes.language.tests.data.test_packed import gradients
from recipes.language.tests.kernels import distance
from unisono.recipe_tools import PromoteToDouble
from unisono_language.data.chat import ChatTemplate
from unisono_language.data.conversations import Conversations, parse_conversation
from unisono_language.data.tokenizer import load_tokenizer
from unisono_language.data.tokens import TokenStore, load_tokens
from unisono_language.settings import ConversationFiles

Row = dict[str, Any]


def trl_rows(
    rows: Sequence[Row], model: Path, folder: Path, asked: dict[str, Any], template: str | None = None
) -> list[list[int]]:
    """Conversations as TRL's trainer prepares them, the complement of tokens that it does not count.

    Tools are JSON, as TRL asks for them, since a data set would fill the schemas of all rows with each other's keys.
    """
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    logging.getLogger("trl").setLevel(logging.ERROR)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if template is not None:
        tokenizer.chat_template = template
    tools = any("tools" in row for row in rows)
    data = [{**row, **({"tools": json.dumps(row.get("tools"))} if tools else {})} for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = SFTConfig(str(folder), use_cpu=True, report_to=[], max_length=None, bf16=False, **asked)
        trainer = SFTTrainer(
            AutoModelForCausalLM.from_pretrained(model), settings, train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
        )  # fmt: skip
    return [
        [token if label != -100 else ~token for token, label in zip(row["input_ids"], row["labels"], strict=True)]
        for row in trainer.train_dataset
    ]


def trl_preference_loss(
    rows: Sequence[Row], model: Path, folder: Path, change: Callable[[Any], None], beta: float, exact: bool
) -> tuple[float, dict[str, np.ndarray]]:
    """TRL's loss of pairs in one batch, and its gradients, of a model in fp64 that has changed since its reference.

    With `exact`, what TRL and the model compute in fp32 whatever the dtype is computed in fp64, too.
    """
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    disable_progress_bars()
    trained, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64) for _ in range(2))
    change(trained)
    tools = any("tools" in row for row in rows)
    data = [{**row, **({"tools": json.dumps(row.get("tools"))} if tools else {})} for row in rows]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = DPOConfig(
            str(folder), use_cpu=True, report_to=[], max_length=None, bf16=False, beta=beta,
            gradient_checkpointing=False,
        )  # fmt: skip
        trainer = DPOTrainer(
            trained, reference, settings, train_dataset=Dataset.from_list(data),
            processing_class=AutoTokenizer.from_pretrained(model),
        )  # fmt: skip
        batch = trainer.data_collator([trainer.train_dataset[number] for number in range(len(data))])
        with PromoteToDouble() if exact else nullcontext():
            loss = trainer.compute_loss(trainer.model, batch)
            loss.backward()
    return float(loss.detach()), {name: value.grad.numpy() for name, value in trainer.model.named_parameters()}


def make_conversations(count: int, seed: int = 1) -> list[Row]:
    """Conversations of 1 to 6 turns, of words that are made up."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 8))) for _ in range(500)]

    def text() -> str:
        return " ".join(rng.choice(words, size=rng.integers(3, 60)))

    rows = []
    for _ in range(count):
        turns = [turn for _ in range(rng.integers(1, 7)) for turn in (user(text()), assistant(text()))]
        rows.append({"messages": [*([{"role": "system", "content": text()}] if rng.random() < 0.5 else []), *turns]})
    return rows


def our_rows(rows: Sequence[Row], model: Path, loss_on: str, template: str | None, folder: Path) -> list[list[int]]:
    """Conversations as this recipe prepares them."""
    path = None
    if template is not None:
        path = folder / "template.jinja"
        path.write_text(template)
    chat, tokenizer = ChatTemplate.from_tokenizer(model, path, {}, loss_on), load_tokenizer(model)
    return [chat.encode(parse_conversation(row), tokenizer).tolist() for row in rows]


def compare_templates(folder: Path, model: Path) -> None:
    """Every template for training that TRL ships."""
    import trl

    equal, others = [], {}
    for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*_training.jinja")):
        name, template = path.name.removesuffix("_training.jinja"), path.read_text()
        rows = [CONVERSATIONS[0], {"messages": CONVERSATIONS[1]["messages"][1:]}]
        try:
            theirs: Any = trl_rows(rows, model, folder / "trl", {"assistant_only_loss": True}, template)
        except Exception as error:
            theirs = f"TRL: {str(error)[:90]}"
        try:
            ours: Any = our_rows(rows, model, "assistant", template, folder)
        except ValueError as error:
            ours = f"refused: {str(error)[:90]}"
        if ours == theirs:
            equal.append(name)
        else:
            shown = (what if isinstance(what, str) else "labels" for what in (ours, theirs))
            others[name] = " | ".join(shown)
    print(f"templates that TRL ships for training: {len(equal)} of {len(equal) + len(others)} give equal labels")
    for name, what in others.items():
        print(f"  {name}: {what}")


def compare_preferences(folder: Path, model: Path) -> None:
    """The loss of pairs and its gradients, of a model that has changed since its reference."""
    task = preference_task(write_rows(folder / "pairs.jsonl", PREFERENCES), model, reference_precision="fp64")
    rows = [task.data()[row] for row in range(len(PREFERENCES))]
    ours, total = gradients(task, [task.collate(rows)], change)
    print("\n| DPO, 5 pairs | TRL's loss | difference | of gradients |\n|---|---|---|---|")
    for exact, what in ((True, "fp64 throughout"), (False, "TRL as it is, model in fp64")):
        loss, theirs = trl_preference_loss(PREFERENCES, model, folder / "dpo", change, 0.1, exact)
        off = distance(ours, {name: len(rows) * gradient for name, gradient in theirs.items()})
        print(f"| {what} | {loss:.12f} | {abs(total / len(rows) - loss):.1e} | {off:.1e} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--templates", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        marked, chatml = chat_model(folder / "marked", MARKED), chat_model(folder / "chatml", CHATML)
        made = make_conversations(arguments.conversations)
        print(f"trl {version('trl')}, transformers {version('transformers')}\n")
        print("| conversations | template | loss on | TRL | equal rows | tokens | counted |")
        print("|---|---|---|---|---|---|---|")
        for rows, model, loss_on, asked, what in (
            (made, marked, "assistant", {"assistant_only_loss": True}, "messages"),
            (CONVERSATIONS, marked, "assistant", {"assistant_only_loss": True}, "messages, tools, scripts"),
            (PAIRS, marked, "assistant", {"assistant_only_loss": True}, "prompt and completion"),
            (PAIRS, marked, "completion", {}, "prompt and completion"),
            (PAIRS, chatml, "assistant", {}, "prompt and completion"),
            (made, chatml, "all", {}, "messages"),
        ):
            theirs = trl_rows(rows, model, folder / "trl", asked)
            ours = our_rows(rows, model, loss_on, None, folder)
            equal = sum(one == other for one, other in zip(ours, theirs, strict=True))
            tokens, counted = sum(map(len, ours)), sum(token >= 0 for row in ours for token in row)
            asks = ", ".join(f"{key}={value}" for key, value in asked.items()) or "its defaults"
            print(
                f"| {len(rows)}, {what} | {'marks' if model == marked else 'no marks'} | {loss_on} | {asks} | "
                f"{equal} of {len(rows)} | {tokens:,} | {counted:,} |",
                flush=True,
            )
        path = write_rows(folder / "made" / "a.jsonl", made)
        print("\n| tokenising | conversations/s |\n|---|---|")
        for model, what in ((marked, "marks"), (chatml, "no marks")):
            chat, tokenizer = ChatTemplate.from_tokenizer(model, None, {}, "assistant"), load_tokenizer(model)
            began = perf_counter()
            store: TokenStore = load_tokens(
                Conversations.from_files(ConversationFiles(path=str(path))), tokenizer, folder / what, chat
            )
            print(f"| unisono, into shards, template with {what} | {len(store) / (perf_counter() - began):,.0f} |")
        began = perf_counter()
        trl_rows(made, marked, folder / "trl2", {"assistant_only_loss": True})
        print(f"| TRL, template with marks | {len(made) / (perf_counter() - began):,.0f} |")
        compare_preferences(folder, chatml)
        if arguments.templates:
            print()
            compare_templates(folder, marked)


if __name__ == "__main__":
    main()
