"""What a trained language model writes."""

from __future__ import annotations

import json
from pathlib import Path

from unisono.errors import RunError
from unisono.launch.reload import load_weights


def generate(folder: Path, prompt: str, tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> str:
    """The prompt and its continuation by a run's newest checkpoint.

    Args:
        folder: of the run.
        prompt: text; may be empty.
        tokens: how many to write; it stops earlier at the end of a document.
        temperature: 0 takes the likeliest token each time; above it, tokens are drawn.
        seed: of the draws.

    Raises:
        RunError: if this is not a run of a language model.
    """
    assets = folder / "assets"
    if not (assets / "tokenizer.json").is_file():
        raise RunError(f"{folder} is not a run of the language recipe: it has no assets/tokenizer.json")
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(assets, local_files_only=True), dtype=torch.float32
    )
    load_weights(folder, model)
    model.eval()
    tokenizer = Tokenizer.from_file(str(assets / "tokenizer.json"))
    special = json.loads((assets / "special_tokens.json").read_text(encoding="utf-8"))
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    first = [] if special["first"] is None else [special["first"]]
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    inputs = torch.tensor([[*first, *ids]])
    with torch.no_grad():
        written = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, eos_token_id=special["last"],
            pad_token_id=special["last"], use_cache=True, **drawn,
        )  # fmt: skip
    return str(tokenizer.decode(written[0].tolist(), skip_special_tokens=True))
