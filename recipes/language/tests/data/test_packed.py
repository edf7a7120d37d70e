"""Documents that share a row: what the row holds, and that a model learns from it what it learns from each alone."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.language.tests.corpora import (
    ARCHITECTURES,
    WIDE,
    WIDE_MODELS,
    corpus,
    sentences,
    task,
    task_of,
    write_jsonl,
)
from recipes.language.tests.corpora import model as model_of
from recipes.language.tests.kernels import Gradients, distance
from unisono.config.schema.data import Packing
from unisono.data.order.order import Order
from unisono.data.order.packed_plan import PackedPlan, lookup_lengths
from unisono.engines.torch.numerics import precision as precisions
from unisono.runtime.errors import ConfigError
from unisono.task import Context, SampleContext
from unisono_language import kernels
from unisono_language.data import packed
from unisono_language.settings import Corpus, LanguageConfig
from unisono_language.task import IGNORED, Language

CAPACITY = 60
PACKED = Packing(chunk=20, open_bins=4)
MODELS: dict[str, dict[str, Any]] = {
    **WIDE_MODELS,
    "qwen3_moe": {**WIDE, "head_dim": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", sentences(60))
    return corpus(folder)


def language(data: Corpus, name: str = "llama", attention: str = "sdpa", **more: Any) -> Language:
    together = data.model_copy(update={"packing": PACKED})
    return task_of(together, name, MODELS[name], CAPACITY, attention=attention, **more)


def steps(task: Language, number: int = 1, **how: Any) -> list[list[list[np.ndarray]]]:
    """The documents, or pieces of them, in each row of each step, as a loader would make them."""
    source = task.data()
    settings = PACKED.model_copy(update=how)
    plan = PackedPlan(
        Order(len(source), 0), lookup_lengths(source.lengths), settings, capacity=task.capacity, global_batch=4,
        lanes=2,
        steps=number,
    )  # fmt: skip
    made = []
    for step in range(number):
        taken = plan.samples(step, range(4))
        rows: list[list[np.ndarray]] = [[] for _ in range(4)]
        for slot, row, first, last in zip(taken.slots, taken.rows, taken.first, taken.last, strict=True):
            sample = task.sample(source[int(row)], SampleContext(np.random.default_rng(0), training=True))
            rows[slot].append(sample if last == -1 else task.cut(sample, int(first), int(last)))
        made.append(rows)
    return made


# what a row holds -----------------------------------------------------------------------------------------------------


def test_a_packed_row_has_its_documents_side_by_side_with_positions_of_their_own(data: Corpus) -> None:
    task = language(data)
    row = task.pack([np.array([7, 8, 9]), np.array([3, 4]), np.array([5, 6, 7, 8])])
    assert row.inputs.tolist() == [7, 8, 3, 5, 6, 7]
    assert row.targets.tolist() == [8, 9, 4, 6, 7, 8]
    assert row.positions.tolist() == [0, 1, 0, 0, 1, 2]


def test_a_batch_of_packed_rows_has_positions_and_padding_that_is_a_document_of_its_own(data: Corpus) -> None:
    task = language(data)
    batch = task.collate([task.pack([np.array([7, 8, 9]), np.array([3, 4])]), task.pack([np.array([1, 2])])])
    ignored = [IGNORED] * 3
    assert batch["inputs"].tolist() == [[7, 8, 3, 0], [1, 0, 0, 0]]
    assert batch["targets"].tolist() == [[8, 9, 4, IGNORED], [2, *ignored]]
    assert batch["positions"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 2]]
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int64)}
    assert task.counts(batch) == {"next_token": 4.0}


def test_a_row_that_lost_all_its_documents_counts_nothing(data: Corpus) -> None:
    task = language(data)
    batch = task.collate([task.pack([])])
    assert batch["inputs"].shape == (1, 4)
    assert task.counts(batch) == {"next_token": 0.0}
    assert task.work(batch) == {"tokens": 0.0, "flops": 0.0, "weight_flops": 0.0}


def test_rows_that_are_not_packed_have_no_positions(data: Corpus) -> None:
    task = language(data)
    held = task.held_out()
    assert held is not None
    assert set(task.collate([held[0], held[1]])) == {"inputs", "targets"}
    assert max(len(held[row]) for row in range(len(held))) == CAPACITY + 1  # evaluation cuts and does not pack


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=12), sequence=st.integers(2, 40))
def test_pieces_of_a_document_predict_each_of_its_targets_once(lengths: list[int], sequence: int) -> None:
    task = Language(LanguageConfig(sequence=sequence), model=model_of("llama"), data=corpus(Path()))
    for length in lengths:
        document = np.arange(100, 101 + length)
        assert task.length(document) == length
        pieces = [task.cut(document, first, min(first + sequence, length)) for first in range(0, length, sequence)]
        row = task.pack(pieces)
        assert row.targets.tolist() == document[1:].tolist()
        assert row.inputs.tolist() == document[:-1].tolist()
        assert row.positions.max() < sequence


@pytest.mark.parametrize("method", ["online", "offline", "concatenate"])
def test_every_target_of_the_corpus_is_learnt_from_as_often_as_it_is_there(data: Corpus, method: str) -> None:
    """Two lanes, one epoch: as many positions as there are documents, so that chunks end where the epoch does."""
    task = language(data)
    documents = task.data()
    assert len(documents) == 48
    one = PackedPlan(
        Order(48, 0), lookup_lengths(documents.lengths), PACKED.model_copy(update={"chunk": 24, "method": method}),
        capacity=CAPACITY, global_batch=2, lanes=2, steps=100,
    )  # fmt: skip
    seen: list[tuple[int, int]] = []
    for lane in range(2):
        for step in count():
            taken = one.samples(step, range(lane, lane + 1))
            if taken.epochs[0]:
                break
            pieces = []
            for row, first, last in zip(taken.rows, taken.first, taken.last, strict=True):
                sample = documents[int(row)]
                pieces.append(sample if last == -1 else task.cut(sample, int(first), int(last)))
            made = task.pack(pieces)
            assert len(made.targets) <= CAPACITY
            seen += zip(made.inputs.tolist(), made.targets.tolist(), strict=True)
    pairs = [documents[row] for row in range(48)]
    assert sorted(seen) == sorted(p for d in pairs for p in zip(d[:-1].tolist(), d[1:].tolist(), strict=True))


def test_work_is_that_of_the_documents_and_not_of_the_rows(data: Corpus) -> None:
    task = language(data)
    for rows in steps(task, 3):
        packed_work = task.work(task.collate([task.pack(row) for row in rows]))
        alone = [task.work(task.collate([piece])) for row in rows for piece in row]
        assert max(map(len, rows)) > 1
        for name in ("tokens", "flops"):
            assert packed_work[name] == pytest.approx(sum(one[name] for one in alone), rel=1e-12)


# what a model learns from it ------------------------------------------------------------------------------------------


def gradients(task: Language, batches: list[dict[str, np.ndarray]], change: Any = None) -> tuple[Gradients, float]:
    """Of the sum over batches, in fp64; `change` may change the model."""
    task.kernels("cpu", "fp64")
    torch.manual_seed(0)
    model = task.build().train()
    precisions.to_master(model, "fp64")
    if change is not None:
        change(model)
    total = 0.0
    for made in batches:
        batch = {name: torch.from_numpy(array) for name, array in made.items()}
        with precisions.promotion("fp64"), precisions.autocast("fp64", torch.device("cpu")):
            outputs = task.outputs(model, batch, Context(0, training=True))
            loss = task.loss(outputs, batch, Context(0, training=True))
        summed = sum(loss.weights.get(name, 1.0) * term for name, term in loss.sums.items())
        summed.backward()  # type: ignore[union-attr]
        total += float(summed.detach())  # type: ignore[union-attr]
    return {n: p.grad.numpy().copy() for n, p in model.named_parameters() if p.grad is not None}, total


def ways(task: Language) -> dict[str, list[dict[str, np.ndarray]]]:
    """The same documents packed, each for itself, and packed but told nothing."""
    rows = steps(task)[0]
    together = task.collate([task.pack(row) for row in rows])
    assert max(map(len, rows)) > 1
    return {
        "packed": [together],
        "alone": [task.collate([piece]) for row in rows for piece in row],
        "mixed": [{name: together[name] for name in ("inputs", "targets")}],
    }


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_rows_are_those_of_the_documents_alone(data: Corpus, name: str, attention: str) -> None:
    task = language(data, name, attention)
    found = {way: gradients(task, batches) for way, batches in ways(task).items()}
    assert all(np.any(gradient) for gradient in found["alone"][0].values())
    assert distance(found["mixed"][0], found["alone"][0]) > 1e-3  # documents that see each other do matter
    assert distance(found["packed"][0], found["alone"][0]) < 1e-12
    assert found["packed"][1] == pytest.approx(found["alone"][1], rel=1e-13)


def test_terms_of_routers_of_packed_rows_are_those_of_the_documents_alone(data: Corpus) -> None:
    """The z-loss is a sum over tokens, whichever row they stand in."""
    task = language(data, "qwen3_moe", router_z_weight=0.1)
    found = {way: gradients(task, batches) for way, batches in ways(task).items()}
    assert distance(found["mixed"][0], found["alone"][0]) > 1e-3
    assert distance(found["packed"][0], found["alone"][0]) < 1e-12


@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_borders_are_those_of_the_documents_alone(
    data: Corpus, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with flash attention, which is not at hand: an attention that knows nothing but the borders it is given."""
    from transformers import AttentionInterface

    AttentionInterface.register("test_borders", packed.border_attention)
    task = language(data, name)
    batches = ways(task)
    expected = gradients(task, batches["alone"])
    task._kernels  # noqa: B018 - chosen now
    chosen = kernels.Kernels("flash", task._kernels.experts, task._kernels.why)
    monkeypatch.setattr(kernels, "select_kernels", lambda *_: chosen)
    monkeypatch.setattr(kernels, "_find_flash", lambda: "test_borders")
    found = {way: gradients(task, batches[way]) for way in ("packed", "mixed")}
    window = name == "mistral"  # whose attention would be told to look back four tokens only, and ours does not
    if not window:
        assert distance(found["packed"][0], expected[0]) < 1e-12
    assert distance(found["mixed"][0], expected[0]) > 1e-3


