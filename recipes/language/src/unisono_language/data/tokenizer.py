"""Tokenizers: given as a file, or trained on the documents."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NotRequired

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from unisono import DataError, compute_once
from unisono.recipe_tools import preparing, safe_paths, show_progress, wrap_native_errors, write_whole
from unisono_language.data.texts import Texts, digest

END = "<|endoftext|>"
FILE, SPECIAL = "tokenizer.json", "special_tokens.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_BLANK, _BYTE = "\N{LOWER ONE EIGHTH BLOCK}", re.compile("<0x[0-9A-F]{2}>")  # in vocabularies of SentencePiece
_BATCH = 256  # documents per call of the tokenizer
_CHARACTERS = 1 << 22  # per call of the tokenizer
_LARGEST_VOCABULARY = 1 << 24
_MOST_WRITTEN = 256  # characters that a normaliser or a decoder may make of one
_LONGEST_PIECE = 1024  # characters of a piece of a vocabulary
_MOST_COMPARED = 1000  # rules of a normaliser, each with each


class _SpecialTokens(TypedDict):
    first: int | None
    last: int | None


class _Named(TypedDict):
    content: str


class _Rules(TypedDict):
    decoder: dict[str, Any] | None


class _Settings(TypedDict):
    bos_token: NotRequired[str | _Named | None]
    eos_token: NotRequired[str | _Named | None]


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

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds its ids."""
        return "<u2" if self.size <= 1 << 16 else "<u4"

    @cached_property
    def digest(self) -> str:
        """A hash of its rules and special tokens, independent of how its file is formatted."""
        return digest([read_engine(self.path).to_str(), self.first, self.last])

    @property
    def describe(self) -> dict[str, Any]:
        """As JSON, for a manifest."""
        return {"digest": self.digest, "first": self.first, "last": self.last, "size": self.size}

    @cached_property
    def token_bytes(self) -> NDArray[np.float64] | None:
        """Bytes of UTF-8 that each token stands for, (size,); special tokens none. None if they cannot be known.

        They are of the text as the tokenizer has normalised it.
        """
        engine = read_engine(self.path)
        measure = _measure_bytes(engine)
        if measure is None:
            return None
        sizes = np.zeros(self.size, dtype=np.float64)
        added = engine.get_added_tokens_decoder()
        for token, number in engine.get_vocab(with_added_tokens=True).items():
            sizes[number] = len(token.encode()) if number in added else measure(token)
        for number, token in added.items():
            if token.special:
                sizes[number] = 0.0
        return sizes

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Token ids of documents one after the other, with the special tokens: ids (n,) and lengths (documents,)."""
        engine = read_engine(self.path)
        with wrap_native_errors(f"{self.path} cannot tokenise the documents"):
            encodings = engine.encode_batch_fast(texts, add_special_tokens=False)
        before, after = int(self.first is not None), int(self.last is not None)
        lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings)) + before + after
        ids = np.empty(int(lengths.sum()), dtype=self.dtype)
        begin = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            ids[begin + before : begin + length - after] = encoding.ids
            if before:
                ids[begin] = self.first
            if after:
                ids[begin + length - 1] = self.last
            begin += length
        return ids, lengths

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        engine = read_engine(self.path)
        with wrap_native_errors(f"{self.path} cannot decode tokens"):
            return str(engine.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        """Write it into a folder, from which `load` reads it on any machine."""
        write_whole(folder / FILE, read_engine(self.path).to_str())
        write_whole(folder / SPECIAL, json.dumps({"first": self.first, "last": self.last}))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load what `save` has written; the folder need not be trusted, and links are refused."""
        try:
            special = safe_paths.read_json(folder, SPECIAL, _SpecialTokens)
            safe_paths.open_inside(folder, FILE).close()
            return cls(folder / FILE, special["first"], special["last"], vocabulary_size(read_engine(folder / FILE)))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: its tokenizer ({FILE}, {SPECIAL}) cannot be read: {error}; copy both from where the data "
                "were prepared"
            ) from error


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from a directory of the Hugging Face kind, or from a `tokenizer.json`."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(f"no tokenizer at {path}: give a directory with tokenizer.json, or that file")
    if path.is_dir():
        safe_paths.check_link(path, FILE)
    engine = read_engine(file)
    beside = file.with_name("tokenizer_config.json")
    try:
        named = safe_paths.read_json(beside.parent, beside.name, _Settings) if os.path.lexists(beside) else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{beside} does not have the settings of a tokenizer: {error}") from error
    first, last = (_special_id(engine, named.get(name)) for name in ("bos_token", "eos_token"))
    if last is None:
        last = _special_id(engine, END)
    return Tokenizer(file, first if first is not None else last, last, vocabulary_size(engine))


