"""The documents or conversations of a run: one corpus or several, tokenised ahead, before, or on the fly.

A source has rows to train on and rows held out, of documents kept apart. Tokenised ahead, a document becomes rows of up
to `sequence` targets; on the fly, where nobody knows lengths before, a row is a document. Where rows are packed,
training rows are whole documents either way: the plan cuts them. A conversation is always one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import ConfigError, DataError, Mapped, Source, Subset, hold_out
from unisono_language.data import by_source, tokens
from unisono_language.data.chat import ChatTemplate, check_template
from unisono_language.data.conversations import Conversations
from unisono_language.data.texts import Texts, digest
from unisono_language.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from unisono_language.data.tokens import TokenisePreparation, TokenStore
from unisono_language.settings import Chat, Corpus, Documents, Preferences, PreparedDocuments

Tokens = NDArray[np.int64]
SINGLE_SOURCE = ""  # the name of the only source
_MOST_EMPTY = 0.01  # share of documents
_HINT = "or cut text files into documents by data.separator"


@dataclass(frozen=True)
class Document:
    """A row that is a document.

    Attributes:
        text: of it; None, as an empty one, has no tokens.
        whole: whether it may be longer than a row.
    """

    text: str | None
    whole: bool


@dataclass(frozen=True)
class OnTheFlyTexts:
    """Documents that are tokenised as they are asked for.

    Attributes:
        texts: the documents.
        tokenizer: of the samples made of them.
    """

    texts: Texts
    tokenizer: Tokenizer

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes; tokens are not counted before the start."""
        texts = self.texts
        return {"files": len(texts.found.files), "documents": len(texts), "ignored": list(texts.rows.ignored)}

    def part(self, chosen: Tokens, sequence: int | None) -> Subset:
        """Some documents as rows; `sequence` None for ones that may be longer than a row."""
        part = Subset(Mapped(self.texts.rows, partial(Document, whole=sequence is None), "documents"), chosen)
        part.fingerprint = digest([self.texts.fingerprint, self.tokenizer.digest, digest(chosen.tolist())])
        return part