def test_borders_are_where_documents_begin_in_all_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    told = packed.flash_borders(positions)
    assert told["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 10]
    assert told["cu_seq_lens_q"].dtype == torch.int32
    assert told["max_length_q"] == told["max_length_k"] == 4


@pytest.mark.slow
def test_flex_attention_keeps_documents_apart(data: Corpus) -> None:
    """Its backward pass needs a GPU; here its forward pass, as far as a CPU has it."""
    task = language(data, "llama")
    torch.manual_seed(0)
    model = task.build().eval()
    losses = {}
    for way, made in ways(task).items():
        model.set_attn_implementation("sdpa" if way == "alone" else "flex_attention")
        losses[way] = 0.0
        for one in made:
            batch = {name: torch.from_numpy(array) for name, array in one.items()}
            with torch.no_grad():
                loss = task.loss(task.outputs(model, batch, Context(0, False)), batch, Context(0, False))
            losses[way] += float(loss.sums["next_token"])
    assert abs(losses["mixed"] / losses["alone"] - 1) > 1e-4
    assert losses["packed"] == pytest.approx(losses["alone"], rel=1e-6)


# which models can ----------------------------------------------------------------------------------------------------


DEAF = {"opt, narrow embeddings"}  # hands its positions to the embedding, and not to what makes the mask


@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - DEAF))
def test_models_that_heed_positions_are_built(data: Corpus, name: str) -> None:
    made = task(data.model_copy(update={"packing": PACKED}), name)
    made.check()
    made.build()


