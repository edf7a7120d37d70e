"""What these tests read and train: a difficult corpus, small models, and where the real data lie."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

import unisono
from unisono.checkpoint.core import assets, commit, manifest
from unisono.data.prepare import shards
from unisono.data.prepare.preparation import Made, prepare
from unisono.runtime.files import cache_dir
from unisono_language.data import tokens
from unisono_language.data.texts import Texts
from unisono_language.data.tokenizer import Tokenizer, train_tokenizer
from unisono_language.data.tokens import TokenStore
from unisono_language.settings import Corpus, EmbeddedDocuments, FromConfig, LanguageConfig
from unisono_language.task import Language

DIFFICULT = [
    "The first document.\nIt has two lines.\n",
    "second",
    "emoji 🎻👩‍👩‍👧 and flags 🇩🇪, combining e\u0301, full width Ａ",
    "right to left: שלום עולם, مرحبا بالعالم \u202eabc\u202c",
    "a NUL \x00 inside, a tab\t, a form feed \x0c, a bell \x07",
    "Windows lines\r\nand old Mac lines\rand one more\r\n",
    "line separators \u2028 and \u2029, next line \x85, byte order mark inside \ufeff.",
    "  blanks before and after  ",
    '"quotes" and {"json": [1, 2]} and \\u0041 \\n escapes',
    " " * 3,
    "\n",
    "a line of a megabyte " * 50_000,
    "the last one",
]


def sign_assets(run: Path) -> None:
    """Write the digests of a run's assets into its checkpoints, as if the run had been trained with what lies there."""
    for checkpoint in commit.find_checkpoints(run / "checkpoints"):
        content = json.loads((checkpoint / manifest.NAME).read_bytes())
        del content["sha256"]
        content["assets"] = assets.digests(run)
        (checkpoint / manifest.NAME).write_bytes(manifest.encode(content))


def sentences(count: int, seed: int = 3) -> list[str]:
    """Documents of made-up words, 2 to 39 words long."""
    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 6))) for _ in range(50)]
    return [" ".join(rng.choice(words, size=rng.integers(2, 40))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[Any], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def corpus(path: Path | list[Path], **settings: Any) -> Corpus:
    """The `data` group of a corpus, with a small tokenizer of its own unless another is given."""
    return Corpus(kind="corpus", path=path, **{"vocab_size": 300, "held_out": 0.2, **settings})


QUIET = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # by default ids of a large one
WIDTH = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**WIDTH, "num_key_value_heads": 2}
WIDE = {**GROUPED, "hidden_size": 64}  # heads of 16 features, the fewest that flex attention takes
WIDE_MODELS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen3": {**WIDE, "head_dim": 16},
    "mistral": {**WIDE, "sliding_window": 4},
    "gpt2": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
}  # fmt: skip

# name -> (architecture, settings, whether the logits are the head times the hidden states and nothing else)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "llama": ("llama", GROUPED, True),
    "llama, tied": ("llama", {**GROUPED, "tie_word_embeddings": True}, True),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}, True),
    "qwen3, untied": ("qwen3", {**GROUPED, "head_dim": 8, "tie_word_embeddings": False}, True),
    "qwen3, tied": ("qwen3", {**GROUPED, "head_dim": 8, "tie_word_embeddings": True}, True),
    "mistral, short window": ("mistral", {**GROUPED, "sliding_window": 4}, True),
    "phi, head with a bias": ("phi", WIDTH, True),
    "gpt_neox": ("gpt_neox", WIDTH, True),
    "olmo2": ("olmo2", {**GROUPED, "pad_token_id": None}, True),
    "opt, narrow embeddings": (
        "opt",
        {
            "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 16, "max_position_embeddings": 64, "dropout": 0.0,
        },
        True,
    ),
    "gemma2, soft cap": (
        "gemma2",
        {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 5.0},
        False,
    ),
    "granite, scaled logits": ("granite", {**GROUPED, "logits_scaling": 4.0}, False),
    "cohere, scaled logits": ("cohere", {**GROUPED, "pad_token_id": None}, False),
}  # fmt: skip


def model(name: str) -> FromConfig:
    """The `model` group of one of the `ARCHITECTURES`."""
    architecture, settings, _ = ARCHITECTURES[name]
    attention = "eager" if architecture == "gemma2" else "sdpa"
    quiet = {"bos_token_id": None, "eos_token_id": None}  # else the defaults lie outside of a small vocabulary
    return FromConfig(kind="config", architecture=architecture, settings={**quiet, **settings}, attention=attention)


def task(data: Corpus, name: str = "llama, tied", **settings: Any) -> Language:
    """The language task with a small model on a corpus."""
    return Language(LanguageConfig(**{"sequence": 16, "pad_to_multiple": 4, **settings}), model=model(name), data=data)


