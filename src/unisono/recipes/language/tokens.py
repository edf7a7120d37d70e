"""Documents as token ids: tokenised ahead, kept in a cache or in a folder of the user's own, read without a copy.

A cache entry is a folder of shards (`unisono.data.prepare.shards`) with its tokenizer. Its name is a hash of the files' names,
sizes and times, and of the tokenizer, so a changed file is tokenised again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from unisono.data.order.order import Shuffle
from unisono.data.prepare.preparation import prepare
from unisono.data.prepare.shards import MANIFEST, Shards
from unisono.recipes.language.texts import Texts, digest
from unisono.recipes.language.tokenise import Ahead, Tokenizer, unwritable
from unisono.runtime.errors import DataError
from unisono.runtime.files import whole
from unisono.runtime.rng import key

_UNIGRAM = "unigram.npy"


class TokenStore:
    """The tokenised documents of a corpus.

    Args:
        folder: of shards, with their tokenizer.
        files: that they were made of; None where only the shards are known.

    Raises:
        DataError: where it is not finished, damaged, or of another tokenizer than the one that lies in it.
    """

    def __init__(self, folder: Path, files: list[dict[str, Any]] | None = None) -> None:
        self.folder = folder
        self.shards = Shards(folder)
        self.manifest = self.shards.manifest
        self.tokenizer = Tokenizer.saved(folder)
        if self.manifest["of"].get("tokenizer") != self.tokenizer.described:
            raise DataError(
                f"{folder}: its tokenizer is not the one that its documents were tokenised with; copy the folder once "
                "more from where it was prepared"
            )
        shards = self.manifest["shards"]
        self.files = files or [{"name": s["file"], "rows": s["rows"], "digest": s["sha256"]} for s in shards]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.shards)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per document, (documents,)."""
        return self.shards.lengths

    @cached_property
    def unigram(self) -> NDArray[np.int64]:
        """How often each token is a target, (vocabulary,); counted once and kept in the folder, if it can be.

        Raises:
            DataError: for an id that the tokenizer does not have.
        """
        path, size = self.folder / _UNIGRAM, self.tokenizer.size
        targets = int(self.manifest["units"]) - int((self.lengths > 0).sum())
        with contextlib.suppress(OSError, ValueError, EOFError):
            kept: NDArray[np.int64] = np.load(path)
            if kept.shape == (size,) and int(kept.sum()) == targets:
                return kept
        counted, documents = np.zeros(size, dtype=np.int64), 0
        for values, lengths in self.shards.batches():
            if (at := _outside(values, size)) is not None:
                self._refuse(documents + int(np.searchsorted(np.cumsum(lengths), at, side="right")), values[at])
            documents += len(lengths)
            begins = (np.cumsum(lengths) - lengths)[lengths > 0]
            counted += np.bincount(values, minlength=size) - np.bincount(values[begins], minlength=size)
        with contextlib.suppress(OSError), whole(path) as temporary, temporary.open("wb") as file:
            np.save(file, counted)  # unless it is a folder of somebody else's
        return counted

    def slice(self, document: int, first: int, last: int) -> NDArray[np.int64]:
        """Tokens `first..last-1` of a document, fewer at its end.

        Raises:
            DataError: for an id that the tokenizer does not have; a device that looks it up may take its process down.
        """
        tokens = self.shards.slice(document, first, last)
        if (at := _outside(tokens, self.tokenizer.size)) is not None:
            self._refuse(document, tokens[at])
        return tokens.astype(np.int64)

    def _refuse(self, document: int, token: int) -> NoReturn:
        raise DataError(
            f"{self.shards.where(document)}: token {token} is none of the tokenizer's, whose ids are 0 to "
            f"{self.tokenizer.size - 1}; prepare the documents again, with the tokenizer that lies beside them"
        )


def _outside(tokens: NDArray[Any], size: int) -> int | None:
    """The place of the first token that is none of a vocabulary of this size; None where all are of it."""
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < size):
        return None
    return int(np.argmax((tokens < 0) | (tokens >= size)))


