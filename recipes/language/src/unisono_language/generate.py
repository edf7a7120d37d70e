"""The verb `generate`: text from a trained language model."""

from __future__ import annotations

from typing import Any

from unisono import Run, RunError


def generate(
    run: Run,
    prompt: str,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    ema: bool = False,
    device: str = "auto",
) -> str:
    """Continue a prompt with a run's newest checkpoint, or with a local model of Hugging Face.

    Args:
        run: its folder.
        prompt: text; may be empty.
        tokens: how many to generate; stops earlier at the end of a document.
        temperature: 0 takes the most likely token each time; above 0, tokens are sampled from the whole vocabulary.
        seed: of the sampling.
        ema: use the moving average of the weights (ema.decay).
        device: cpu, cuda, …; auto uses an accelerator if there is one.

    Raises:
        RunError: if the numbers or the prompt are invalid.
    """
    if tokens < 1:
        raise RunError(f"tokens={tokens}: at least one token must be generated")
    if temperature < 0:
        raise RunError(f"temperature={temperature:g} is negative; 0 takes the most likely token each time")
    import torch

    model: Any = run.load_model(ema=ema, device=device)
    tokenizer: Any = run.task.tokenizer  # type: ignore[attr-defined]
    ids = tokenizer.encode([prompt])[0].tolist()
    ids = ids[:-1] if tokenizer.last is not None else ids
    if not ids:
        raise RunError("the prompt is empty, and this tokenizer has no begin-of-document token; give a prompt")
    torch.manual_seed(seed)
    # transformers would sample from the 50 most likely tokens by default
    drawn = {"do_sample": True, "temperature": float(temperature), "top_k": 0} if temperature else {"do_sample": False}
    inputs = torch.tensor([ids], device=model.device)
    with torch.no_grad():
        written = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, eos_token_id=tokenizer.last,
            pad_token_id=tokenizer.last, use_cache=True, **drawn,
        )  # fmt: skip
    return str(tokenizer.decode(written[0].tolist()))
