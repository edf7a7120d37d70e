"""Documents as token ids: tokenised ahead into shards, kept in the cache or in a folder of the user's own.

The name of a cache entry is a hash of the files' names, sizes and times, and of the tokenizer, so a changed file is
tokenised again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, prepare
from unisono.recipe_tools import atomic_file, cache_entry, make_private, safe_paths, show_progress
from unisono_language.data.chat import ChatTemplate
from unisono_language.data.conversations import Conversations
from unisono_language.data.texts import Texts, digest
from unisono_language.data.tokenizer import Tokenizer, batches

_UNIGRAM = "unigram.npy"
_PATIENCE = 2.0  # seconds before progress is shown
_BATCH = 64  # conversations whose tokens are written at a time
_CHAT_DTYPE = "<i4"  # the complement of a token, of which the loss does not count it, is negative


@dataclass(frozen=True)
class TokenisePreparation:
    """Documents or conversations to tokenise ahead: a `Preparation` that makes its own records.

    Attributes:
        texts: the documents, or the conversations.
        tokenizer: to do it with.
        chat: the template of conversations.
    """

    texts: Texts | Conversations
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None
    column: str = "tokens"

    @property
    def dtype(self) -> str:
        """Of the ids."""
        return self.tokenizer.dtype if self.chat is None else _CHAT_DTYPE

    @property
    def records(self) -> int:
        """Documents."""
        return len(self.texts)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """What decides the ids."""
        files, ignored = len(self.texts.found.files), list(self.texts.rows.ignored)
        source = {"fingerprint": self.texts.fingerprint, "files": files, "ignored": ignored}
        chat: dict[str, Any] = {} if self.chat is None else {"chat": self.chat.describe}
        if isinstance(self.texts, Conversations) and self.texts.in_pairs:
            chat["in_pairs"] = True
        return {"source": source, "tokenizer": self.tokenizer.describe, **chat}

    @property
    def known_inputs(self) -> Mapping[str, Any]:
        """As `of`; a rewritten file counts as a different one."""
        return {"stamp": self.texts.stamp, **self.inputs}

    def bounds(self, shard_mb: float) -> list[int]:
        """Whole blocks of documents, about equally many per shard."""
        return prepare.even_bounds(self.records, self.texts.found.size, shard_mb, self.texts.rows.blocks)

    def begin(self, folder: Path) -> TokenisePreparation:
        """Save the tokenizer with its tokens."""
        self.tokenizer.save(folder)
        return self

    def make(self, first: int, last: int) -> Iterator[prepare.Made]:
        """The ids of the documents; those without text are left out."""
        if isinstance(self.texts, Conversations):
            yield from self._make_conversations(first, last)
            return
        for texts in batches(self.texts.read(first, last)):
            filled = [text for text in texts if text]
            ids, lengths = self.tokenizer.encode(filled)
            yield prepare.Made(ids, lengths, len(texts), len(texts) - len(filled))

    def _make_conversations(self, first: int, last: int) -> Iterator[prepare.Made]:
        assert isinstance(self.texts, Conversations) and self.chat is not None
        rows: list[NDArray[np.int32]] = []
        begun = first
        for number, conversations in enumerate(self.texts.read(first, last), first):
            try:
                rows += [self.chat.encode(conversation, self.tokenizer) for conversation in conversations]
            except DataError as error:
                raise DataError(f"{self.texts.where(number)}: {error}") from error
            if len(rows) >= _BATCH or number + 1 == last:
                lengths = np.array([len(row) for row in rows])
                yield prepare.Made(np.concatenate(rows), lengths, number + 1 - begun)
                rows, begun = [], number + 1


class TokenStore:
    """The tokenised documents of a corpus, in a folder of shards with their tokenizer.

    Args:
        folder: of shards.
        files: that they were made of; None where only the shards are known.

    Raises:
        DataError: where it is not finished, damaged, or of another tokenizer than the one that lies in it.
    """

    def __init__(self, folder: Path, files: list[dict[str, Any]] | None = None) -> None:
        self.folder = folder
        self.shards = prepare.Shards(folder)
        self.manifest = self.shards.manifest
        self.tokenizer = Tokenizer.load(folder)
        if self.manifest["of"].get("tokenizer") != self.tokenizer.describe:
            raise DataError(
                f"{folder}: its documents were tokenised with a different tokenizer; copy the folder again "
                "from where it was prepared"
            )
        chat = self.manifest["of"].get("chat")
        self.chat = None if chat is None else ChatTemplate.from_json(chat, folder)
        shards = self.manifest["shards"]
        self.files = files or [{"name": s["file"], "rows": s["rows"], "digest": s["sha256"]} for s in shards]

    def __len__(self) -> int:
        """Documents."""
        return len(self.shards)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per document, (documents,)."""
        return self.shards.lengths

    @property
    def facts(self) -> dict[str, Any]:
        """Sizes."""
        manifest, source = self.manifest, self.manifest["of"]["source"]
        return {
            "files": source["files"],
            "documents": manifest["rows"],
            "empty": manifest["left_out"],
            "tokens": manifest["units"],
            "ignored": source["ignored"],
        }

    def part(self, chosen: NDArray[np.int64], sequence: int | None) -> prepare.Windows:
        """Rows of `sequence` targets of some documents; None for whole ones, as conversations are.

        Neighbouring rows overlap by one token, so no prediction is lost.
        """
        return prepare.Windows(self, chosen, None if self.chat else sequence, overlap=1)

    @property
    def in_pairs(self) -> bool:
        """Whether rows are a chosen and a rejected conversation after each other."""
        return bool(self.manifest["of"].get("in_pairs"))

    def fit(self, sequence: int, too_long: str) -> tuple[TokenStore, NDArray[np.int64]]:
        """The store and the numbers of its rows, or pairs, of which conversations have up to `sequence` targets.

        `too_long` is what happens to the others: `stop`, `cut` or `leave_out`.

        Raises:
            DataError: for a conversation that is too long, with `stop`, or if none is short enough.
        """
        if self.chat is None:
            return self, np.arange(len(self))
        sides = (self.lengths > sequence + 1).reshape(-1, 2 if self.in_pairs else 1)
        rows, long = np.arange(len(sides)), np.flatnonzero(sides.any(1))
        if not len(long):
            return self, rows
        if too_long == "cut":
            fitting = copy(self)
            fitting.lengths = np.minimum(self.lengths, sequence + 1)
            return fitting, rows
        what = "pairs" if self.in_pairs else "conversations"
        found = f"{len(long)} of {len(rows)} {what} have more targets than task.sequence={sequence}"
        if too_long == "stop":
            longest = int(self.lengths.max()) - 1
            raise DataError(
                f"{found}, which would be cut apart: raise task.sequence (the longest has {longest}), train without "
                "them (data.too_long=leave_out), or use their beginnings (data.too_long=cut)"
            )
        if len(long) == len(rows):
            raise DataError(f"{found}, so data.too_long=leave_out leaves none; raise task.sequence")
        return self, np.setdiff1d(rows, long)

    @cached_property
    def unigram(self) -> NDArray[np.int64]:
        """How often each token is a target, (vocabulary,); counted once and kept in the folder, if it can be."""
        path, size = self.folder / _UNIGRAM, self.tokenizer.size
        targets = int(self.manifest["units"]) - int((self.shards.lengths > 0).sum())
        with contextlib.suppress(OSError, ValueError, EOFError):
            kept: NDArray[np.int64] = safe_paths.load_array(self.folder, _UNIGRAM)
            total = int(kept.sum())
            if kept.shape == (size,) and (total == targets or (self.chat is not None and 0 < total < targets)):
                return kept
        counted, documents = np.zeros(size, dtype=np.int64), 0
        with show_progress("counting tokens", len(self), "tokens", "documents", patience=_PATIENCE) as progress:
            for values, lengths in self.shards.batches():
                if (at := self._find_unknown_token(values)) is not None:
                    self._refuse(documents + int(np.searchsorted(np.cumsum(lengths), at, side="right")), values[at])
                documents += len(lengths)
                begins = values[(np.cumsum(lengths) - lengths)[lengths > 0]]  # nothing predicts them
                for sign, some in ((1, values), (-1, begins)):
                    some = some if self.chat is None else some[some >= 0]
                    counted += sign * np.bincount(some, minlength=size)
                progress(len(lengths), len(values))
        with contextlib.suppress(OSError), atomic_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, counted)  # unless it is a folder of somebody else's
        return counted

    def slice(self, document: int, first: int, last: int) -> NDArray[np.int64]:
        """Tokens `first..last-1` of a document, fewer at its end; of a conversation, some are complements.

        Raises:
            DataError: for an id that the tokenizer does not have; a device that looks it up may take its process down.
        """
        tokens = self.shards.slice(document, first, last)
        if (at := self._find_unknown_token(tokens)) is not None:
            self._refuse(document, tokens[at])
        return tokens.astype(np.int64)

    def _find_unknown_token(self, tokens: NDArray[Any]) -> int | None:
        """The position of the first token outside the vocabulary; None if all are inside."""
        least, size = 0 if self.chat is None else -self.tokenizer.size, self.tokenizer.size
        if not len(tokens) or (tokens.min() >= least and tokens.max() < size):
            return None
        return int(np.argmax((tokens < least) | (tokens >= size)))

    def _refuse(self, document: int, token: int) -> NoReturn:
        raise DataError(
            f"{self.shards.where(document)}: token {token} is not in the tokenizer, whose ids are 0 to "
            f"{self.tokenizer.size - 1}; prepare the documents again, with the tokenizer in their folder"
        )


