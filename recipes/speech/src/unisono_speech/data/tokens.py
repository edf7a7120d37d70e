"""Text as tokens, and the control tokens of a prompt; the small model reads bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono import ConfigError
from unisono.recipe_tools import safe_paths, wrap_native_errors

FILE = "tokenizer.json"
BEGIN, PAD, TURN = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
HEADER, HEADER_END = "<|start_header_id|>", "<|end_header_id|>"
AUDIO_BEGIN, AUDIO_END = "<|audio_out_bos|>", "<|audio_eos|>"
AUDIO, DELAY = "<|AUDIO_OUT|>", "<|reserved_special_token_6|>"  # places of frames; the second while the stream ends
SCENE, SCENE_END = "<|scene_desc_start|>", "<|scene_desc_end|>"
CONTROLS = (BEGIN, PAD, TURN, HEADER, HEADER_END, AUDIO_BEGIN, AUDIO_END, AUDIO, DELAY, SCENE, SCENE_END)


@dataclass(frozen=True, eq=False)
class Tokens:
    """A tokenizer with the control tokens of Higgs Audio.

    Attributes:
        engine: of the tokenizers library.
        ids: of the control tokens.
    """

    engine: Any
    ids: dict[str, int]

    @classmethod
    def from_engine(cls, engine: Any, where: str) -> Tokens:
        """A tokenizer, looked through for the control tokens; one that is missing is named."""
        ids = {name: engine.token_to_id(name) for name in CONTROLS}
        missing = [name for name, number in ids.items() if number is None]
        if missing:
            raise ConfigError(f"{where} has no token {missing[0]}; it is not the tokenizer of a Higgs Audio v2 model")
        return cls(engine, ids)

    @property
    def size(self) -> int:
        """Ids that there are."""
        return int(self.engine.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, whose control tokens are read as such."""
        ids: list[int] = self.engine.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens among them."""
        return str(self.engine.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write it as transformers and the tokenizers library read it."""
        self.engine.save(str(folder / FILE))


def of_bytes() -> Tokens:
    """A tokenizer of the 256 bytes and the control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    engine = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens(list(CONTROLS))
    return Tokens.from_engine(engine, "the tokenizer of bytes")


def read(folder: Path) -> Tokens:
    """The tokenizer of a model's or a run's folder; none, or another model's, is refused."""
    from tokenizers import Tokenizer

    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{folder} has no {FILE}; a Higgs Audio v2 model has its tokenizer next to its weights")
    with wrap_native_errors(f"{path} cannot be read", ConfigError), safe_paths.open_inside(folder, FILE) as file:
        engine = Tokenizer.from_file(safe_paths.path_of(file))
    return Tokens.from_engine(engine, str(path))