def task_of(data: Corpus, architecture: str, settings: dict[str, Any], sequence: int = 16, **group: Any) -> Language:
    """The language task with a model of these settings, and others of the group `model`."""
    model = {"kind": "config", "architecture": architecture, "settings": {**QUIET, **settings}, **group}
    rows = LanguageConfig(sequence=sequence, pad_to_multiple=4)
    return Language(rows, model=FromConfig.model_validate(model), data=data)


def overrides(data: Path, runs: Path, **more: Any) -> dict[str, Any]:
    """Dotted keys for a run of the recipe on this corpus: one process, a small llama, and little else."""
    return {
        "layout.world_size": 1, "layout.threads": 1, "model.settings": {**GROUPED, "tie_word_embeddings": True},
        "data": "corpus", "data.path": str(data), "data.vocab_size": 300, "task.sequence": 16,
        "task.pad_to_multiple": 4, "train.steps": 2, "train.global_batch": 4, "eval.every": None,
        "checkpoint.every": None, "observe.trackers": [], "run.dir": str(runs), "run.name": "run", **more,
    }  # fmt: skip


KNOWN = "the quick brown fox jumps over the lazy dog"
TEXTS = [KNOWN, "pack my box with five dozen liquor jugs", "sphinx of black quartz, judge my vow"]
BY_HEART = {"train.steps": 60, "train.global_batch": 3, "task.sequence": 64}  # what it takes to learn these


def trained(folder: Path, name: str = "run", **settings: Any) -> Any:
    """The result of a run on what lies in `folder/corpus`, with its cache beside it and nothing held out."""
    alone = {"data.cache": str(folder / "cache"), "data.held_out": 0.0, "observe.progress": False}
    values = overrides(folder / "corpus", folder / "runs", **{"run.name": name, "optim.lr": 1e-2, **alone, **settings})
    if "model.path" in values:
        del values["model.settings"]
    return unisono.train("language", values)


def store_of(folder: Path, lengths: list[int], per_block: int | None = None) -> TokenStore:
    """A store whose tokens are all different: token `n` is the n-th of the corpus.

    Args:
        folder: for it.
        lengths: tokens per document.
        per_block: units after which a record batch is full.
    """

    class Counting:
        records, column, dtype, known_inputs = len(lengths), "tokens", "<u2", {}
        inputs: ClassVar[dict[str, Any]] = {"source": {"files": 1, "ignored": []}}

        def bounds(self, shard_mb: float) -> list[int]:
            return [0, self.records]

        def begin(self, folder: Path) -> Counting:
            Engine(models.WordLevel({str(n): n for n in range(sum(lengths))})).save(str(folder / "tokenizer.json"))
            (folder / "special_tokens.json").write_text(json.dumps({"first": None, "last": None}))
            self.inputs = {**self.inputs, "tokenizer": Tokenizer.load(folder).describe}
            return self

        def make(self, first: int, last: int) -> Iterator[Made]:
            yield Made(np.arange(sum(lengths)), np.asarray(lengths, dtype=np.int64), self.records)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "_BATCH_UNITS", per_block or shards._BATCH_UNITS)
        prepare(Counting(), folder / "store")
    return TokenStore(folder / "store")


def tokenised(config: Corpus | EmbeddedDocuments, given: Tokenizer | None = None) -> TokenStore:
    """The tokens of the only corpus of these settings, by a tokenizer that is given or trained on it."""
    texts = Texts.from_files(config.files[""] if isinstance(config, Corpus) else None)
    cache = config.cache or cache_dir()
    return tokens.load_tokens(texts, given or train_tokenizer({"": texts}, config.vocab_size, cache), cache)


def store_in(language: Language) -> TokenStore:
    """The tokens of a task that has one corpus."""
    store = language.library.corpora[""]
    assert isinstance(store, TokenStore)
    return store


def decoded(store: TokenStore) -> list[str]:
    """Every document as text again, without the tokens at its ends."""
    engine, special = Engine.from_file(str(store.tokenizer.path)), store.tokenizer
    found = []
    for number in range(len(store)):
        ids = store.slice(number, 0, int(store.lengths[number])).tolist()
        assert ids[0] == special.first
        assert ids[-1] == special.last
        found.append(engine.decode(ids[1:-1], skip_special_tokens=False))
    return found


def word_level(path: Path, vocabulary: dict[str, int], **beside: Any) -> Path:
    """A tokenizer's directory: words at blanks, and a `tokenizer_config.json` if there is something for it."""
    path.mkdir(parents=True)
    engine = Engine(models.WordLevel(vocabulary))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.decoder = decoders.Fuse()
    engine.save(str(path / "tokenizer.json"))
    if beside:
        (path / "tokenizer_config.json").write_text(json.dumps(beside))
    return path