def unigram_counts(store: TokenStore, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each token is a target in the training documents and in those held out, (2, vocabulary)."""
    seen = np.zeros_like(store.unigram)
    for document in held if not store.in_pairs else np.concatenate([2 * held, 2 * held + 1]):
        tokens = store.slice(int(document), 1, int(store.lengths[document]))
        seen += np.bincount(tokens[tokens >= 0], minlength=len(seen))
    return np.stack([store.unigram - seen, seen])


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Cross-entropy in nats per token of the held-out targets under the training documents' token frequencies.

    The loss of a model that knows only these frequencies; one is added to every count. Counts are those of
    `unigram_counts`; of several corpora, their sum.
    """
    training, seen = counts[0] + 1, counts[1]
    return float(-(seen * np.log(training / training.sum())).sum() / max(1, seen.sum()))


def load_tokens(
    texts: Texts | Conversations, tokenizer: Tokenizer, cache: Path | None, chat: ChatTemplate | None = None
) -> TokenStore:
    """The tokenised corpus, from the cache or tokenised now; one process per host does it and the others wait."""
    folder = find_entry(texts, tokenizer, cache, chat)
    if not prepare.is_finished(folder):  # what is missing is made again
        records = "documents" if chat is None else "conversations"
        with show_progress("tokenising", len(texts), "tokens", records, patience=_PATIENCE) as progress:
            prepare.prepare(TokenisePreparation(texts, tokenizer, chat), folder, progress=progress)
        make_private(folder)
    files = [{"name": file.name, "size": file.size, "stamp": file.stamp} for file in texts.found.files]
    return TokenStore(folder, files)


def find_entry(
    texts: Texts | Conversations, tokenizer: Tokenizer, cache: Path | None, chat: ChatTemplate | None = None
) -> Path:
    """The cache path of a corpus; its name contains everything that determines the content."""
    address = [texts.stamp, tokenizer.digest, *([] if chat is None else [chat.describe])]
    return cache_entry("language", digest(address)[:24], cache=cache)
