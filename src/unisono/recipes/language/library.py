"""The documents of a run, wherever they come from: one corpus or several, tokenised ahead, before, or on the fly.

A source has rows to train on and rows held out, of documents kept apart. Tokenised ahead, a document becomes rows of up
to `sequence` targets; on the fly, where nobody knows lengths before, a row is a document. Where rows are packed,
training rows are whole documents either way: the plan cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono.data.prepare.preparation import Preparation
from unisono.recipes.language import tokens
from unisono.recipes.language.settings import Corpus, Documents, Prepared
from unisono.recipes.language.texts import Texts, digest
from unisono.recipes.language.tokenise import Ahead, Tokenizer, tokenizer_from, trained
from unisono.recipes.language.tokens import Rows, TokenStore
from unisono.runtime.errors import ConfigError, DataError
from unisono.runtime.files import cache_dir

Tokens = NDArray[np.int64]
ONE = ""  # the name of the only source


class Library(Protocol):
    """What the recipe asks of its documents."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all of them."""

    def training(self, whole: bool) -> dict[str, Any]:
        """The rows to train on, by source, whose only one is called ''; `whole` documents, or rows of a length."""

    def held_out(self) -> dict[str, Any]:
        """The rows kept apart, by source; none where nothing is kept."""

    def sample(self, document: Document) -> Tokens:
        """The tokens of a document that is tokenised on the fly, (length,)."""

    def check(self) -> None:
        """Refuse what is not as it was prepared."""

    def facts(self) -> dict[str, Any]:
        """What is worth knowing before the start."""


def open_library(config: Documents | Prepared, sequence: int, of_model: Path | None) -> Library:
    """The documents that the settings name.

    Args:
        config: the group `data`.
        sequence: targets per row.
        of_model: directory of a pretrained model, whose tokenizer is taken where no other is given.

    Raises:
        DataError: for documents or a tokenizer that cannot be read.
        ConfigError: for settings that do not fit each other.
    """
    if isinstance(config, Prepared):
        stores = {name: TokenStore(path) for name, path in config.folders.items()}
        _check_alike(stores, None if of_model is None else tokenizer_from(of_model), of_model)
        return AheadLibrary(stores, config.held_out, sequence, config.verify)
    texts, tokenizer = _corpora(config, of_model)
    if config.tokenise == "on_the_fly":
        return LiveLibrary(texts, tokenizer(), config.held_out, sequence, config.too_long)
    made = tokenizer()
    cache = config.cache or cache_dir()
    stores = {name: tokens.ahead(corpus, made, cache) for name, corpus in texts.items()}
    return AheadLibrary(stores, config.held_out, sequence, config.verify)


def preparations(config: Documents | Prepared, of_model: Path | None) -> dict[str, tuple[Preparation, Path]]:
    """What can be made ahead, by source, and where the cache has it.

    Raises:
        ConfigError: for documents that were prepared before.
    """
    if isinstance(config, Prepared):
        raise ConfigError("data=prepared was prepared before; give the documents, e.g. data=corpus data.path=DIR")
    texts, tokenizer = _corpora(config, of_model)
    made, cache = tokenizer(), config.cache or cache_dir()
    return {name: (Ahead(corpus, made), tokens.entry(corpus, made, cache)) for name, corpus in texts.items()}


