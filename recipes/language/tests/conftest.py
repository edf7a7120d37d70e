"""What several test modules of the recipe begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.language.tests.corpora import corpus, sentences, write_jsonl
from unisono_language.settings import Corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of forty documents."""
    folder = tmp_path_factory.mktemp("corpus")
    write_jsonl(folder / "a.jsonl", sentences(40))
    return corpus(folder)


@pytest.fixture
def small(tmp_path: Path) -> Corpus:
    """A corpus with a cache of its own."""
    write_jsonl(tmp_path / "corpus" / "a.jsonl", sentences(20))
    return corpus(tmp_path / "corpus", cache=tmp_path / "cache")
