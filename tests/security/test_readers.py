"""Every reader of foreign bytes, given mutations of them; `make fuzz-readers` gives 20,000 to each."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.security import forms, fuzz
from tests.security.mutations import mutated
from tests.security.reader import Copy, Reader
from unisono.runtime.errors import DataError

COSTLY = ("user", "yaml")  # which compose a configuration
NEEDS = {
    "BIOM 1": "biom", "BIOM 2": "biom", "BIOM 2, index": "biom", "distances.h5": "h5py", "tree": "skbio",
    "tokenizer.json": "tokenizers", "config.json": "transformers",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was afterwards, though a fuzz sets a cache of its own."""
    monkeypatch.setenv("UNISONO_CACHE", os.environ["UNISONO_CACHE"])
    monkeypatch.setenv("XDG_STATE_HOME", os.environ.get("XDG_STATE_HOME", ""))


def _given(name: str, count: int, seed: int) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    with fuzz.READERS[name]().in_copy():
        assert fuzz.fuzz(name, count, seed).wrong == []


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_refuses_what_it_cannot_use_with_an_error_of_ours(name: str) -> None:
    _given(name, 10 if name.endswith(COSTLY) else 60, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_does_so_two_thousand_times(name: str) -> None:
    _given(name, 300 if name.endswith(COSTLY) else 2000, 100_000)


def test_a_codec_that_does_not_exist_is_refused_and_ends_no_process() -> None:
    """Asked for such a codec, pyarrow aborts the process (found by the fuzzer); reading the pages is an error."""
    _given("Parquet", 1, 100_353)


def test_a_row_group_that_has_fewer_rows_than_its_footer_says_is_refused() -> None:
    """Arrow reads as many as there are, so a row behind them was an IndexError (found by the fuzzer)."""
    _given("Parquet", 1, 900_001)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _hang() -> None:
    while True:
        pass


def _wait_for_ever() -> None:
    threading.Event().wait()


def _take_memory() -> None:
    bytearray(100 << 20)


def _raise() -> None:
    raise KeyError("foreign")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (_crash, r"npy 2: process: ended with -11: .*in _crash"),
        (_hang, r"npy 2: time: more than 0\.3 s of the processor: .*in _hang"),
        (_wait_for_ever, r"npy 2: time: waited for more than 1 s: .*in wait"),
        (_take_memory, r"npy 2: memory: 9\d MB, of \d+ bytes|npy 2: memory: 10\d MB, of \d+ bytes"),
        (_raise, r"npy 2: KeyError at test_readers\.py:\d+: \"'foreign'\""),
        (lambda: os._exit(0), r"npy 2: process: ended with 0: "),
    ],
    ids=["crash", "hang", "wait", "memory", "foreign exception", "exit"],
)
def test_what_a_reader_may_not_do_is_told_and_the_next_mutation_is_tried(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None], told: str
) -> None:
    """Each is planted in a reader, at the third of five mutations."""
    monkeypatch.setattr(fuzz, "SECONDS", 0.3)
    monkeypatch.setattr(fuzz, "WAIT", 1 if fault is _wait_for_ever else 60)
    honest = fuzz.READERS["npy"]()
    third = mutated(_content(honest), random.Random("npy 2"), honest.form)[0]

    def read(folder: Path) -> object:
        if (folder / "a.npy").read_bytes() == third:
            fault()
        return honest.read(folder)

    monkeypatch.setitem(fuzz.READERS, "npy", lambda: replace(honest, read=read))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of copies of a process that has threads
        outcome = fuzz.fuzz_apart("npy", 5)
    assert len(outcome.wrong) == 1 and re.match(told, outcome.wrong[0]), outcome.wrong
    assert outcome.read + outcome.refused == (5 if fault is _take_memory else 4)


def _content(reader: Reader) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return reader.make(Path(folder)).read_bytes()


def test_a_reader_that_cannot_read_what_is_honest_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fuzz.READERS["npy"]()

    def read(folder: Path) -> object:
        raise DataError("not so")

    monkeypatch.setitem(fuzz.READERS, "npy", lambda: replace(honest, read=read))
    assert [line for line in fuzz.fuzz_apart("npy", 5).wrong if "honest: was not read" in line and "not so" in line]


def test_a_copy_that_a_file_ends_is_followed_by_another() -> None:
    """As of the process that checks an HDF5 file; what it said at last is told."""

    def answer(text: str) -> str:
        if text == "bad":
            raise ValueError("this one")
        return text.upper()

    copy = Copy(answer)
    assert copy.ask("a") == (0, "A")
    status, words = copy.ask("bad")
    assert status == 1 and words.endswith("ValueError: this one")
    assert copy.ask("b") == (0, "B")


def test_a_pickle_that_refers_to_no_storage_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's assertion ended the process that reads it, of which the user was shown an exit code."""
    import torch

    from unisono.checkpoint.exchange import pickle_process

    monkeypatch.setattr(torch.UntypedStorage, "__getitem__", torch.UntypedStorage.__getitem__)  # which it replaces
    records = {"a/data.pkl": b"\x80\x02K\x01Q.", "a/version": b"3\n"}
    (tmp_path / "a.pt").write_bytes(forms.PT.seal([{"name": n, "content": c} for n, c in records.items()]))
    with (tmp_path / "out").open("wb") as out:
        answer = pickle_process.extract_tensors(str(tmp_path / "a.pt"), None, 1 << 20, out.fileno())
    assert answer == {"sentence": "cannot be read as a torch.save file: saved_id must be a tuple, got int"}
