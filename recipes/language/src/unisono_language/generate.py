"""The verb `generate`: text from a trained language model, or answers in a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from unisono import DataError, Run, RunError
from unisono.recipe_tools import safe_paths, say, write_whole
from unisono_language import settings
from unisono_language.data.chat import ChatTemplate
from unisono_language.data.conversations import parse_messages
from unisono_language.data.tokenizer import Tokenizer

_FILE = "@"  # before the name of a file of prompts
_GENERATION = "generation_config.json"


class _GenerationConfig(TypedDict):
    eos_token_id: NotRequired[int | list[int] | None]


def generate(
    run: Run,
    prompt: str,
    tokens: int = 64,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: str | list[str] | None = None,
    chat: bool | None = None,
    system: str | None = None,
    batch: int = 8,
    stream: bool = False,
    seed: int = 0,
    ema: bool = False,
    device: str = "auto",
) -> str | list[str] | None:
    """Continue a prompt with a run's newest checkpoint, or with a local model of Hugging Face.

    A model of conversations answers; any other continues the text, which is printed with its prompt.

    Args:
        run: its folder.
        prompt: text, may be empty; or @FILE, JSONL with a `prompt` or `messages` per line, each answered in a line.
        tokens: how many to generate; stops earlier at the end of a document or of an answer.
        temperature: 0 takes the most likely token each time; above 0, tokens are sampled from the whole vocabulary.
        top_k: sample from this many of the most likely tokens; 0: from all.
        top_p: sample from the most likely tokens whose probabilities sum to this.
        stop: text at which to stop, or in Python a list of them; it is left out.
        chat: use the chat template; by default, where the run was trained on conversations, or a model has one.
        system: first message of a conversation, which instructs the assistant.
        batch: prompts of a file that are continued together; they share the draws of the sampling.
        stream: print the text while it is written.
        seed: of the sampling.
        ema: use the moving average of the weights (ema.decay).
        device: cpu, cuda, …; auto uses an accelerator if there is one.

    Raises:
        RunError: if the numbers or the prompt are invalid.
    """
    stops = tuple([stop] if isinstance(stop, str) else stop or ())
    _check(tokens, temperature, top_k, top_p, stops, batch)
    prompts = _read_prompts(prompt)
    if stream and len(prompts) > 1:
        raise RunError("stream=true prints one text while it is written; a file of prompts is answered without it")
    tokenizer: Tokenizer = run.task.tokenizer  # type: ignore[attr-defined]
    template = _find_template(run) if chat is not False else None
    if template is None and (chat or system is not None):
        raise RunError(
            "chat=true and system= need a chat template, and this model has none; a run has one if it was trained on "
            "conversations (data=chat)"
        )
    if template is None and any(not isinstance(one, str) for one in prompts):
        raise RunError("a prompt of messages needs a chat template, and this model has none (or chat=false)")
    texts_of_run: ChatTemplate | None = run.task.chat if run.is_trained else None  # type: ignore[attr-defined]
    encoded = [encode_prompt(one, tokenizer, template, system, texts_of_run) for one in prompts]
    import torch

    model: Any = run.load_model(ema=ema, device=device)
    ends = end_tokens(_model_folder(run), tokenizer, template)
    writer = _Writer(model, tokenizer, ends, stops, tokens, _sampling(temperature, top_k, top_p))
    torch.manual_seed(seed)
    if stream:
        shown = _Shown(tokenizer, ends, stops)
        if template is None:
            say(prompts[0], end="", verbatim=True)
        writer.write(encoded, shown)
        return None
    order = sorted(range(len(encoded)), key=lambda number: len(encoded[number]))  # little padding
    texts = [""] * len(encoded)
    for first in range(0, len(order), batch):
        some = order[first : first + batch]
        for number, ids in zip(some, writer.write([encoded[number] for number in some]), strict=True):
            before = [] if template is not None else encoded[number]
            texts[number] = _cut(tokenizer.decode([*before, *ids]), stops, len(tokenizer.decode(before)))
    if not prompt.startswith(_FILE):
        return texts[0]
    return [
        json.dumps({"prompt": one, "text": text}, ensure_ascii=False) for one, text in zip(prompts, texts, strict=True)
    ]


@dataclass(frozen=True)
class _Writer:
    """Writes what follows prompts.

    Attributes:
        model: of the transformers library.
        tokenizer: of its tokens.
        ends: tokens after which a text is finished.
        stops: texts at which it is.
        tokens: at most this many.
        sampling: how the library draws.
    """

    model: Any
    tokenizer: Tokenizer
    ends: list[int]
    stops: tuple[str, ...]
    tokens: int
    sampling: dict[str, Any]

    def write(self, prompts: Sequence[list[int]], streamer: Any = None) -> list[list[int]]:
        """The tokens that follow each prompt, without those that end it."""
        import torch

        longest = max(map(len, prompts))
        pad = self.ends[0] if self.ends else 0
        inputs = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts], device=self.model.device)
        real = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts], device=self.model.device)
        stopping = [self._stopping(longest)] if self.stops else None
        with torch.no_grad():
            written = self.model.generate(
                inputs, attention_mask=real, max_new_tokens=self.tokens, eos_token_id=self.ends or None,
                pad_token_id=pad, use_cache=True, stopping_criteria=stopping, streamer=streamer, **self.sampling,
            )  # fmt: skip
        return [cut_at_end(ids, self.ends) for ids in written[:, longest:].tolist()]

    def _stopping(self, begin: int) -> Any:
        """Whether the rows of a batch have written one of the texts at which to stop."""
        import torch

        def stopping(ids: Any, scores: Any, **_: Any) -> Any:
            texts = (self.tokenizer.decode(row) for row in ids[:, begin:].tolist())
            return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=ids.device)

        return stopping


@dataclass
class _Shown:
    """Prints a text while it is written: complete characters, and nothing that may become a text at which to stop."""

    tokenizer: Tokenizer
    ends: list[int]
    stops: tuple[str, ...]
    _ids: list[int] | None = None  # after the prompt, which comes first
    _shown: str = field(default="")

    def put(self, ids: Any) -> None:
        """Take the prompt, and then each token."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += [token for token in ids.reshape(-1).tolist() if token not in self.ends]
        text = _cut(self.tokenizer.decode(self._ids), self.stops)
        held = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        self._show(text[: len(text) - held].rstrip("\ufffd"))

    def end(self) -> None:
        """Print what was held back, and end the line."""
        self._show(_cut(self.tokenizer.decode(self._ids or []), self.stops))
        say()

    def _show(self, text: str) -> None:
        if len(text) > len(self._shown):
            say(text[len(self._shown) :], end="", verbatim=True)
            self._shown = text


