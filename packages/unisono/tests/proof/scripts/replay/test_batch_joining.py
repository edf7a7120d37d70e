"""Batches of ranks side by side are the batch that one process would have of the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from unisono.proof.scripts.replay.batch_joining import join_batches
from unisono.proof.scripts.replay.content_store import ContentStore, NotKeptError


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


def test_rows_stand_one_after_another_whatever_holds_them() -> None:
    parts = [[torch.zeros(2, 3), {"y": np.zeros(2), "name": ["a", "b"], "fixed": torch.arange(7)}] for _ in range(2)]
    x, rest = join_batches(parts, [2, 2])
    assert x.shape == (4, 3) and rest["y"].shape == (4,) and rest["name"] == ["a", "b", "a", "b"]
    assert torch.equal(rest["fixed"], torch.arange(7))
    pair = join_batches([Pair(torch.zeros(1), torch.ones(1))] * 2, [1, 1])
    assert isinstance(pair, Pair) and pair.b.tolist() == [1, 1]


def test_rows_that_are_tensors_of_their_own_size_are_a_longer_list() -> None:
    images = [torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)]
    joined = join_batches([images, images[:1]], [2, 1])
    assert [tuple(image.shape) for image in joined] == [(3, 4, 5), (3, 6, 7), (3, 4, 5)]


@pytest.mark.parametrize("at_left", [False, True])
def test_sequences_are_padded_to_the_longest_rank_where_a_mask_says_what_padding_is(at_left: bool) -> None:
    short = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    ids, mask = [[7, 8, 9], [7, 8, 1]], [[1, 1, 1], [1, 1, 0]]
    if at_left:
        ids, mask = [[7, 8, 9], [1, 7, 8]], [[1, 1, 1], [0, 1, 1]]
    long = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
    labels = [{"labels": part["input_ids"].clone()} for part in (short, long)]
    joined = join_batches([{**short, **labels[0]}, {**long, "labels": labels[1]["labels"]}], [1, 2])
    assert joined["input_ids"][0].tolist() == ([1, 5, 6] if at_left else [5, 6, 1])
    assert joined["attention_mask"][0].tolist() == ([0, 1, 1] if at_left else [1, 1, 0])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"n": 3}, {"n": 4}], "'n' is 3 on rank 0"),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], "other keys"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "no attention_mask says what is padding"),
        ([{"w": torch.zeros(3)}, {"w": torch.ones(3)}], r"shapes \(3,\) and \(3,\) for 2 and 2"),
    ],
)
def test_what_has_no_rows_is_named(parts: list[Any], said: str) -> None:
    with pytest.raises(NotKeptError, match=said):
        join_batches(parts, [2, 2])


def test_a_store_gives_back_what_it_was_given_and_keeps_each_content_once(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    batch = {
        "half": torch.randn(3, 2).bfloat16(),
        "flag": torch.tensor([True, False]),
        "number": torch.tensor(3.5),
        "wave": torch.randn(2, dtype=torch.complex64),
        "array": np.arange(3, dtype=np.int16),
        "text": ["a", None],
    }
    kept = store.put(batch)
    again = store.get(kept)
    assert all(torch.equal(again[key], batch[key]) and again[key].dtype == batch[key].dtype for key in [*batch][:4])
    assert again["array"].dtype == np.int16 and again["text"] == ["a", None]
    files = len(list(tmp_path.iterdir()))
    assert store.put(batch) == kept and len(list(tmp_path.iterdir())) == files == 5


def test_a_batch_of_unknown_parts_and_one_without_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotKeptError, match="a batch holds a object"):
        ContentStore(tmp_path).put([object()])
    store = ContentStore(tmp_path)
    store._left = 8
    with pytest.raises(NotKeptError, match="room on the disk"):
        store.put(torch.zeros(9))
