"""Conversations as tokens: what the loss counts of them, and which of them nobody could mark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer as Engine
from transformers import AutoTokenizer

from recipes.language.tests.chats import (
    CHATML,
    CONVERSATIONS,
    FORGETFUL,
    MARKED,
    PAIRS,
    TEXT_PAIRS,
    TOOL,
    assistant,
    chat_model,
    chat_task,
    chat_tokenizer,
    user,
    write_rows,
)
from unisono.runtime.errors import ConfigError, DataError
from unisono_language.data.chat import ChatTemplate
from unisono_language.data.conversations import parse_conversation
from unisono_language.data.tokenizer import load_tokenizer
from unisono_language.settings import Chat
from unisono_language.task import IGNORED, Language

Row = dict[str, Any]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("marked"), MARKED)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chatml"), CHATML)


def encoder(folder: Path, loss_on: str = "assistant", template: Path | None = None, **settings: Any) -> Any:
    """A function from a row to its tokens, by the template of a directory."""
    chat, tokenizer = ChatTemplate.from_tokenizer(folder, template, settings, loss_on), load_tokenizer(folder)
    return lambda row: chat.encode(parse_conversation(row), tokenizer)


def counted_text(folder: Path, tokens: np.ndarray) -> str:
    """What the loss counts, as text."""
    engine = Engine.from_file(str(folder / "tokenizer.json"))
    return str(engine.decode(tokens[tokens >= 0].tolist(), skip_special_tokens=False))


def all_ids(tokens: np.ndarray) -> list[int]:
    return [int(token) if token >= 0 else ~int(token) for token in tokens]


# what is counted ------------------------------------------------------------------------------------------------------


def test_tokens_and_marks_are_those_of_transformers(marked: Path) -> None:
    """Its own mask of the assistant's tokens, which TRL uses, on several turns, system prompts, tools and scripts."""
    tokenizer, encode = AutoTokenizer.from_pretrained(marked), encoder(marked)
    for row in CONVERSATIONS:
        theirs = tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        ours = encode(row)
        assert all_ids(ours) == theirs["input_ids"]
        assert (ours >= 0).astype(int).tolist() == theirs["assistant_masks"]
        assert 0 < (ours >= 0).sum() < len(ours)


def test_a_template_without_marks_is_marked_where_turns_begin_and_end(chatml: Path) -> None:
    encode = encoder(chatml)
    found = [counted_text(chatml, encode(row)) for row in CONVERSATIONS]
    assert found[0] == "fox jumps<|im_end|>\n"
    assert found[1] == "b\n<|im_end|>\nd<|im_end|>\n"
    assert found[2] == '<tool_call>weather {"city": "Basel"}</tool_call><|im_end|>\nit rains<|im_end|>\n'
    assert found[3] == "  as here  <|im_end|>\n"


def test_of_prompt_and_completion_only_the_completion_counts(chatml: Path, marked: Path) -> None:
    for folder, end in ((chatml, "<|im_end|>\n"), (marked, "<|im_end|>")):
        for loss_on in ("assistant", "completion"):
            encode = encoder(folder, loss_on)
            assert counted_text(folder, encode(PAIRS[1])) == f"d{end}"  # and not its first answer
            assert counted_text(folder, encode(PAIRS[2])) == f"it rains{end}"


def test_texts_are_completed_up_to_the_end_token_and_every_token_can_count(chatml: Path) -> None:
    encode = encoder(chatml)
    assert counted_text(chatml, encode(TEXT_PAIRS[0])) == " brown fox<|endoftext|>"
    assert counted_text(chatml, encode(TEXT_PAIRS[2])) == " by itself<|endoftext|>"
    for row in (CONVERSATIONS[1], TEXT_PAIRS[0]):
        assert (encoder(chatml, "all")(row) >= 0).all()


def test_tools_and_the_templates_settings_reach_the_template(chatml: Path, tmp_path: Path) -> None:
    assert "weather" not in str(CONVERSATIONS[0])
    with_tools = {**CONVERSATIONS[0], "tools": [TOOL]}
    assert len(encoder(chatml)(with_tools)) > len(encoder(chatml)(CONVERSATIONS[0])) + 20
    template = tmp_path / "own.jinja"
    template.write_text("{{ style }}: " + CHATML)
    engine = Engine.from_file(str(chatml / "tokenizer.json"))

    def begin(row: Row, **settings: Any) -> str:
        return str(engine.decode(all_ids(encoder(chatml, "assistant", template, **settings)(row)))).split(":")[0]

    assert begin(CONVERSATIONS[0], style="short") == "short"
    assert begin({**CONVERSATIONS[0], "chat_template_kwargs": {"style": "long"}}, style="short") == "long"


