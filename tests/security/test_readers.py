"""Every reader of foreign bytes, given mutations of them; `make fuzz-readers` gives 20,000 to each."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.security import fuzz
from tests.security.foreign_readers import Reader

COSTLY = ("user", "yaml", "BIOM 2", "index")  # which compose a configuration, or start a process, for each
NEEDS = {"BIOM 1": "biom", "BIOM 2": "biom", "BIOM 2, index": "biom"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was afterwards, though a fuzz sets a cache of its own."""
    monkeypatch.setenv("UNISONO_CACHE", os.environ["UNISONO_CACHE"])


def _given(name: str, count: int, seed: int) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    assert fuzz.fuzz(name, count, seed) == []


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_refuses_what_it_cannot_use_with_an_error_of_ours(name: str) -> None:
    _given(name, 20 if name.endswith(COSTLY) else 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_does_so_two_thousand_times(name: str) -> None:
    _given(name, 300 if name.endswith(COSTLY) else 2000, 100_000)


def test_a_reader_that_lets_another_error_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path) -> object:
        return {b"\x93": 0}[(folder / "a.npy").read_bytes()[:1]]  # a KeyError where the first byte is another

    honest = fuzz.READERS["npy"]()
    monkeypatch.setitem(fuzz.READERS, "npy", lambda: Reader(honest.make, read, refuses=False))
    assert any("KeyError" in line for line in fuzz.fuzz("npy", 100))