class AheadLibrary:
    """Documents as tokens on disk.

    Args:
        stores: by source, all of one tokenizer.
        fraction: of each source's documents that is held out.
        sequence: targets per row.
        verify: what `check` holds against the manifests: `content`, or `sizes`, which were when they were opened.
    """

    def __init__(self, stores: Mapping[str, TokenStore], fraction: float, sequence: int, verify: str) -> None:
        self.stores, self._fraction, self._sequence, self._verify = dict(stores), fraction, sequence, verify

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all of them."""
        return next(iter(self.stores.values())).tokenizer

    def training(self, whole: bool) -> dict[str, Rows]:
        """Rows of the training documents, by source."""
        length = None if whole else self._sequence
        return {name: Rows(store, self.split[name][0], length) for name, store in self.stores.items()}

    def held_out(self) -> dict[str, Rows]:
        """Rows of the documents kept apart, by source."""
        parts = {name: held for name, (_, held) in self.split.items() if len(held)}
        return {name: Rows(self.stores[name], held, self._sequence) for name, held in parts.items()}

    def sample(self, document: Document) -> Tokens:
        """There is no text in these rows."""
        raise DataError("a row of tokenised documents is no text; data() of this task was changed")

    def check(self) -> None:
        """Refuse shards whose bytes are not those that were written."""
        for store in self.stores.values():
            if self._verify == "content":
                store.shards.verify()

    def facts(self) -> dict[str, Any]:
        """Sizes, and the loss of a model that knows only how frequent tokens are.

        That loss is of the held-out documents; where there are none, it is left out.
        """
        counts = sum(tokens.unigram_counts(store, self.split[name][1]) for name, store in self.stores.items())
        assert isinstance(counts, np.ndarray)
        entropy = {"unigram_entropy": round(tokens.unigram_entropy(counts), 4)} if counts[1].any() else {}
        told = {name: _told(store) for name, store in self.stores.items()}
        return {**told.get(ONE, {"corpora": told}), "vocabulary": self.tokenizer.size, **entropy}

    @cached_property
    def split(self) -> dict[str, tuple[Tokens, Tokens]]:
        """Documents to train on and documents held out, by source."""
        return {name: tokens.split(store.documents, self._fraction) for name, store in self.stores.items()}


class LiveLibrary:
    """Documents that are tokenised as they are asked for.

    Args:
        texts: by source.
        tokenizer: of all.
        fraction: of each source's documents that is held out.
        sequence: targets that a row can have.
        too_long: `stop` or `cut`, for documents with more.
    """

    def __init__(
        self, texts: Mapping[str, Texts], tokenizer: Tokenizer, fraction: float, sequence: int, too_long: str
    ) -> None:
        self.texts, self.tokenizer, self._fraction = dict(texts), tokenizer, fraction
        self._sequence, self._too_long = sequence, too_long

    def training(self, whole: bool) -> dict[str, Chosen]:
        """Training documents, by source."""
        parts = self._split.items()
        return {name: Chosen(self.texts[name], chosen, self.tokenizer, whole) for name, (chosen, _) in parts}

    def held_out(self) -> dict[str, Chosen]:
        """Documents kept apart, by source."""
        return {
            name: Chosen(self.texts[name], held, self.tokenizer, False)
            for name, (_, held) in self._split.items()
            if len(held)
        }

    def sample(self, document: Document) -> Tokens:
        """The tokens of a document; of one that has none, a single one, which is no target.

        Raises:
            DataError: for a document that is longer than a row.
        """
        text = document.text
        ids, _ = self.tokenizer.encode([text] if text else [])
        if len(ids) > self._sequence + 1 and not document.whole:
            if self._too_long == "stop":
                raise DataError(
                    f"a document has {len(ids) - 1} targets, more than task.sequence={self._sequence}: cut it into "
                    "rows by data.tokenise=ahead, use only its beginning by data.too_long=cut, or raise task.sequence "
                    f"(it begins with {text[:40]!r})"
                )
            ids = ids[: self._sequence + 1]
        return ids.astype(np.int64) if len(ids) else np.zeros(1, dtype=np.int64)

    def check(self) -> None:
        """Nothing that opening them has not shown."""

    def facts(self) -> dict[str, Any]:
        """Sizes; tokens are not counted before the start."""
        told = {
            name: {"files": len(t.found.files), "documents": len(t), "ignored": t.ignored}
            for name, t in self.texts.items()
        }
        return {**told.get(ONE, {"corpora": told}), "vocabulary": self.tokenizer.size}

    @cached_property
    def _split(self) -> dict[str, tuple[Tokens, Tokens]]:
        return {name: tokens.split(len(texts), self._fraction) for name, texts in self.texts.items()}


@dataclass(frozen=True)
class Document:
    """A row that is a document.

    Attributes:
        text: of it.
        whole: whether it may be longer than a row.
    """

    text: str
    whole: bool


class Chosen:
    """Some documents of a corpus as rows.

    Args:
        texts: the corpus.
        chosen: which of them, in order.
        tokenizer: what makes samples of them.
        whole: whether they may be longer than a row.
    """

    def __init__(self, texts: Texts, chosen: Tokens, tokenizer: Tokenizer, whole: bool) -> None:
        self._texts, self._chosen, self._tokenizer, self._whole = texts, chosen, tokenizer, whole

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, row: int) -> Document:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return Document(self._texts[int(self._chosen[row])], self._whole)

    @cached_property
    def blocks(self) -> Tokens:
        """Rows per block of the files, in order, (blocks,); those without a row are left out."""
        block = np.searchsorted(np.cumsum(self._texts.blocks), self._chosen, side="right")
        rows = np.bincount(block)
        return rows[rows > 0]

    @property
    def manifest(self) -> dict[str, Any]:
        """The files of the corpus; see `unisono.data.sources`."""
        return self._texts.manifest

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Refuse files that have changed since they were opened; see `unisono.data.sources`."""
        self._texts.check_files(share, shares)

    @cached_property
    def fingerprint(self) -> str:
        """What the samples are, in hex."""
        return digest([self._texts.fingerprint, self._tokenizer.digest, digest(self._chosen.tolist())])


def _corpora(config: Documents, of_model: Path | None) -> tuple[dict[str, Texts], Callable[[], Tokenizer]]:
    """The documents by source, and their tokenizer, which may have to be trained on them."""
    where = config.files if isinstance(config, Corpus) else {ONE: None}
    texts = {name: Texts.of(files) for name, files in where.items()}
    given = config.tokenizer or of_model

    def tokenizer() -> Tokenizer:
        if given is not None:
            return tokenizer_from(given)
        return trained(texts, config.vocab_size, config.cache or cache_dir())

    return texts, tokenizer


def _check_alike(stores: Mapping[str, TokenStore], of_model: Tokenizer | None, path: Path | None) -> None:
    """Refuse tokens of different tokenizers, and of another one than the model's."""
    first, *others = stores
    for name in others:
        if stores[name].tokenizer.digest != stores[first].tokenizer.digest:
            raise DataError(
                f"data.sources: '{first}' and '{name}' were prepared with different tokenizers; prepare both with one "
                "(data.tokenizer=…)"
            )
    if of_model is not None and of_model.digest != stores[first].tokenizer.digest:
        raise DataError(
            f"{stores[first].folder} was prepared with another tokenizer than that of {path} (model.path): prepare the "
            f"documents with data.tokenizer={path}"
        )


def _told(store: TokenStore) -> dict[str, Any]:
    manifest, source = store.manifest, store.manifest["of"]["source"]
    return {
        "files": source["files"],
        "documents": manifest["rows"],
        "empty": manifest["left_out"],
        "tokens": manifest["units"],
        "ignored": source["ignored"],
    }