class Rows:
    """Documents cut into rows of `sequence` targets. Neighbouring rows overlap by one token, so no prediction is lost.

    Args:
        store: the documents.
        chosen: which of them, in order.
        sequence: targets per row; None for whole documents.
    """

    def __init__(self, store: TokenStore, chosen: NDArray[np.int64], sequence: int | None) -> None:
        targets = np.maximum(store.lengths[chosen] - 1, 0)  # a document can be without any token
        self._store, self._sequence = store, sequence or int(targets.max(initial=1))
        self._chosen, self._targets = chosen[targets > 0], targets[targets > 0]
        self._pieces = -(-self._targets // self._sequence)
        self._last_row: NDArray[np.int64] = np.cumsum(self._pieces)
        self.targets = int(targets.sum())

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Targets of each row, (rows,)."""
        lengths = np.full(len(self), self._sequence, dtype=np.int64)
        lengths[self._last_row - 1] = (self._targets - 1) % self._sequence + 1
        return lengths

    def __len__(self) -> int:
        return int(self._last_row[-1]) if len(self._last_row) else 0

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        """Up to `sequence + 1` tokens, (length,)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        which = int(np.searchsorted(self._last_row, row, side="right"))
        piece = row - (int(self._last_row[which - 1]) if which else 0)
        first = piece * self._sequence
        return self._store.slice(int(self._chosen[which]), first, first + self._sequence + 1)

    @cached_property
    def blocks(self) -> NDArray[np.int64]:
        """Rows per record batch of the shards, in order, (blocks,); those without a row are left out."""
        batch = np.searchsorted(np.cumsum(self._store.shards.blocks), self._chosen, side="right")
        rows = np.bincount(batch, weights=self._pieces).astype(np.int64)
        return rows[rows > 0]

    @property
    def manifest(self) -> dict[str, Any]:
        """The files that the documents come from; see `unisono.data.sources`."""
        return {"fingerprint": self._store.shards.fingerprint, "files": self._store.files}

    def check_files(self, share: int = 0, shares: int = 1) -> None:
        """Refuse shards that have changed since they were opened; see `unisono.data.sources`."""
        self._store.shards.check_files(share, shares)

    @cached_property
    def fingerprint(self) -> str:
        """What the rows are, in hex."""
        chosen = hashlib.sha256(self._chosen.astype("<i8").tobytes()).hexdigest()
        return digest([self._store.shards.fingerprint, chosen, self._sequence])


def split(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents to train on and documents held out, each in order; chosen by nothing but how many there are.

    Args:
        count: of the documents.
        fraction: of them that is held out.

    Raises:
        DataError: if there are too few documents to hold any out.
    """
    if fraction == 0:
        return np.arange(count), np.arange(0)
    if count < 2:
        raise DataError(
            f"the corpus is a single document, so data.held_out={fraction} cannot keep one apart: set data.held_out=0, "
            "or cut text files into documents by data.separator"
        )
    held = min(count - 1, max(1, round(fraction * count)))
    kept_apart = np.sort(Shuffle(count, key("held out"))(np.arange(held)))
    return np.setdiff1d(np.arange(count), kept_apart, assume_unique=True), kept_apart


def unigram_counts(store: TokenStore, held: NDArray[np.int64]) -> NDArray[np.int64]:
    """How often each token is a target in the training documents and in those held out, (2, vocabulary)."""
    seen = np.zeros_like(store.unigram)
    for document in held:
        seen += np.bincount(store.slice(int(document), 1, int(store.lengths[document])), minlength=len(seen))
    return np.stack([store.unigram - seen, seen])


def unigram_entropy(counts: NDArray[np.int64]) -> float:
    """Cross-entropy in nats per token of the held-out targets under the training documents' token frequencies.

    What a model reaches that knows the frequencies and nothing else; one is added to every count.

    Args:
        counts: as of `unigram_counts`; of several corpora, their sum.
    """
    training, seen = counts[0] + 1, counts[1]
    return float(-(seen * np.log(training / training.sum())).sum() / max(1, seen.sum()))


def ahead(texts: Texts, tokenizer: Tokenizer, cache: Path) -> TokenStore:
    """The tokenised corpus, from the cache or made now; one process of a host makes it and the others wait.

    Args:
        texts: the documents.
        tokenizer: to tokenise them with.
        cache: to look in.

    Raises:
        DataError: for documents that cannot be read, or a cache that cannot be written.
    """
    folder = entry(texts, tokenizer, cache)
    if not _whole(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(cache, error) from error
        made = prepare(Ahead(texts, tokenizer), folder)
        assert made is not None
    return TokenStore(folder, texts.seen)


def entry(texts: Texts, tokenizer: Tokenizer, cache: Path) -> Path:
    """Where the cache has a corpus: everything that decides its content is in the name."""
    return cache / "language" / digest([texts.stamp, tokenizer.digest])[:24]


def _whole(folder: Path) -> bool:
    """Whether an entry is finished and has all its files; what is missing is made again."""
    if not (folder / MANIFEST).is_file():
        return False
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return all((folder / shard["file"]).is_file() for shard in manifest["shards"])