def _cut(text: str, stops: Sequence[str], begin: int = 0) -> str:
    """The text before the first of `stops` at or after `begin`."""
    places = [place for stop in stops if (place := text.find(stop, begin)) >= 0]
    return text[: min(places, default=len(text))]


def _check(tokens: int, temperature: float, top_k: int, top_p: float, stops: Sequence[str], batch: int) -> None:
    if tokens < 1:
        raise RunError(f"tokens={tokens}: at least one token must be generated")
    if temperature < 0:
        raise RunError(f"temperature={temperature:g} is negative; 0 takes the most likely token each time")
    if top_k < 0:
        raise RunError(f"top_k={top_k} is negative; 0 samples from all tokens")
    if not 0 < top_p <= 1:
        raise RunError(f"top_p={top_p:g} is not a probability above 0; 1 samples from all tokens")
    if temperature == 0 and (top_k or top_p < 1):
        raise RunError("top_k and top_p choose among tokens to sample from, and temperature=0 samples none; set it")
    if batch < 1:
        raise RunError(f"batch={batch}: at least one prompt must be continued at a time")
    if "" in stops:
        raise RunError("stop: an empty text would stop before the first token")


def _sampling(temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    """Keywords of the library, which would sample from the 50 most likely tokens by default."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": float(temperature), "top_k": top_k, "top_p": float(top_p)}


def _read_prompts(prompt: str) -> list[Any]:
    """The prompt, or those of a file: texts, or lists of messages."""
    if not prompt.startswith(_FILE):
        return [prompt]
    path = Path(prompt.removeprefix(_FILE))
    try:
        lines = safe_paths.read_regular(path).decode().splitlines()
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read as a file of prompts: {error}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = safe_paths.parse_json(line, str | list[Any] | dict[str, Any])
            value = row.get("messages", row.get("prompt")) if isinstance(row, dict) else row
            prompts.append(value if isinstance(value, str) else parse_messages(value, "prompt"))
        except (ValueError, DataError) as error:
            raise RunError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise RunError(f"{path} has no prompts")
    return prompts


def _find_template(run: Run) -> ChatTemplate | None:
    """The template of a run of conversations, or of a model without a run."""
    task: Any = run.task
    if not run.is_trained and isinstance(task.model_config, settings.Pretrained):
        found = ChatTemplate.from_tokenizer(task.model_config.path, None, {}, "assistant")
        return found if found.source else None
    trained_on: ChatTemplate | None = task.chat
    return trained_on if trained_on is not None and trained_on.source else None


def _model_folder(run: Run) -> Path:
    """Where the files of a run's model are, or of a model without a run."""
    folder: Path = getattr(run.task.model_config, "path", run.folder)
    return run.folder / "assets" if run.is_trained else folder


def encode_prompt(
    prompt: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    system: str | None,
    texts: ChatTemplate | None = None,
) -> list[int]:
    """The tokens after which the model writes; `texts` is of a run that may have completed texts in training."""
    if template is not None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        before = [] if system is None else [{"role": "system", "content": system}]
        return template.encode_prompt([*before, *messages], tokenizer)
    if texts is not None:
        ids = texts.encode_text_prompt(prompt, tokenizer)
    else:
        ids = tokenizer.encode([prompt])[0].tolist()
        ids = ids[:-1] if tokenizer.last is not None else ids
    if not ids:
        raise RunError("the prompt is empty, and this tokenizer has no begin-of-document token; give a prompt")
    return ids


def write_generation_config(folder: Path, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Have whoever loads a model of conversations end its answers where `generate` does.

    Args:
        folder: assets of the run, with the `generation_config.json` of its base, if that has one.
        tokenizer: of its tokens.
        template: of the conversations.
    """
    if not template.source:
        return
    is_there = (folder / _GENERATION).is_file()
    values = safe_paths.read_json(folder, _GENERATION, dict[str, Any]) if is_there else {}
    if not is_there:
        values = {"bos_token_id": tokenizer.first, "pad_token_id": tokenizer.last}
    if ends := end_tokens(folder, tokenizer, template):
        write_whole(folder / _GENERATION, json.dumps({**values, "eos_token_id": ends}, indent=2))


def cut_at_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """What stands before the first token that ends a text."""
    place = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return ids[:place]


def end_tokens(folder: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    """Tokens after which a document or an answer is finished; an answer also by what its model's files say.

    Args:
        folder: with the files of the model, or the assets of a run.
        tokenizer: of its tokens.
        template: of conversations; None where texts are continued.
    """
    ends = [tokenizer.last]
    if template is not None:
        ends.append(template.find_end(tokenizer))
        if (folder / _GENERATION).is_file():
            named = safe_paths.read_json(folder, _GENERATION, _GenerationConfig).get("eos_token_id")
            ends += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(end for end in ends if isinstance(end, int)))
