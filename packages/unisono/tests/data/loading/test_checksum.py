"""What a sample holds, as a number: any change of it changes the number, and nothing else does."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
import torch

from packages.unisono.tests.data.made import Augmented as Drawing
from unisono.data.loading.batch_builder import BatchBuilder
from unisono.data.loading.checksum import byte_size, checksum
from unisono.runtime.rng import generator, key


class Point:
    def __init__(self, x: Any) -> None:
        self.x = x


SAMPLES: list[Any] = [
    None, True, 1, 1.0, "1", b"1", "\ud800", 2**70, [], [1], [1, 2], [1.0, 2.0], [[1], [2, 3]], (1, "a"), {},
    {"a": 1}, {"a": 2}, {"b": 1}, {1: 1}, np.zeros(3), np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.float32),
    np.zeros(3, np.int64), np.array([1, 0, 0]), np.array("2020-01-01", "M8[D]"), np.array("2020-01-02", "M8[D]"),
    np.array(["a", None], object), np.array(["b", None], object), np.array(5), np.float32(5), torch.zeros(3),
    torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0), Point(1), Point(2),
    {"a": {"b": [np.zeros(2)]}}, {"a": {"b": [np.ones(2)]}}, np.zeros((0, 3)), "x" * 6000, b"x" * 100_000,
]  # fmt: skip


def test_different_samples_have_different_checksums() -> None:
    assert len({checksum(sample) for sample in SAMPLES}) == len(SAMPLES)


@pytest.mark.parametrize("number", range(len(SAMPLES)))
def test_what_came_before_counts_too(number: int) -> None:
    assert checksum(SAMPLES[number]) != checksum(SAMPLES[number], 12345)


def test_memory_layout_and_order_of_names_do_not_count() -> None:
    square = np.arange(12.0).reshape(3, 4)
    assert checksum(square.T) == checksum(np.ascontiguousarray(square.T)) != checksum(square)
    assert checksum({"a": 1, "b": 2}) == checksum({"b": 2, "a": 1}) != checksum({"a": 2, "b": 1})
    assert checksum(torch.arange(12).reshape(3, 4).T) == checksum(torch.arange(12).reshape(3, 4).T.contiguous())


def test_a_bit_that_flips_is_seen_anywhere() -> None:
    array = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    before = checksum(array)
    for place in (0, 500, 999):
        other = array.copy()
        other.view(np.uint32)[place] ^= 1
        assert checksum(other) != before


def test_what_is_not_known_counts_by_its_type() -> None:
    assert checksum(iter([1])) == checksum(iter([2])) != checksum(datetime.UTC)


def test_a_size_is_that_of_the_arrays() -> None:
    assert byte_size({"a": np.zeros(100), "b": [torch.zeros(5), b"xyz"]}) == 800 + 20 + 3


def test_recycled_generators_draw_what_new_ones_do() -> None:
    maker = BatchBuilder(Drawing(), np.arange(9), 3, "train")
    kept = []
    for row in range(9):
        rng = maker._contexts.get(key(3, "train", 0, row)).rng
        fresh = generator(3, "train", 0, row)
        assert rng.integers(5, size=3, dtype=np.uint8).tolist() == fresh.integers(5, size=3, dtype=np.uint8).tolist()
        assert rng.random(3).tolist() == fresh.random(3).tolist()
        if row % 3 == 0:  # a task that keeps its generator for later
            kept.append((rng, fresh))
        del rng
    assert all(rng.random(2).tolist() == fresh.random(2).tolist() for rng, fresh in kept)
    bits = maker._contexts.get(1).rng.bit_generator
    maker._contexts.get(2).rng.random(5)
    assert np.random.Generator(bits).random() == np.random.Generator(np.random.Philox(key=1)).random()
