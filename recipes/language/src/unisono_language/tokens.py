"""Documents as token ids: tokenised ahead into shards, kept in the cache or in a folder of the user's own.

The name of a cache entry is a hash of the files' names, sizes and times, and of the tokenizer, so a changed file is
tokenised again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from unisono import DataError, cache_dir, prepare, safe_paths, show_progress, whole_file
from unisono_language.texts import Texts, digest
from unisono_language.tokenizer import Tokenizer, batches

_UNIGRAM = "unigram.npy"


@dataclass(frozen=True)
class TokenisePreparation:
    """Documents to tokenise ahead: a `Preparation` that makes its own records.

    Attributes:
        texts: the documents.
        tokenizer: to do it with.
    """

    texts: Texts
    tokenizer: Tokenizer
    column: str = "tokens"

    @property
    def dtype(self) -> str:
        """Of the ids."""
        return self.tokenizer.dtype

    @property
    def records(self) -> int:
        """Documents."""
        return len(self.texts)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """What decides the ids."""
        files, ignored = len(self.texts.found.files), list(self.texts.rows.ignored)
        source = {"fingerprint": self.texts.fingerprint, "files": files, "ignored": ignored}
        return {"source": source, "tokenizer": self.tokenizer.describe}

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
        for texts in batches(self.texts.read(first, last)):
            filled = [text for text in texts if text]
            ids, lengths = self.tokenizer.encode(filled)
            yield prepare.Made(ids, lengths, len(texts), len(texts) - len(filled))


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
        shards = self.manifest["shards"]
        self.files = files or [{"name": s["file"], "rows": s["rows"], "digest": s["sha256"]} for s in shards]

    def __len__(self) -> int:
        """Documents."""
        return len(self.shards)

    @property
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
        """Rows of `sequence` targets of some documents; None for whole ones.

        Neighbouring rows overlap by one token, so no prediction is lost.
        """
        return prepare.Windows(self, chosen, sequence, overlap=1)

    @cached_property
    def unigram(self) -> NDArray[np.int64]:
        """How often each token is a target, (vocabulary,); counted once and kept in the folder, if it can be."""
        path, size = self.folder / _UNIGRAM, self.tokenizer.size
        targets = int(self.manifest["units"]) - int((self.lengths > 0).sum())
        with contextlib.suppress(OSError, ValueError, EOFError):
            kept: NDArray[np.int64] = safe_paths.load_array(self.folder, _UNIGRAM)
            if kept.shape == (size,) and int(kept.sum()) == targets:
                return kept
        counted, documents = np.zeros(size, dtype=np.int64), 0
        for values, lengths in self.shards.batches():
            if (at := _find_unknown_token(values, size)) is not None:
                self._refuse(documents + int(np.searchsorted(np.cumsum(lengths), at, side="right")), values[at])
            documents += len(lengths)
            begins = (np.cumsum(lengths) - lengths)[lengths > 0]
            counted += np.bincount(values, minlength=size) - np.bincount(values[begins], minlength=size)
        with contextlib.suppress(OSError), whole_file(path) as temporary, temporary.open("wb") as file:
            np.save(file, counted)  # unless it is a folder of somebody else's
        return counted

    def slice(self, document: int, first: int, last: int) -> NDArray[np.int64]:
        """Tokens `first..last-1` of a document, fewer at its end.

        Raises:
            DataError: for an id that the tokenizer does not have; a device that looks it up may take its process down.
        """
        tokens = self.shards.slice(document, first, last)
        if (at := _find_unknown_token(tokens, self.tokenizer.size)) is not None:
            self._refuse(document, tokens[at])
        return tokens.astype(np.int64)

    def _refuse(self, document: int, token: int) -> NoReturn:
        raise DataError(
            f"{self.shards.where(document)}: token {token} is not in the tokenizer, whose ids are 0 to "
            f"{self.tokenizer.size - 1}; prepare the documents again, with the tokenizer in their folder"
        )


def _find_unknown_token(tokens: NDArray[Any], size: int) -> int | None:
    """The position of the first token outside a vocabulary of this size; None if all are inside."""
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < size):
        return None
    return int(np.argmax((tokens < 0) | (tokens >= size)))


def unigram_counts(store: TokenStore, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each token is a target in the training documents and in those held out, (2, vocabulary)."""
    seen = np.zeros_like(store.unigram)
    for document in held:
        seen += np.bincount(store.slice(int(document), 1, int(store.lengths[document])), minlength=len(seen))
    return np.stack([store.unigram - seen, seen])


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Cross-entropy in nats per token of the held-out targets under the training documents' token frequencies.

    The loss of a model that knows only these frequencies; one is added to every count. Counts are those of
    `unigram_counts`; of several corpora, their sum.
    """
    training, seen = counts[0] + 1, counts[1]
    return float(-(seen * np.log(training / training.sum())).sum() / max(1, seen.sum()))


def load_tokens(texts: Texts, tokenizer: Tokenizer, cache: Path | None) -> TokenStore:
    """The tokenised corpus, from the cache or tokenised now; one process per host does it and the others wait."""
    folder = cache_entry(texts, tokenizer, cache)
    if not prepare.is_finished(folder):  # what is missing is made again
        with show_progress("tokenising", len(texts), "tokens", "documents", patience=2.0) as progress:
            prepare.prepare(TokenisePreparation(texts, tokenizer), folder, progress=progress)
    files = [{"name": file.name, "size": file.size, "stamp": file.stamp} for file in texts.found.files]
    return TokenStore(folder, files)


def cache_entry(texts: Texts, tokenizer: Tokenizer, cache: Path | None) -> Path:
    """The cache path of a corpus; its name contains everything that determines the content."""
    return (cache or cache_dir()) / "language" / digest([texts.stamp, tokenizer.digest])[:24]