@pytest.mark.parametrize("name", sorted(DEAF))
def test_models_that_only_take_positions_are_refused(data: Corpus, name: str) -> None:
    task(data, name).build()
    with pytest.raises(ConfigError, match=r"in OPTForCausalLM a document attends to those before it in its row"):
        task(data.model_copy(update={"packing": PACKED}), name).build()


def test_a_recurrent_model_is_refused_before_anything_starts(data: Corpus) -> None:
    mamba = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    with pytest.raises(ConfigError, match=r"MambaForCausalLM takes no position_ids.*Use data\.packing=null"):
        task_of(data.model_copy(update={"packing": PACKED}), "mamba", mamba).check()
    task_of(data, "mamba", mamba).check()


class Deaf(torch.nn.Module):
    """A model that takes positions and does not heed them: each token sees the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.config = type("config", (), {"_attn_implementation": "eager"})()

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        return type("made", (), {"logits": self.table(input_ids).cumsum(1)})()


def test_a_model_that_does_not_heed_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="in Deaf a document attends to those before it in its row"):
        packed.check_isolation(Deaf(), flash=False)


def test_an_architecture_that_hands_no_borders_to_flash_attention_is_refused(data: Corpus) -> None:
    """Asked of the model itself: with its keywords held back on the way to attention, documents see each other."""
    model = language(data).build()
    packed.check_isolation(model, flash=True)
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, forward=forward, **kwargs: forward(
            *args, **{name: value for name, value in kwargs.items() if not name.startswith(("cu_", "max_length"))}
        )
    with pytest.raises(ConfigError, match=r"with model\.attention=flash a document attends.*model.attention=sdpa"):
        packed.check_isolation(model, flash=True)
    packed.check_isolation(model, flash=False)
    assert model.config._attn_implementation == "sdpa"
