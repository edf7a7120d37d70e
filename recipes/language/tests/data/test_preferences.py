"""Preferences: the loss of pairs is that of DPO, its reference is computed once, and a run learns to prefer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unisono
from recipes.language.tests.chats import (
    CHATML,
    PREFERENCES,
    change,
    chat_model,
    chat_task,
    preference_task,
    user,
    write_rows,
)
from recipes.language.tests.data.test_packed import gradients
from recipes.language.tests.kernels import distance
from recipes.language.tests.test_chat_runs import words
from unisono.cli import main
from unisono.recipe_tools import PromoteToDouble
from unisono.runtime.errors import ConfigError, DataError
from unisono.task import Context
from unisono_language.data import preferences
from unisono_language.generate import generate
from unisono_language.task import Language

BETA = 0.1
Row = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("base"), CHATML)


@pytest.fixture(scope="module")
def pairs(base: Path) -> Path:
    return write_rows(base / "pairs" / "a.jsonl", PREFERENCES)


def batch_of(task: Language) -> dict[str, Any]:
    rows = task.data()
    return task.collate([task.sample(rows[row], None) for row in range(len(rows))])  # type: ignore[arg-type]


# the loss -------------------------------------------------------------------------------------------------------------


def plain_loss(task: Language, base: Path, smoothing: float = 0.0) -> float:
    """The formula, token by token, without a batch, padding or anything kept."""
    from transformers import AutoModelForCausalLM

    model, reference = (AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64) for _ in range(2))
    change(model)
    total = 0.0
    for pair in (task.data()[row] for row in range(len(task.data()))):
        rewards = []
        for tokens in (pair.chosen, pair.rejected):
            ids = torch.tensor([[token if token >= 0 else ~token for token in tokens.tolist()]])
            with torch.no_grad(), PromoteToDouble():
                logs = [one(input_ids=ids).logits[0].log_softmax(-1) for one in (model, reference)]
            answer = [place for place, token in enumerate(tokens.tolist()) if token >= 0]
            p, r = (sum(float(log[place - 1, ids[0, place]]) for place in answer) for log in logs)
            rewards.append(BETA * (p - r))
        margin = rewards[0] - rewards[1]
        total += (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_the_formula_of_dpo(base: Path, pairs: Path, smoothing: float) -> None:
    task = preference_task(pairs, base, reference_precision="fp64", label_smoothing=smoothing)
    _, total = gradients(task, [batch_of(task)], change)
    assert total == pytest.approx(plain_loss(task, base, smoothing), rel=1e-12)
    assert abs(total / len(PREFERENCES) - np.log(2)) > 1e-3, "the model has changed since its reference"


def test_the_loss_and_its_gradients_are_those_of_trl(base: Path, pairs: Path, tmp_path: Path) -> None:
    """The loss to fp64, where what TRL computes in fp32 whatever the dtype is computed in fp64, too.

    Its gradients pass through a projection whose backward pass rounds to fp32 all the same.
    """
    pytest.importorskip("trl", reason="trl is not installed")
    from benchmarks.chat import trl_preference_loss

    task = preference_task(pairs, base, reference_precision="fp64")
    ours, total = gradients(task, [batch_of(task)], change)
    for exact, loss_tolerance, tolerance in ((True, 1e-13, 1e-6), (False, 1e-6, 1e-5)):
        loss, theirs = trl_preference_loss(PREFERENCES, base, tmp_path, change, BETA, exact)
        assert total / len(PREFERENCES) == pytest.approx(loss, rel=loss_tolerance)
        summed = {name: gradient * len(PREFERENCES) for name, gradient in theirs.items()}
        assert summed.keys() == ours.keys()
        assert distance(ours, summed) < tolerance


def test_pairs_in_one_batch_and_pairs_alone_are_the_same(base: Path, pairs: Path) -> None:
    task = preference_task(pairs, base, reference_precision="fp64")
    rows = [task.data()[row] for row in range(len(PREFERENCES))]
    together = gradients(task, [task.collate(rows)], change)
    alone = gradients(task, [task.collate([row]) for row in rows], change)
    assert distance(together[0], alone[0]) < 1e-12
    assert together[1] == pytest.approx(alone[1], rel=1e-13)


def test_a_model_that_is_its_reference_prefers_nothing(base: Path, pairs: Path) -> None:
    """The reference is what the model itself says, so the first loss of a run is log 2 and every margin 0."""
    task = preference_task(pairs, base)
    batch = batch_of(task)
    model = task.build().eval()
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    with torch.no_grad():
        outputs = task.outputs(model, tensors, Context(0, training=False))
        loss = task.loss(outputs, tensors, Context(0, training=False))
    assert float(loss.sums["preference"]) / len(PREFERENCES) == pytest.approx(np.log(2), abs=1e-5)
    assert float(loss.metrics["margin"][0]) == pytest.approx(0, abs=1e-3)
    assert task.counts(batch) == {"preference": len(PREFERENCES)}
    assert task.work(batch)["tokens"] == batch["real"].sum()
    columns = task.predictions(outputs, tensors)
    assert columns["chosen"] == pytest.approx(batch["reference"][:, 0], rel=1e-5)


# the rows -------------------------------------------------------------------------------------------------------------


def test_answers_are_counted_and_their_prompts_are_context(base: Path, pairs: Path) -> None:
    chosen = write_rows(base / "chosen.jsonl", [_as_conversation(row, "chosen") for row in PREFERENCES])
    rejected = write_rows(base / "rejected.jsonl", [_as_conversation(row, "rejected") for row in PREFERENCES])
    rows = preference_task(pairs, base).data()
    one, other = (chat_task(path, base).data() for path in (chosen, rejected))
    for row in range(len(PREFERENCES)):
        assert rows[row].chosen.tolist() == one[row].tolist()
        assert rows[row].rejected.tolist() == other[row].tolist()
    assert rows.lengths.tolist() == [len(one[row]) + len(other[row]) for row in range(len(PREFERENCES))]


def _as_conversation(row: Row, answer: str) -> Row:
    return {"prompt": row["prompt"], "completion": row[answer], **({"tools": row["tools"]} if "tools" in row else {})}


def test_whole_conversations_have_the_prompt_that_they_have_in_common(base: Path, pairs: Path, tmp_path: Path) -> None:
    whole = [
        {**row, "prompt": None, "chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]}
        for row in PREFERENCES
    ]
    found, expected = (preference_task(path, base).data() for path in (write_rows(tmp_path / "a.jsonl", whole), pairs))
    for row in range(len(PREFERENCES)):
        assert found[row].chosen.tolist() == expected[row].chosen.tolist()
        assert found[row].reference.tolist() == expected[row].reference.tolist()


def test_texts_are_pairs_too(base: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "the quick", "chosen": " fox", "rejected": " dog"}])
    pair = preference_task(path, base).data()[0]
    assert (pair.chosen >= 0).sum() < len(pair.chosen)
    assert pair.chosen[-1] == pair.rejected[-1] == 0  # the end token


def test_pairs_are_held_out_together_and_left_out_if_either_is_too_long(base: Path, pairs: Path) -> None:
    task = preference_task(pairs, base, held_out=0.4)
    held = task.held_out()
    assert held is not None
    assert (len(task.data()), len(held)) == (3, 2)
    longest = int(task.library.corpora[""].lengths.max())  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"1 of 5 pairs have more targets than task\.sequence"):
        preference_task(pairs, base, longest - 2).data()
    assert len(preference_task(pairs, base, longest - 2, too_long="leave_out").data()) == 4


# the reference --------------------------------------------------------------------------------------------------------


def test_the_reference_is_computed_once_for_a_model_and_its_pairs(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    compute = preferences._log_probabilities
    monkeypatch.setattr(
        preferences, "_log_probabilities", lambda store, *how: asked.append(how[1]) or compute(store, *how)
    )
    path = write_rows(tmp_path / "a.jsonl", PREFERENCES[:3])
    cache = tmp_path / "cache"
    first = preference_task(path, base, cache=cache).data()
    second = preference_task(path, base, cache=cache, held_out=0.4).data()
    assert asked == ["fp32"]
    assert first[0].reference.tolist() == second[0].reference.tolist()
    assert not np.allclose(first[0].reference, first[1].reference)
    exact = preference_task(path, base, cache=cache, reference_precision="fp64").data()
    assert asked == ["fp32", "fp64"]
    assert exact[0].reference == pytest.approx(first[0].reference, rel=1e-5)
    other = chat_model(tmp_path / "other", CHATML)
    torch.manual_seed(8)
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(other)).save_pretrained(other)
    assert preference_task(path, other, cache=cache).data()[0].reference[0] != first[0].reference[0]
    assert asked == ["fp32", "fp64", "fp32"]


# runs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_a_run_learns_to_prefer_and_can_be_asked(
    base: Path, pairs: Path, tmp_path: Path, adapter: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Margins of pairs are those whose mean an evaluation reports: times `data.beta`."""
    settings = words(base, pairs, **{"data": "preferences", "train.steps": 12, "run.name": f"dpo{adapter}"})
    if adapter:
        pytest.importorskip("peft", reason="peft is not installed")
        settings |= {"adapter": "lora", "adapter.rank": 8, "adapter.targets": ["*_proj", "lm_head"]}
    result = unisono.train("language", {**settings, "train.global_batch": 5})
    assert result.loss < 0.3 < np.log(2)
    out = tmp_path / "p.csv"
    assert main.main(["predict", str(result.folder), "rows=training", f"out={out}"]) == 0
    rows = list(unisono.open_source(out, key="out"))
    assert len(rows) == len(PREFERENCES)
    said = dict(line.split(": ") for line in capsys.readouterr().out.splitlines() if ": " in line)
    margins = [float(row["margin"]) for row in rows]
    assert np.mean(margins) == pytest.approx(float(said["margin"]), rel=1e-4)
    assert all(margin > 0 for margin in margins) and float(said["margin"]) > 0.5
    assert isinstance(generate(unisono.open_run(result.folder), "who sleeps?", tokens=3), str)


