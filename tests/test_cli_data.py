"""`unisono data`: what it makes, what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from packages.unisono.tests import tasks
from packages.unisono.tests.data.numbers import content
from recipes.language.tests.corpora import sentences, write_jsonl
from unisono.cli import main
from unisono.data.prepare.shards import Shards

Told = tuple[int, str, str]
Command = Callable[..., Told]
CORPUS = ("data=corpus", "data.path=corpus", "data.vocab_size=300", "data.held_out=0.2")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    for name in "abc":
        write_jsonl(tmp_path / "corpus" / f"{name}.jsonl", sentences(40, seed=ord(name)))
    return tmp_path


@pytest.fixture
def data(here: Path, command: Command) -> Command:
    return partial(command, "data")


def test_prepare_makes_shards_and_tells_what_they_hold(data: Command, here: Path):
    code, told, progress = data("prepare", "language", *CORPUS, "out=tokens", "shard_mb=0.005")
    made = Shards(here / "tokens")
    assert code == 0
    assert len(made) == 120
    assert told == (
        f"tokens: 120 rows, {made.lengths.sum()} units ({made.lengths.min()} to {made.lengths.max()} a row), "
        f"0 records left out; 3 shards, 3 blocks, content {made.fingerprint}\n"
    )
    assert progress.splitlines()[-1].startswith("tokens: 120 of 120 records, ")


def test_prepare_without_a_folder_fills_the_cache_that_training_reads(
    data: Command, here: Path, monkeypatch: pytest.MonkeyPatch
):
    from unisono_language.data import tokens

    _, told, _ = data("prepare", "language", *CORPUS)
    assert told.startswith(str(here / "cache" / "language"))
    monkeypatch.setattr(tokens.prepare, "prepare", lambda *_, **__: pytest.fail("tokenised again"))
    assert main.main(["check", "language", *CORPUS, "layout.world_size=1", "run.name=a"]) == 0


def test_what_was_prepared_can_be_trained_on(data: Command, here: Path, capsys: pytest.CaptureFixture[str]):
    data("prepare", "language", *CORPUS, "out=tokens")
    shutil.rmtree("corpus")
    words = ("data=prepared", "data.path=tokens", "layout.world_size=1", "run.name=a")
    assert main.main(["check", "language", *words]) == 0
    assert "  documents: 120\n" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["workers=1", "workers=2"])
def test_shares_are_merged_to_the_whole(data: Command, here: Path, workers: str):
    data("prepare", "language", *CORPUS, "out=whole", "shard_mb=0.005")
    for number in (2, 1):
        words = ("out=shares", "shard_mb=0.005", f"shard={number}/2", workers)
        code, told, _ = data("prepare", "language", *CORPUS, *words)
        assert code == 0
        assert told.splitlines() == [
            f"shares: part {number}/2 is done, {number} of 3 shards",
            "when all parts are done: unisono data merge shares",
        ]
        if number == 2:
            code, _, told = data("merge", "shares")
            assert code == 2
            assert told.startswith("unisono: error: shares: 1 of 3 shards are missing (0); create them by running")
    code, told, _ = data("merge", "shares")
    assert code == 0
    assert told.startswith("shares: 120 rows, ")
    assert content(here / "shares") == content(here / "whole")


def test_several_corpora_have_a_folder_each_and_are_merged_together(data: Command, here: Path):
    sources = "data.sources={one:{path:corpus/a.jsonl},two:{path:corpus/b.jsonl}}"
    for number in (1, 2):
        words = ("data=corpus", sources, "data.vocab_size=300", "out=both", f"shard={number}/2")
        assert data("prepare", "language", *words)[0] == 0
    code, told, _ = data("merge", "both")
    assert code == 0
    assert [line.split(":")[0] for line in told.splitlines()] == ["both/one", "both/two"]
    words = (
        "data=prepared",
        "data.sources={one:{path:both/one},two:{path:both/two}}",
        "data.mixture.weights={one:1,two:3}",
    )
    assert main.main(["check", "language", *words, "layout.world_size=1", "run.name=a"]) == 0


def test_reshard_keeps_the_rows(data: Command, here: Path):
    data("prepare", "language", *CORPUS, "out=tokens")
    code, told, _ = data("reshard", "tokens", "shards=7", "out=seven")
    assert code == 0
    assert "; 7 shards, 7 blocks, " in told
    assert Shards(here / "seven").fingerprint == Shards(here / "tokens").fingerprint


def test_too_few_blocks_are_refused_with_the_reshard_that_helps(data: Command, capsys: pytest.CaptureFixture[str]):
    data("prepare", "language", *CORPUS, "out=tokens")
    words = ("data=prepared", "data.shuffle=blocks", "layout.world_size=1", "run.name=a")
    assert main.main(["check", "language", *words, "data.path=tokens", "data.lanes=4"]) == 2
    assert "`unisono data reshard DIR shards=4 out=DIR2` creates at least 4 blocks" in capsys.readouterr().err
    data("reshard", "tokens", "shards=4", "out=four")
    assert main.main(["check", "language", *words, "data.path=four", "data.lanes=4"]) == 0
    assert main.main(["check", "language", *words, "data.path=tokens", "layout.world_size=2"]) == 2
    assert "split prepared data with `unisono data reshard DIR shards=2 out=DIR2`" in capsys.readouterr().err


def _damaged(folder: Path) -> None:
    path = folder / "shard-00000-of-00001.arrow"
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)


def _gone(folder: Path) -> None:
    (folder / "shard-00000-of-00001.arrow").unlink()


@pytest.mark.parametrize(
    ("spoil", "told"),
    [(_damaged, "is damaged (its hash differs"), (_gone, "is listed in the manifest but missing")],
)
def test_prepared_data_that_changed_are_refused_before_a_start_and_the_remedy_helps(
    data: Command, here: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], None], told: str
):
    data("prepare", "language", *CORPUS, "out=tokens")
    before = content(here / "tokens")
    spoil(here / "tokens")
    words = ("data=prepared", "data.path=tokens", "layout.world_size=1", "run.name=a")
    assert main.main(["check", "language", *words]) == 2
    assert f"unisono: error: tokens/shard-00000-of-00001.arrow {told}" in capsys.readouterr().err
    assert data("prepare", "language", *CORPUS, "out=tokens")[0] == 0
    assert content(here / "tokens") == before
    assert main.main(["check", "language", *words]) == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("prepare", "language", *CORPUS, "out=x", "shard=3/2"), "shard=3/2: write shard=i/n with i from 1 to n"),
        (("prepare", "language", *CORPUS, "out=x", "workers=none"), "workers: "),
        (("prepare", "language", *CORPUS, "out=x", "data.pth=y"), "unknown key 'data.pth'"),
        (("prepare", "language", "data=prepared", "data.path=x"), "data=prepared is already prepared"),
        (
            ("prepare", f"{tasks.__file__}:LinearTask"),
            "nothing can be prepared for LinearTask: it does not define preparation()",
        ),
        (("merge", "corpus"), "corpus has no plan.json, so nothing was prepared there"),
        (("reshard", "corpus"), "shards is missing: add shards=… (number of new shards); out is missing: "),
        (("reshard", "corpus", "shards=2", "out=x"), "corpus has no prepared data (no manifest.json)"),
        (("reshard", "corpus", "shards=2", "out=x", "shard=3"), "unknown word 'shard=3', did you mean 'shards'?"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing_behind(
    data: Command, here: Path, words: tuple[str, ...], told: str
):
    code, _, error = data(*words)
    assert code == 2
    assert error.startswith(f"unisono: error: {told}")
    assert {path.name for path in here.iterdir()} <= {"corpus", "cache"}


@pytest.mark.parametrize("words", [(), ("prepare",), ("merge",), ("prpare", "language"), ("merge", "a", "b=1")])
def test_a_command_that_is_spelt_wrongly_is_refused_with_the_usage(
    data: Command, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        data(*words)
    assert caught.value.code == 2
    assert "usage: unisono" in capsys.readouterr().err


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_audit_prints_its_report_and_fails_where_it_does(
    data: Command, monkeypatch: pytest.MonkeyPatch, passed: bool, code: int
):
    asked: list[tuple[Path, dict[str, Any]]] = []

    class Report(SimpleNamespace):
        def __str__(self) -> str:
            return "the report"

    module = ModuleType("unisono.data.audit")
    module.audit = lambda folder, **given: asked.append((folder, given)) or Report(is_clean=passed)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unisono.data.audit", module)
    assert data("audit", "runs/a", "--task", "mine.py:Mine") == (code, "the report\n", "")
    assert asked == [(Path("runs/a"), {"task": "mine.py:Mine", "trust": False})]


def test_preview_asks_for_the_position_and_the_layout(data: Command, monkeypatch: pytest.MonkeyPatch):
    from unisono import data as package

    asked: list[tuple[int, int, int]] = []
    module = ModuleType("unisono.data.preview")
    module.preview = lambda task, config, *numbers: asked.append(numbers) or ["a", "b"]  # type: ignore[attr-defined]
    module.format_table = lambda shown, width: [f"row {one}" for one in shown]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "unisono.data.preview", module)
    monkeypatch.setattr(package, "preview", module, raising=False)
    task = f"{tasks.__file__}:LinearTask"
    assert data("preview", task, "position=10", "world_size=4", "layout.world_size=2", "train.steps=3") == (
        0,
        "row a\nrow b\n",
        "",
    )
    data("preview", task, "count=3", "layout.world_size=2", "train.steps=3")
    assert asked == [(10, 8, 4), (0, 3, 2)]