def train_tokenizer(corpora: Mapping[str, Texts], vocab_size: int, cache: Path | None) -> Tokenizer:
    """A byte-level BPE tokenizer (as GPT-2's) trained on all documents, once, and kept in the cache."""

    def train(folder: Path) -> None:
        count = sum(len(texts) for texts in corpora.values())
        with ExitStack() as merging:

            def iterate() -> Iterator[str]:
                with show_progress("reading for a tokenizer", count, "", "documents", patience=2.0) as progress:
                    for _, texts in sorted(corpora.items()):
                        for text in texts.iterate():
                            yield text
                            progress(1, 0)
                merging.enter_context(preparing(f"merging pairs for {vocab_size} tokens"))  # what comes after the last

            engine = _train(iterate(), vocab_size)
        engine.save(str(folder / FILE))
        end = engine.token_to_id(END)
        (folder / SPECIAL).write_text(json.dumps({"first": end, "last": end}), encoding="utf-8")

    stamps = [[name, texts.stamp] for name, texts in sorted(corpora.items())]
    return compute_once("tokenizers", [vocab_size, stamps], train, Tokenizer.load, cache=cache)


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Documents for one call of the tokenizer each."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _BATCH or characters >= _CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def vocabulary_size(engine: Any) -> int:
    """The largest id plus one, which exceeds the number of tokens if ids have gaps.

    Raises:
        DataError: for an id that no vocabulary reaches, since tables have a row for each.
    """
    size = max(engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if size > _LARGEST_VOCABULARY:
        raise DataError(f"a tokenizer has the id {size - 1}, where none has {_LARGEST_VOCABULARY} or more; number them")
    return size


def read_engine(path: Path) -> Any:
    """The tokenizer of a file, read once, without the truncation and padding that the file may ask for."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read as a tokenizer: {error}") from error
    return _load(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=8)
def _load(path: Path, size: int, written: int) -> Any:
    from tokenizers import Tokenizer as Engine

    with wrap_native_errors(f"{path} cannot be read as a tokenizer"), safe_paths.open_regular(path) as file:
        engine = Engine.from_file(safe_paths.path_of(file))
    _check_expansion(path, "normalizer", getattr(engine, "normalizer", None))
    _check_expansion(path, "decoder", getattr(engine, "decoder", None))
    _check_pieces(path, engine)
    if getattr(engine.model, "dropout", None):
        raise DataError(
            f"{path} draws random numbers (model.dropout={engine.model.dropout}), so its tokens are not reproducible; "
            "set its dropout to null"
        )
    engine.no_truncation()
    engine.no_padding()
    return engine


def _check_expansion(path: Path, part: str, written_by: Any) -> None:
    """Refuse a normaliser, or a decoder, that makes a long text of every character: memory and hours."""
    if written_by is None:
        return
    rules = list(_flat_rules(safe_paths.parse_json(written_by.__getstate__(), dict[str, Any])))
    chains: list[tuple[int, list[int]]] = []  # of each rule from the last on: what it makes of one, and by which rules
    for number in reversed(range(len(rules))):
        written = _written_length(rules[number])
        later = [chain for chain, reached in zip(reversed(chains), _reached(rules, number), strict=True) if reached]
        most, others = max(later, default=(1, []), key=lambda chain: chain[0])
        chains.append((written * most, [number, *others]) if written > 1 else (most, others))
        if chains[-1][0] > _MOST_WRITTEN:
            what = ", ".join(map(str, chains[-1][1][:8]))
            raise DataError(
                f"{path} makes up to {chains[-1][0]} characters of one by rules of its {part} (from 0): {what}; "
                f"shorten what they write to {_MOST_WRITTEN} in all"
            )


def _check_pieces(path: Path, engine: Any) -> None:
    """Refuse pieces so long that the library, which compares them at every place of a text, takes hours."""
    longest = max(engine.get_vocab(with_added_tokens=False), key=len, default="")
    if len(longest) > _LONGEST_PIECE:
        raise DataError(
            f"{path} has a piece of {len(longest)} characters in its vocabulary, more than {_LONGEST_PIECE}, which no "
            f"text needs; remove it: {longest[:40]!r}…"
        )


def _written_length(rule: dict[str, Any]) -> int:
    """How many characters a rule writes in place of one, at most."""
    if "precompiled_charsmap" not in rule:
        return len(rule.get("content", rule.get("prepend", "")))
    table = b64decode(rule["precompiled_charsmap"])  # of SentencePiece: an index, and texts that end with a zero
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _flat_rules(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = rule.get("normalizers", rule.get("decoders"))
    for part in parts or ():
        yield from _flat_rules(part)
    if parts is None:
        yield rule


def _reached(rules: list[dict[str, Any]], number: int) -> Iterator[bool]:
    """Whether each rule after this one may replace what it writes; one for other characters is known not to."""
    written = set(rules[number].get("content", rules[number].get("prepend", "")))
    anything = len(rules) > _MOST_COMPARED or not written  # as of a rule that changes characters, e.g. to lower case
    for rule in rules[number + 1 :]:
        searched = rule.get("pattern", {}).get("String")
        yield anything or not searched or not written.isdisjoint(searched)
        anything = anything or not {"content", "prepend"} & rule.keys()


def _measure_bytes(engine: Any) -> Callable[[str], int] | None:
    """How many bytes a token of the vocabulary stands for, of those decoders that lose none; else None."""
    decoder = safe_paths.parse_json(engine.to_str(), _Rules)["decoder"] or {}
    parts: list[dict[str, Any]] = [decoder, *decoder.get("decoders", ())]
    kinds = {part.get("type") for part in parts}
    if "ByteLevel" in kinds:  # a character for each byte
        return len
    blank = any(part.get("type") == "Replace" and part["pattern"] == {"String": _BLANK} for part in parts)
    if blank or kinds & {"Metaspace", "ByteFallback"}:
        return lambda token: 1 if _BYTE.fullmatch(token) else len(token.replace(_BLANK, " ").encode())
    return None


def _train(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, trainers

    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(batches(texts), trainer=trainer)
    return engine


def _special_id(engine: Any, token: Any) -> int | None:
    """The id of a special token; configurations give it as text or as a dictionary with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    with wrap_native_errors(f"a tokenizer cannot have the special token {text!r:.40}"):
        return None if text is None else engine.token_to_id(text)
