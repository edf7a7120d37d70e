"""Documents as token ids on disk: tokenised once, cached by what went in, read through memory maps.

A cache entry is a folder: `tokens.bin` (little-endian uint16 or uint32), `ends.npy` (where each document ends),
`unigram.npy` (how often each token is a target), `tokenizer.json`, and `manifest.json` written last. Its name is a
hash of the files' names, sizes and times, and of the tokenizer, so a changed file is tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from unisono.data.order import Shuffle
from unisono.data.sources import File, Found
from unisono.errors import DataError
from unisono.keys import key
from unisono.recipes.language import documents
from unisono.recipes.language.settings import Corpus, Documents

END = "<|endoftext|>"
_LAYOUT = 1  # of a cache entry; a change makes old entries unknown
_WAIT = 3600.0  # seconds to wait for another process that is tokenising the same documents
_BATCH = 256  # documents per call of the tokenizer


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer file and its special tokens.

    Attributes:
        path: of `tokenizer.json`.
        first: id put before every document, or None.
        last: id put after every document, or None.
        size: ids are below this.
    """

    path: Path
    first: int | None
    last: int | None
    size: int


class TokenStore:
    """The tokenised documents of a corpus.

    Args:
        folder: a cache entry.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        try:
            self._tokens = np.memmap(folder / "tokens.bin", dtype=self.manifest["dtype"], mode="r")
            self._ends: NDArray[np.int64] = np.load(folder / "ends.npy", mmap_mode="r")
            if len(self._tokens) != self.manifest["tokens"]:  # a short read would silently be a short document
                raise ValueError(f"{len(self._tokens)} tokens instead of {self.manifest['tokens']}")
        except (OSError, ValueError) as error:
            raise DataError(
                f"the cache entry {folder} is damaged ({error}); remove this folder, and it will be made again"
            ) from error

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made it."""
        special = self.manifest["tokenizer"]
        return Tokenizer(self.folder / "tokenizer.json", special["first"], special["last"], special["size"])

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self._ends)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens per document, (documents,)."""
        return np.diff(self._ends, prepend=0)

    @cached_property
    def unigram(self) -> NDArray[np.int64]:
        """How often each token is a target, (vocabulary,)."""
        return np.asarray(np.load(self.folder / "unigram.npy"), dtype=np.int64)

    def slice(self, document: int, first: int, last: int) -> NDArray[np.int64]:
        """Tokens `first..last-1` of a document, fewer at its end."""
        begin = int(self._ends[document] - self.lengths[document])
        return np.asarray(self._tokens[begin + first : min(begin + last, int(self._ends[document]))], dtype=np.int64)


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
        self._last_row: NDArray[np.int64] = np.cumsum(-(-self._targets // self._sequence))
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


def split(store: TokenStore, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Documents to train on and documents held out, each in order; chosen by nothing but how many there are.

    Raises:
        DataError: if there are too few documents to hold any out.
    """
    count = store.documents
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


def unigram_entropy(store: TokenStore, held: NDArray[np.int64]) -> float:
    """Cross-entropy in nats per token of the held-out targets under the training documents' token frequencies.

    What a model reaches that knows the frequencies and nothing else; one is added to every count.
    """
    seen = np.zeros_like(store.unigram)
    for document in held:
        seen += np.bincount(store.slice(int(document), 1, int(store.lengths[document])), minlength=len(seen))
    training = store.unigram - seen + 1
    return float(-(seen * np.log(training / training.sum())).sum() / max(1, seen.sum()))


# making a cache entry ---------------------------------------------------------------------------------------------


def prepare(config: Documents, given: Tokenizer | None) -> TokenStore:
    """The tokenised corpus, from the cache or made now; one process of a host makes it and the others wait.

    Args:
        config: where the documents are.
        given: the tokenizer; None to train one on the documents.

    Raises:
        DataError: for documents that cannot be read, or a cache that cannot be written.
    """
    found = _found(config)
    cache = config.cache or Path(os.environ.get("UNISONO_CACHE", Path.home() / ".cache" / "unisono"))
    folder = cache / "language" / _address(config, found, given)
    if not (folder / "manifest.json").is_file():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{folder}.lock", timeout=_WAIT):
                if not (folder / "manifest.json").is_file():
                    _make(folder, config, found, given)
        except Timeout as error:
            raise DataError(
                f"another process has been tokenising into {folder} for over {_WAIT:g} s; is it alive?"
            ) from error
        except OSError as error:
            raise DataError(
                f"the cache {cache} cannot be written ({error.strerror or error}); choose another by data.cache or "
                "$UNISONO_CACHE"
            ) from error
    return TokenStore(folder)


