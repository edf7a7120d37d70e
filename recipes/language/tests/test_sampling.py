"""Generation is that of transformers: greedy, sampled at a seed, stopped at a text, in batches, and as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unisono
from recipes.language.tests.chats import CHATML, chat_model, user, write_rows
from unisono.cli import main
from unisono.runtime.errors import RunError
from unisono_language.generate import generate

PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, which never ends a text by itself."""
    return chat_model(tmp_path_factory.mktemp("model"), CHATML)


def theirs(folder: Path, prompt: str, chat: bool, tokens: int, seed: int = 0, **how: Any) -> str:
    """What transformers writes, alone."""
    found, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    if "stop_strings" in how:
        how["tokenizer"] = tokenizer
    ids, ends = ids_of(folder, prompt, chat), [0, 2] if chat else [0]  # an answer also ends with its turn
    inputs = torch.tensor([ids])
    written = found.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        eos_token_id=ends,
        pad_token_id=0,
        **how,
    )
    return str(tokenizer.decode(written[0, len(ids) :].tolist(), skip_special_tokens=True))


def ids_of(folder: Path, prompt: str, chat: bool) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat:
        return list(tokenizer.apply_chat_template([user(prompt)], add_generation_prompt=True)["input_ids"])
    return [0, *tokenizer(prompt)["input_ids"]]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize(
    ("ours", "library"),
    [
        ({}, {"do_sample": False}),
        ({"temperature": 1.3, "seed": 4}, {"do_sample": True, "temperature": 1.3, "top_k": 0}),
        ({"temperature": 2.0, "top_k": 5}, {"do_sample": True, "temperature": 2.0, "top_k": 5}),
        ({"temperature": 2.0, "top_p": 0.4}, {"do_sample": True, "temperature": 2.0, "top_k": 0, "top_p": 0.4}),
    ],
    ids=["greedy", "temperature", "top-k", "top-p"],
)
def test_a_text_is_what_transformers_writes(
    model: Path, chat: bool, ours: dict[str, Any], library: dict[str, Any]
) -> None:
    expected = theirs(model, PROMPT, chat, 24, ours.get("seed", 0), **library)
    found = generate(unisono.open_run(model), PROMPT, tokens=24, chat=chat, device="cpu", **ours)
    assert found == (expected if chat else PROMPT + expected)
    assert len(expected) > 10


def test_settings_of_sampling_change_the_text(model: Path) -> None:
    opened = unisono.open_run(model)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 2.0, "seed": 1},
        {"temperature": 2.0, "top_k": 2}, {"temperature": 2.0, "top_p": 0.05},
    ]  # fmt: skip
    assert len({generate(opened, PROMPT, tokens=24, device="cpu", **how) for how in ways}) == len(ways)


def test_a_text_ends_before_what_it_is_to_stop_at(model: Path) -> None:
    """As transformers' stop_strings, which keep the text that they stop at; a prompt may have it."""
    opened = unisono.open_run(model)
    whole = generate(opened, PROMPT, tokens=30, chat=True, device="cpu")
    assert isinstance(whole, str)
    stop = whole[9:11]
    library = theirs(model, PROMPT, True, 30, do_sample=False, stop_strings=[stop])
    found = generate(opened, PROMPT, tokens=30, chat=True, stop=[stop, "never"], device="cpu")
    assert found == whole[: whole.index(stop)] == library[: library.index(stop)]
    assert len(library) < len(whole)
    assert generate(opened, PROMPT, tokens=5, chat=False, stop="quick", device="cpu") != "the "


def test_texts_of_a_file_are_those_of_each_prompt_in_any_batch(model: Path, tmp_path: Path) -> None:
    prompts = ["a", "the quick brown fox jumps over it", "what is it?"]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": prompt} for prompt in prompts])
    opened = unisono.open_run(model)
    alone = [generate(opened, prompt, tokens=12, device="cpu") for prompt in prompts]
    assert len(set(alone)) == 3
    for batch in (1, 2, 3):
        rows = generate(opened, f"@{path}", tokens=12, batch=batch, device="cpu")
        assert [json.loads(row) for row in rows or []] == [
            {"prompt": prompt, "text": text} for prompt, text in zip(prompts, alone, strict=True)
        ]


@pytest.mark.parametrize("stop", [None, "stop"])
def test_a_streamed_text_is_the_text(model: Path, capsys: pytest.CaptureFixture[str], stop: str | None) -> None:
    """Whatever its pieces are; some tokens are parts of a character, and some a part of what to stop at."""
    whole = generate(unisono.open_run(model), PROMPT, tokens=40, device="cpu")
    assert isinstance(whole, str)
    stops = [] if stop is None else [f"stop={whole[12:15]}"]
    for words in ([], ["chat=false"]):
        asked = ["generate", str(model), PROMPT, "tokens=40", "device=cpu", *words, *stops]
        assert main.main(asked) == 0
        at_once = capsys.readouterr().out
        assert main.main([*asked, "stream=true"]) == 0
        assert capsys.readouterr().out == at_once
        assert len(at_once) > 5


def test_a_stream_has_several_pieces(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr("unisono_language.generate.say", lambda text="", end="\n", **_: pieces.append(text + end))
    assert generate(unisono.open_run(model), PROMPT, tokens=20, device="cpu", stream=True) is None
    assert len(pieces) > 5
    assert "".join(pieces) == f"{generate(unisono.open_run(model), PROMPT, tokens=20, device='cpu')}\n"


# refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"top_k": 5}, "temperature=0 samples none"),
        ({"top_p": 0.5}, "temperature=0 samples none"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1 is negative"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0 is not a probability above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5 is not a probability"),
        ({"batch": 0}, "batch=0"),
        ({"stop": ""}, "an empty text would stop before the first token"),
        ({"prompt": "@/nowhere.jsonl"}, "cannot be read as a file of prompts"),
    ],
)
def test_settings_that_mean_nothing_are_refused(model: Path, how: dict[str, Any], reason: str) -> None:
    with pytest.raises(RunError, match=reason):
        generate(unisono.open_run(model), **{"prompt": "a", **how})


def test_lines_that_are_no_prompts_are_named(model: Path, tmp_path: Path) -> None:
    opened, path = unisono.open_run(model), tmp_path / "a.jsonl"
    for line, reason in (("{", "line 2"), ('{"text": "a"}', "'prompt' is missing"), ('{"prompt": []}', "empty list")):
        path.write_text('{"prompt": "a"}\n' + line + "\n")
        with pytest.raises(RunError, match=rf"a\.jsonl, line 2: .*{reason if reason != 'line 2' else ''}"):
            generate(opened, f"@{path}")
    path.write_text("")
    with pytest.raises(RunError, match="has no prompts"):
        generate(opened, f"@{path}")
    write_rows(path, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(RunError, match="stream=true prints one text"):
        generate(opened, f"@{path}", stream=True)
    write_rows(path, [{"messages": [user("a")]}])
    with pytest.raises(RunError, match="a prompt of messages needs a chat template"):
        generate(opened, f"@{path}", chat=False)