def test_files_of_one_schema_for_all_rows_give_the_same_tokens(chatml: Path, tmp_path: Path) -> None:
    """Parquet writes a null where a message has no such key; JSON need not have the key at all."""
    lines = write_rows(tmp_path / "a.jsonl", CONVERSATIONS)
    table = pa.Table.from_pylist(CONVERSATIONS, schema=pa.Table.from_pylist(CONVERSATIONS[2:3]).schema)
    assert "tool_calls" in table["messages"][0].as_py()[0]
    pq.write_table(table, tmp_path / "a.parquet")
    rows = [chat_task(path, chatml).data() for path in (lines, tmp_path / "a.parquet")]
    assert len(rows[0]) == len(rows[1]) == len(CONVERSATIONS)
    for number in range(len(CONVERSATIONS)):
        assert rows[0][number].tolist() == rows[1][number].tolist()


def test_labels_are_those_of_trl(marked: Path, chatml: Path, tmp_path: Path) -> None:
    """Token for token; where this tokenizer's template has no marks, on what TRL itself can mark."""
    peer = pytest.importorskip("benchmarks.chat").trl_rows
    pytest.importorskip("trl", reason="trl is not installed")
    for folder, rows, loss_on, asked in (
        (marked, CONVERSATIONS, "assistant", {"assistant_only_loss": True}),
        (marked, PAIRS, "assistant", {"assistant_only_loss": True}),
        (marked, PAIRS, "completion", {}),
        (chatml, PAIRS, "assistant", {}),
        (chatml, PAIRS, "completion", {}),
        (chatml, CONVERSATIONS, "all", {}),
        (chatml, TEXT_PAIRS, "assistant", {}),
    ):
        theirs = peer(rows, folder, tmp_path / "trl", asked)
        ours = [encoder(folder, loss_on)(row).tolist() for row in rows]
        assert ours == theirs, (folder.name, loss_on)


# what the model gets --------------------------------------------------------------------------------------------------


def test_only_counted_tokens_are_targets_and_context_is_no_padding(chatml: Path, tmp_path: Path) -> None:
    task = chat_task(write_rows(tmp_path / "a.jsonl", CONVERSATIONS[:2]), chatml)
    rows = task.data()
    batch = task.collate([rows[0], rows[1]])
    for number in range(2):
        ids, end = all_ids(rows[number]), len(rows[number]) - 1
        assert batch["inputs"][number, :end].tolist() == ids[:-1]
        expected = [token if token >= 0 else IGNORED for token in rows[number][1:].tolist()]
        assert batch["targets"][number, :end].tolist() == expected
        assert batch["real"][number].tolist() == [place < end for place in range(batch["real"].shape[1])]
    assert task.counts(batch)["next_token"] == sum((row[1:] >= 0).sum() for row in (rows[0], rows[1]))
    assert task.work(batch)["tokens"] == sum(len(row) - 1 for row in (rows[0], rows[1]))
    assert task.facts()["targets"] == task.counts(batch)["next_token"]


# refused --------------------------------------------------------------------------------------------------------------


def test_a_template_that_rewrites_earlier_turns_is_refused_with_what_changes(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path, FORGETFUL)
    encode = encoder(folder)
    thoughtful = assistant("<think>hm</think>yes")
    assert counted_text(folder, encode({"messages": [user("a"), thoughtful]})) == "<think>hm</think>yes<|im_end|>\n"
    with pytest.raises(DataError, match=r"differently once the conversation continues \('<think>hm</think>yes"):
        encode({"messages": [user("a"), thoughtful, user("b"), assistant("c")]})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [assistant("hello"), user("a"), assistant("b")]}, "its first message is the assistant's"),
        ({"messages": [user("a")]}, "it has no message of the assistant"),
        ({"messages": []}, "'messages' is an empty list, not a list of messages"),
        ({"messages": "text"}, "'messages' is a text, not a list of messages"),
        ({"messages": [{"content": "a"}]}, r"message 0 \(from 0\) has no role"),
        ({"messages": [{"from": "human", "value": "a"}]}, "rename from and value to role and content"),
        ({"messages": [{"role": "user"}]}, "of the user is empty: it needs content"),
        ({"messages": ["a"]}, "is a text, not an object with role"),
        ({"messages": [user("a"), assistant("b")], "tools": "["}, "'tools' is not JSON"),
        ({"messages": [user("a"), assistant("b")], "tools": {"a": 1}}, "'tools' is an object, not a list"),
        ({"prompt": "a"}, "a row needs messages, or prompt and completion"),
        ({"prompt": "a", "completion": [assistant("b")]}, "'prompt' is a text, not a list of messages"),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, "its prompt is a text, which no chat template reads"),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_its_file(
    chatml: Path, tmp_path: Path, row: Row, reason: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [CONVERSATIONS[0] if "messages" in row else TEXT_PAIRS[0], row])
    with pytest.raises(DataError, match=rf"a\.jsonl, conversation 2 \(from 1\): .*{reason}"):
        chat_task(path, chatml).data()


