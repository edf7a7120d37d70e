"""What a trained language model writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.exchange import hf_config
from unisono.launch.load import adapter_of, load_model, load_weights
from unisono.runtime import safe_paths
from unisono.runtime.errors import RunError

if TYPE_CHECKING:
    from torch import nn

    from unisono.config.schema.run import RunConfig


def generate(
    folder: Path, prompt: str, tokens: int = 64, temperature: float = 0.0, seed: int = 0, ema: bool = False
) -> str:
    """The prompt and its continuation by a run's newest checkpoint.

    Args:
        folder: of the run.
        prompt: text; may be empty.
        tokens: how many to write; it stops earlier at the end of a document.
        temperature: 0 takes the likeliest token each time; above it, tokens are drawn, from the whole vocabulary.
        seed: of the draws.
        ema: whether the moving average of the weights writes.

    Raises:
        RunError: if this is not a run of a language model, or numbers or prompt leave nothing to write from.
    """
    if tokens < 1:
        raise RunError(f"tokens={tokens}: at least one has to be written")
    if temperature < 0:
        raise RunError(f"temperature={temperature:g} is negative; 0 takes the likeliest token each time")
    assets = folder / "assets"
    if not (assets / "tokenizer.json").is_file():
        raise RunError(f"{folder} is not a run of the language recipe: it has no assets/tokenizer.json")
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    with _naming(assets / "tokenizer.json"):
        tokenizer = Tokenizer.from_str(safe_paths.read_text(folder, "assets/tokenizer.json"))
    with _naming(assets / "special_tokens.json"):
        special = safe_paths.read_json(folder, "assets/special_tokens.json")
    with _naming(assets / "config.json"):
        config = hf_config.read_config(assets)
    if adapter_of(folder):  # the checkpoint has no base
        model: Any = merged(folder, ema)
    else:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, experts_implementation="eager", trust_remote_code=False
        )
        load_weights(folder, model, ema=ema)
    model.eval()
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    first = [] if special["first"] is None else [special["first"]]
    if not (first or ids):
        raise RunError("the prompt has no token, and this tokenizer has none that begins a document; give a prompt")
    torch.manual_seed(seed)
    # transformers would draw from the 50 likeliest tokens if it were not told otherwise
    drawn = {"do_sample": True, "temperature": float(temperature), "top_k": 0} if temperature else {"do_sample": False}
    inputs = torch.tensor([[*first, *ids]])
    with torch.no_grad():
        written = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, eos_token_id=special["last"],
            pad_token_id=special["last"], use_cache=True, **drawn,
        )  # fmt: skip
    return str(tokenizer.decode(written[0].tolist(), skip_special_tokens=True))


def merged(folder: Path, ema: bool = False, step: int | None = None) -> nn.Module:
    """The model of a run with its adapters merged, without the run's documents; arguments as of `load_model`."""
    from tokenizers import Tokenizer

    with _naming(folder / "assets" / "tokenizer.json"):
        size = Tokenizer.from_str(safe_paths.read_text(folder, "assets/tokenizer.json")).get_vocab_size()
    model: nn.Module = load_model(folder, ema=ema, step=step, build=partial(_base, vocab_size=size))
    return model


def _base(config: RunConfig, vocab_size: int) -> nn.Module:
    from unisono.recipes.language import model as models

    return models.build(config.model, vocab_size)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Any fault in reading an asset becomes one that names it; each library has its own kinds."""
    try:
        yield
    except Exception as error:
        raise RunError(f"{path} cannot be read: {error}") from error