def _found(config: Documents) -> Found:
    if not isinstance(config, Corpus):
        return documents.standard_library()
    paths = config.path if isinstance(config.path, list) else [config.path]
    return documents.find(paths, config.pattern, config.split)


def _address(config: Documents, found: Found, given: Tokenizer | None) -> str:
    """What the cache entry is called: everything that decides its content."""
    described = [[file.name, file.format, file.size, file.stamp] for file in found.files]
    how: Any = config.vocab_size
    if given is not None:
        how = [hashlib.sha256(given.path.read_bytes()).hexdigest(), given.first, given.last]
    content = json.dumps([_LAYOUT, described, *_how_to_read(config), how])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _make(folder: Path, config: Documents, found: Found, given: Tokenizer | None) -> None:
    from tokenizers import Tokenizer as Engine

    temporary = folder.with_name(f"{folder.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    engine = Engine.from_file(str(given.path)) if given else _train(config, found)
    engine.no_truncation()
    engine.no_padding()
    engine.save(str(temporary / "tokenizer.json"))
    end = engine.token_to_id(END) if given is None else None
    first, last = (given.first, given.last) if given else (end, end)
    size = _size(engine)
    dtype = "<u2" if size <= 1 << 16 else "<u4"
    digest, ends, empty, total = hashlib.sha256(), [], 0, 0
    unigram = np.zeros(size, dtype=np.int64)
    with (temporary / "tokens.bin").open("wb") as output:
        for texts in _batches(config, found.files):
            filled = [text for text in texts if text]
            empty += len(texts) - len(filled)
            for encoding in _encoded(engine, filled, given):
                ids = np.asarray([*_maybe(first), *encoding.ids, *_maybe(last)], dtype=dtype)
                unigram += np.bincount(ids[1:], minlength=size)
                output.write(ids.tobytes())
                digest.update(ids.tobytes())
                total += len(ids)
                ends.append(total)
    if not total:
        what = "and the tokenizer made no token of their text" if ends else "and no text in them"
        raise DataError(f"the corpus has {len(found.files)} files {what}")
    np.save(temporary / "ends.npy", np.asarray(ends, dtype=np.int64))
    np.save(temporary / "unigram.npy", unigram)
    manifest = {
        "dtype": dtype,
        "files": len(found.files),
        "ignored": list(found.ignored),
        "documents": len(ends),
        "empty": empty,
        "tokens": total,
        "tokenizer": {"first": first, "last": last, "size": size},
        "sha256": digest.hexdigest(),
    }
    (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)  # what is left of an entry that lost its manifest
    temporary.rename(folder)


def _encoded(engine: Any, texts: list[str], given: Tokenizer | None) -> Any:
    try:
        return engine.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{given.path if given else 'the tokenizer'} cannot tokenise the documents: {error}") from error


def _train(config: Documents, found: Found) -> Any:
    """A byte-level BPE tokenizer (as GPT-2's) trained on the documents."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(_batches(config, found.files), trainer=trainer)
    return engine


def _batches(config: Documents, files: Sequence[File]) -> Iterator[list[str]]:
    batch: list[str] = []
    for file in files:
        for text in documents.read(file, *_how_to_read(config)):
            batch.append(text)
            if len(batch) == _BATCH:
                yield batch
                batch = []
    if batch:
        yield batch


def _how_to_read(config: Documents) -> tuple[str, str | None]:
    return (config.column, config.separator) if isinstance(config, Corpus) else ("text", None)


def _maybe(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def tokenizer_from(path: Path) -> Tokenizer:
    """A tokenizer from a directory of the Hugging Face kind, or from a `tokenizer.json`.

    Raises:
        DataError: where there is none, or it cannot be read.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no tokenizer at {path}: a directory with tokenizer.json, or that file, is needed")
    from tokenizers import Tokenizer as Engine

    try:
        engine = Engine.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} cannot be read as a tokenizer: {error}") from error
    beside = file.with_name("tokenizer_config.json")
    try:
        named = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    except ValueError as error:
        raise DataError(f"{beside} cannot be read as JSON: {error}") from error
    if not isinstance(named, dict):
        raise DataError(f"{beside} is a JSON {type(named).__name__}, not an object with bos_token and eos_token")
    first, last = (_special(engine, named.get(name)) for name in ("bos_token", "eos_token"))
    if last is None:
        last = _special(engine, END)
    return Tokenizer(file, first if first is not None else last, last, _size(engine))


def _size(engine: Any) -> int:
    """One more than the largest id; the number of tokens would be less where ids have gaps."""
    return max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _special(engine: Any, token: Any) -> int | None:
    """The id of a special token; configurations give it as text or as a dictionary with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return None if text is None else engine.token_to_id(text)
