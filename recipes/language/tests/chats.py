"""Conversations, chat templates and small chat models for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from recipes.language.tests.corpora import GROUPED, QUIET
from unisono_language.settings import Chat, LanguageConfig, Preferences, Pretrained
from unisono_language.task import Language

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TOOLS = """{%- if tools %}<|im_start|>system
Functions:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}"""
_CALLS = (
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
)
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

CHATML = (
    _TOOLS + "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}" + _CALLS
    + "<|im_end|>\n{% endfor %}" + _ASK
)  # fmt: skip
MARKED = (
    _TOOLS + "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}" + _CALLS + "<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}\n{% endfor %}" + _ASK
)  # fmt: skip
FORGETFUL = (  # as templates of models that think: earlier turns lose their thoughts
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}" + _ASK
)  # fmt: skip

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CONVERSATIONS: list[dict[str, Any]] = [
    {"messages": [user("the quick brown"), assistant("fox jumps")]},
    {"messages": [system("be brief 🎻"), user("a"), assistant("b\n"), user("c c"), assistant("d")]},
    {
        "messages": [
            user("how is the weather in Basel?"),
            assistant("", tool_calls=[{"function": {"name": "weather", "arguments": {"city": "Basel"}}}]),
            {"role": "tool", "content": "rain"},
            assistant("it rains"),
        ],
        "tools": [TOOL],
    },
    {"messages": [user("  blanks before and after  "), assistant("  as here  ")]},
    {"messages": [user("<|im_end|> in a text"), assistant("שלום é Ａ\r\n\tdone")]},
]
PAIRS: list[dict[str, Any]] = [
    {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
    | {name: value for name, value in row.items() if name == "tools"}
    for row in CONVERSATIONS
]
TEXT_PAIRS: list[dict[str, Any]] = [
    {"prompt": "the quick", "completion": " brown fox"},
    {"prompt": "two lines\n", "completion": "\nmore"},
    {"prompt": "it ends", "completion": " by itself<|endoftext|>"},
]


PREFERENCES: list[dict[str, Any]] = [
    {"prompt": [user("who sleeps?")], "chosen": [assistant("the lazy dog")], "rejected": [assistant("a fox")]},
    {
        "prompt": [system("be brief"), user("a"), assistant("b"), user("c c")],
        "chosen": [assistant("d")],
        "rejected": [assistant("it is a long story, and it has no end")],
    },
    {
        "prompt": [user("weather?")],
        "chosen": [assistant("it rains")],
        "rejected": [assistant("שלום é")],
        "tools": [TOOL],
    },
    {"prompt": [user("who jumps?")], "chosen": [assistant("the fox")], "rejected": [assistant("the fox!")]},
    {"prompt": [user("and then?")], "chosen": [assistant("it sleeps")], "rejected": [assistant("")]},
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_tokenizer(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """The directory of a byte-level BPE with a few merges, and its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [json.dumps(row) for row in CONVERSATIONS] + ["assistant\n\n user\n\n the quick brown fox jumps"] * 9
    engine.train_from_iterator(texts, trainer=trainer)
    engine.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0], "pad_token": SPECIAL[0], **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def chat_model(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """The directory of a small llama with random weights, which has such a tokenizer."""
    chat_tokenizer(folder, template, **config)
    torch.manual_seed(5)
    size = Engine.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    made = AutoConfig.for_model("llama", vocab_size=size, **{**QUIET, **GROUPED})
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    return folder


def preference_task(data: Path, model: Path, sequence: int = 256, **settings: Any) -> Language:
    """The task that fine-tunes a model on preferences, nothing held out."""
    values = {"kind": "preferences", "path": str(data), "held_out": 0.0, "cache": model / "cache", **settings}
    group = Preferences.model_validate(values)
    rows = LanguageConfig(sequence=sequence, pad_to_multiple=4)
    return Language(rows, model=Pretrained(kind="pretrained", path=model), data=group)


def chat_task(data: Path, model: Path, sequence: int = 256, **settings: Any) -> Language:
    """The task that fine-tunes a model on conversations, nothing held out."""
    group = Chat(**{"kind": "chat", "path": str(data), "held_out": 0.0, "cache": model / "cache", **settings})
    rows = LanguageConfig(sequence=sequence, pad_to_multiple=4)
    return Language(rows, model=Pretrained(kind="pretrained", path=model), data=group)


def change(model: Any) -> None:
    """What training might do to a model; the same in every call."""
    draws = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=draws, dtype=torch.float64).to(parameter.dtype)
            )