@pytest.mark.slow
def test_layouts_compute_the_same_on_pairs(base: Path, pairs: Path) -> None:
    settings = [
        "model=pretrained", f"model.path={base}", "data=preferences", f"data.path={pairs}",
        f"data.cache={base / 'cache'}", "data.held_out=0.2", "task.sequence=200", "train.global_batch=4",
    ]  # fmt: skip
    proved = unisono.prove("language", ["layouts=[ddp:2,fsdp:2]", "steps=2", *settings])
    assert proved.passed, proved


# refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": [user("a")], "chosen": None, "rejected": [user("b")]}, "a row needs chosen and rejected"),
        ({"prompt": None, "chosen": [user("a")], "rejected": [user("b")]}, "have no common beginning with answers"),
        ({"prompt": None, "chosen": [user("a")], "rejected": [user("a")]}, "have no common beginning with answers"),
        ({"prompt": "a", "chosen": "b", "rejected": [user("a")]}, "'chosen' is a text, not a list of messages"),
    ],
)
def test_a_row_that_is_no_pair_is_named(base: Path, tmp_path: Path, row: Row, reason: str) -> None:
    path = write_rows(tmp_path / "a.jsonl", [PREFERENCES[0], row])
    with pytest.raises(DataError, match=rf"a\.jsonl, conversation 2 \(from 1\): .*{reason}"):
        preference_task(path, base).data()


def test_what_pairs_cannot_be_combined_with_is_refused(base: Path, pairs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no data\.packing"):
        preference_task(pairs, base, packing={}).check()
    with pytest.raises(ConfigError, match="is not prepared in advance"):
        preference_task(pairs, base).preparation()
    columns = write_rows(tmp_path / "b.jsonl", [{"messages": [user("a")]}])
    with pytest.raises(DataError, match="a row of preferences needs chosen and rejected"):
        preference_task(columns, base).data()
    gone = preference_task(pairs, base)
    gone.model_config = gone.model_config.model_copy(update={"path": tmp_path})
    gone.__dict__["library"] = preference_task(pairs, base).library
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors, so the reference of the preferences"):
        gone.data()