def test_columns_that_are_no_conversations_are_refused(chatml: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"conversations": [{"from": "human", "value": "a"}]}])
    with pytest.raises(DataError, match=r"has the columns conversations; a row needs messages.*rename conversations"):
        chat_task(path, chatml).data()


def test_messages_without_a_template_or_a_tokenizer_are_refused(chatml: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CONVERSATIONS)
    with pytest.raises(DataError, match=r"which this tokenizer does not have; give one in data\.chat_template=FILE"):
        chat_task(path, chat_model(tmp_path / "bare", None)).data()
    texts = write_rows(tmp_path / "texts.jsonl", TEXT_PAIRS)
    assert len(chat_task(texts, chat_model(tmp_path / "bare", None)).data()) == len(TEXT_PAIRS)
    alone = Language(model={"kind": "config"}, data=Chat(kind="chat", path=str(path)))
    alone.model_config = type("model", (), {})()
    with pytest.raises(ConfigError, match="data=chat needs a tokenizer with a chat template"):
        alone.data()


def test_a_template_with_a_fault_is_refused_before_any_row(chatml: Path, tmp_path: Path) -> None:
    path, template = write_rows(tmp_path / "a.jsonl", CONVERSATIONS), tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}")
    with pytest.raises(ConfigError, match=r"the chat template of .*own\.jinja cannot be used"):
        chat_task(path, chatml, chat_template=template).data()


def test_a_template_that_writes_the_date_is_refused_until_the_date_is_set(chatml: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% if not date %}{% set date = strftime_now('%d') %}{% endif %}{{ date }} " + CHATML)
    with pytest.raises(DataError, match="writes today's date, so its tokens would depend on the day"):
        encoder(chatml, "assistant", template)(CONVERSATIONS[0])
    assert len(encoder(chatml, "assistant", template, date="1 May")(CONVERSATIONS[0])) > 10


def test_conversations_that_are_too_long_stop_are_cut_or_are_left_out(chatml: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CONVERSATIONS)
    lengths = [len(encoder(chatml)(row)) - 1 for row in CONVERSATIONS]
    room = sorted(lengths)[2]
    long = sum(length > room for length in lengths)
    assert 0 < long < 5
    with pytest.raises(DataError, match=rf"{long} of 5 conversations have more targets than task\.sequence={room}"):
        chat_task(path, chatml, room).data()
    cut = chat_task(path, chatml, room, too_long="cut").data()
    assert cut.lengths.tolist() == [min(length, room) for length in lengths]
    assert all(len(cut[row]) == min(lengths[row], room) + 1 for row in range(5))
    without = chat_task(path, chatml, room, too_long="leave_out").data()
    assert without.lengths.tolist() == [length for length in lengths if length <= room]
    assert len({cut.fingerprint, without.fingerprint, chat_task(path, chatml).data().fingerprint}) == 3
    with pytest.raises(DataError, match="leaves none"):
        chat_task(path, chatml, 2, too_long="leave_out").data()


def test_packing_that_cuts_conversations_is_refused(chatml: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", CONVERSATIONS)
    with pytest.raises(ConfigError, match="method=concatenate cuts conversations"):
        chat_task(path, chatml, packing={"method": "concatenate"}).check()
    with pytest.raises(DataError, match="have more targets than"):
        chat_task(path, chatml, packing={"length": 30}).data()


def test_a_conversation_is_hashed_with_its_marks(chatml: Path, tmp_path: Path) -> None:
    """The same tokens with other marks are other data, in the cache and in a run's record of its files."""
    path = write_rows(tmp_path / "a.jsonl", PAIRS)
    tasks = [chat_task(path, chatml, loss_on=loss_on) for loss_on in ("assistant", "all")]
    rows = [task.data() for task in tasks]
    assert all_ids(rows[0][1]) == all_ids(rows[1][1])
    assert rows[0].fingerprint != rows[1].fingerprint
    assert ChatTemplate.from_json(tasks[0].chat.describe, "here") == tasks[0].chat
    with pytest.raises(DataError, match="the chat template cannot be read"):
        ChatTemplate.from_json({"source": 3}, "here")
