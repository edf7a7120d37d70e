from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.runtime.rng import generator, key

ADDRESSES = st.lists(st.integers(-(2**70), 2**70) | st.text(max_size=6), min_size=1, max_size=4)


def test_a_key_is_the_one_written_down_here():
    assert key(0, "dropout", 3, 1) == 7830804973772678688  # whoever changes it changes every run there ever was


def test_a_key_is_the_same_in_another_process():
    code = "from unisono.runtime.rng import key; print(key(7, 'shuffle', 2))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(told.stdout) == key(7, "shuffle", 2)


@given(ADDRESSES)
def test_a_key_is_a_seed_that_every_generator_takes(address: list[int | str]):
    assert 0 <= key(*address) < 2**63


@given(ADDRESSES, ADDRESSES)
def test_different_addresses_have_different_keys(one: list[int | str], other: list[int | str]):
    assert (key(*one) == key(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 23), (12, 3)),
        (("a", "b"), ("ab",)),
        ((1,), ("1",)),
        (("a", 1), (1, "a")),
        ((0,), (0, 0)),
        (("[1,2]",), (1, 2)),
    ],
)
def test_an_address_cannot_be_spelt_in_two_ways(one: tuple[int | str, ...], other: tuple[int | str, ...]):
    assert key(*one) != key(*other)


def test_a_generator_repeats_its_numbers_for_its_address():
    assert np.array_equal(generator(3, "noise", 5).random(8), generator(3, "noise", 5).random(8))


def test_generators_of_neighbouring_addresses_share_no_numbers():
    assert not set(generator(3, "noise", 5).random(100)) & set(generator(3, "noise", 6).random(100))


def test_drawing_from_a_generator_moves_no_other_randomness():
    np.random.seed(0)
    expected = np.random.random()
    np.random.seed(0)
    generator(1, "a").random(10)
    assert np.random.random() == expected