@dataclass(frozen=True, eq=False)
class Library:
    """The documents of a run.

    Attributes:
        corpora: by source, whose only one is called ''; all of one tokenizer.
        fraction: of each source's documents that is held out.
        sequence: targets per row.
        verify: what `check` holds against the manifests: `content`, or `sizes`, which were when they were opened.
        rows: by source, the documents that are used where not all are.
        only_held_out: sources of which no document is trained on.
    """

    corpora: Mapping[str, TokenStore | OnTheFlyTexts]
    fraction: float
    sequence: int
    verify: str
    rows: Mapping[str, Tokens] = field(default_factory=dict)
    only_held_out: frozenset[str] = frozenset()

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all documents."""
        return next(iter(self.corpora.values())).tokenizer

    @property
    def chat(self) -> ChatTemplate | None:
        """The template of conversations; None for documents."""
        corpus = next(iter(self.corpora.values()))
        return corpus.chat if isinstance(corpus, TokenStore) else None

    @property
    def in_pairs(self) -> bool:
        """Whether rows are pairs of conversations, of which one was chosen."""
        corpus = next(iter(self.corpora.values()))
        return isinstance(corpus, TokenStore) and corpus.in_pairs

    @cached_property
    def split(self) -> dict[str, tuple[Tokens, Tokens]]:
        """Documents to train on and documents held out, by source."""
        parts = {}
        for name, corpus in self.corpora.items():
            count = len(corpus) // 2 if self.in_pairs else len(corpus)
            rows = self.rows.get(name, np.arange(count))
            if name in self.only_held_out:
                parts[name] = rows[:0], rows
                continue
            what, hint = ("document", _HINT) if self.chat is None else ("pair" if self.in_pairs else "conversation", "")
            held_out = hold_out(count, self.fraction, what=what, hint=hint)[rows]
            parts[name] = rows[~held_out], rows[held_out]
        return parts

    def training(self, whole: bool) -> dict[str, Source]:
        """The rows to train on, by source: `whole` documents, or rows of a length."""
        length = None if whole else self.sequence
        trained = {name: corpus for name, corpus in self.corpora.items() if name not in self.only_held_out}
        return {name: corpus.part(self.split[name][0], length) for name, corpus in trained.items()}

    def held_out(self) -> dict[str, Source]:
        """The rows kept apart, by source; none where nothing is kept."""
        parts = {name: held for name, (_, held) in self.split.items() if len(held)}
        return {name: self.corpora[name].part(held, self.sequence) for name, held in parts.items()}

    def check(self) -> None:
        """Refuse shards whose bytes are not those that were written."""
        for corpus in self.corpora.values():
            if isinstance(corpus, TokenStore) and self.verify == "content":
                corpus.shards.verify()

    def warnings(self) -> Iterator[str]:
        """A sentence for each corpus in which more than one document in a hundred has no text."""
        for name, corpus in self.corpora.items():
            empty, rest = corpus.facts.get("empty", 0), corpus.facts["documents"]
            if empty > _MOST_EMPTY * (empty + rest):
                source = f"source '{name}': " if name else ""
                yield (
                    f"{source}{empty} of {empty + rest} documents have no text (null or empty) and are left out; is it "
                    "the right column?"
                )

    def facts(self) -> dict[str, Any]:
        """Sizes and, of documents tokenised ahead, the loss of a model that knows only how frequent tokens are.

        That loss is of the held-out documents; where there are none, it is left out.
        """
        sizes = {name: corpus.facts for name, corpus in self.corpora.items()}
        stores = {name: corpus for name, corpus in self.corpora.items() if isinstance(corpus, TokenStore)}
        entropy = {}
        kind: dict[str, Any] = {}
        if stores:
            counts = sum(tokens.unigram_counts(store, self.split[name][1]) for name, store in stores.items())
            assert isinstance(counts, np.ndarray)
            entropy = {"unigram_entropy": round(tokens.unigram_entropy(counts), 4)} if counts[1].any() else {}
            kind = {} if self.chat is None else {"targets": int(counts.sum())}
        beside = {name: sizes.pop(name) for name in self.only_held_out}
        if beside:
            kind["held_out_sources"] = beside
        return {**sizes.get(SINGLE_SOURCE, {"corpora": sizes}), **kind, "vocabulary": self.tokenizer.size, **entropy}


def open_library(
    config: Documents | Chat | PreparedDocuments,
    sequence: int,
    of_model: Path | None,
    of_run: Tokenizer | None = None,
    chat_of_run: ChatTemplate | None = None,
) -> Library:
    """The documents or conversations that the settings name.

    Args:
        config: the group `data`.
        sequence: targets per row.
        of_model: directory of a pretrained model, whose tokenizer is taken where no other is given.
        of_run: tokenizer of a trained run that is to read these documents; no other can be taken then.
        chat_of_run: the run's chat template, likewise.
    """
    only_held_out = frozenset(config.held_out_sources)
    by_source.check_names(list(only_held_out), getattr(config, "sources", ()))
    if isinstance(config, Documents):
        texts, tokenizer = _texts(config, of_model, of_run)
        texts |= {name: Texts.from_files(files) for name, files in config.held_out_sources.items()}
        by_source.check_apart({n: [file.path for file in t.found.files] for n, t in texts.items()}, only_held_out)
        corpora: Mapping[str, TokenStore | OnTheFlyTexts]
        if config.tokenise == "on_the_fly":
            corpora = {name: OnTheFlyTexts(corpus, tokenizer) for name, corpus in texts.items()}
        else:
            corpora = {name: tokens.load_tokens(corpus, tokenizer, config.cache) for name, corpus in texts.items()}
        return Library(corpora, config.held_out, sequence, config.verify, only_held_out=only_held_out)
    if isinstance(config, Chat):
        conversations, tokenizer, chat = _conversations(config, of_model, of_run, chat_of_run)
        for name, files in config.held_out_sources.items():
            conversations[name] = Conversations.from_files(files, isinstance(config, Preferences))
        shards = {name: [shard.file.path for shard in rows.rows.shards] for name, rows in conversations.items()}
        by_source.check_apart(shards, only_held_out)
        stores = {name: tokens.load_tokens(rows, tokenizer, config.cache, chat) for name, rows in conversations.items()}
    else:
        folders = {**config.folders, **{name: ready.path for name, ready in config.held_out_sources.items()}}
        by_source.check_apart({name: [path] for name, path in folders.items()}, only_held_out)
        stores = {name: TokenStore(path) for name, path in folders.items()}
        if of_run is not None:
            _check_tokenizers(stores, of_run, "the run")
        elif of_model is not None:
            _check_tokenizers(stores, load_tokenizer(of_model), f"{of_model} (model.path)")
        else:
            _check_tokenizers(stores)
        _check_templates(stores)
        if any(store.in_pairs for store in stores.values()):
            raise ConfigError("data=prepared: preferences are not prepared in advance; use data=preferences")
    room = sequence if config.packing is None else min(sequence, config.packing.length or sequence)
    fitting = {name: store.fit(room, config.too_long) for name, store in stores.items()}
    kept = {name: store for name, (store, _) in fitting.items()}
    rows = {name: numbers for name, (_, numbers) in fitting.items()}
    return Library(kept, config.held_out, sequence, config.verify, rows, only_held_out)


def preparations(
    config: Documents | Chat | PreparedDocuments, of_model: Path | None
) -> dict[str, tuple[TokenisePreparation, Path]]:
    """What can be tokenised ahead, by source, and its place in the cache.

    Raises:
        ConfigError: for documents that are already prepared.
    """
    if isinstance(config, PreparedDocuments):
        raise ConfigError("data=prepared is already prepared; give the documents, e.g. data=corpus data.path=DIR")
    if isinstance(config, Preferences):
        raise ConfigError(
            "data=preferences is not prepared in advance: what the reference model says of the answers belongs to it; "
            "`unisono check` computes both once, into the cache"
        )
    found: Mapping[str, Texts | Conversations]
    if isinstance(config, Chat):
        found, tokenizer, chat = _conversations(config, of_model)
    else:
        (found, tokenizer), chat = _texts(config, of_model), None
    return {
        name: (
            TokenisePreparation(corpus, tokenizer, chat),
            tokens.find_entry(corpus, tokenizer, config.cache, chat),
        )
        for name, corpus in found.items()
    }


def tokenise_document(record: Document, library: Library, too_long: str) -> Tokens:
    """The tokens of a document tokenised on the fly; an empty one gives a single token, which is no target.

    `too_long` is `stop` or `cut`, for a document with more targets than a row has.
    """
    ids, _ = library.tokenizer.encode([record.text] if record.text else [])
    if len(ids) > library.sequence + 1 and not record.whole:
        if too_long == "stop":
            raise DataError(
                f"a document has {len(ids) - 1} targets, more than task.sequence={library.sequence}: split it into "
                "rows with data.tokenise=ahead, use only its beginning with data.too_long=cut, or raise task.sequence "
                f"(it begins with {(record.text or '')[:40]!r})"
            )
        ids = ids[: library.sequence + 1]
    return ids.astype(np.int64) if len(ids) else np.zeros(1, dtype=np.int64)


def _texts(
    config: Documents, of_model: Path | None, of_run: Tokenizer | None = None
) -> tuple[dict[str, Texts], Tokenizer]:
    """The documents by source, and their tokenizer, which may have to be trained on them."""
    where = config.files if isinstance(config, Corpus) else {SINGLE_SOURCE: None}
    texts = {name: Texts.from_files(files) for name, files in where.items()}
    if of_run is not None:
        return texts, of_run
    given = config.tokenizer or of_model
    return texts, train_tokenizer(texts, config.vocab_size, config.cache) if given is None else load_tokenizer(given)


def _conversations(
    config: Chat, of_model: Path | None, of_run: Tokenizer | None = None, chat_of_run: ChatTemplate | None = None
) -> tuple[dict[str, Conversations], Tokenizer, ChatTemplate]:
    """The conversations by source, their tokenizer and their template."""
    in_pairs = isinstance(config, Preferences)
    rows = {name: Conversations.from_files(files, in_pairs) for name, files in config.files.items()}
    if of_run is not None:
        if chat_of_run is None:
            raise ConfigError("the run was not trained on conversations, so it has no chat template to read these with")
        return rows, of_run, chat_of_run
    given = config.tokenizer or of_model
    if given is None:
        raise ConfigError(
            "data=chat needs a tokenizer with a chat template: fine-tune a model that has one (model=pretrained "
            "model.path=DIR), or set data.tokenizer=DIR"
        )
    tokenizer = load_tokenizer(given)
    template = ChatTemplate.from_tokenizer(given, config.chat_template, config.template_settings, config.loss_on)
    check_template(template, tokenizer, config.chat_template or given)
    return rows, tokenizer, template


def _check_templates(stores: Mapping[str, TokenStore]) -> None:
    """Refuse a mixture of documents and conversations, or of templates: a run has one."""
    first, *others = stores
    for name in others:
        if stores[name].chat != stores[first].chat:
            raise DataError(
                f"data.sources: '{first}' and '{name}' were prepared with different chat templates or settings of "
                "data=chat; prepare both with the same"
            )


def _check_tokenizers(stores: Mapping[str, TokenStore], needed: Tokenizer | None = None, whose: str = "") -> None:
    """Refuse tokens of different tokenizers, or of another one than the model needs."""
    first, *others = stores
    for name in others:
        if stores[name].tokenizer.digest != stores[first].tokenizer.digest:
            raise DataError(
                f"data.sources: '{first}' and '{name}' were prepared with different tokenizers; prepare both with one "
                "(data.tokenizer=…)"
            )
    if needed is not None and needed.digest != stores[first].tokenizer.digest:
        raise DataError(
            f"{stores[first].folder} was prepared with a different tokenizer than {whose}: prepare the documents "
            f"with data.tokenizer={needed.path}"
        )
