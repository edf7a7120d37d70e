"""Prompts that a run continues after each evaluation, so that somebody can read how it learns.

The likeliest token is taken each time, so that samples of different steps can be compared. Every token is a pass over
the whole text: a few prompts cost little beside an evaluation, and no layout needs a cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono import Batch, Callback, RunInfo
from unisono_language.chat import ChatTemplate
from unisono_language.generate import encode_prompt
from unisono_language.settings import LanguageConfig
from unisono_language.tokenizer import Tokenizer

NAME = "samples"  # of the table, in events and trackers


class Prompted(Protocol):
    """The task: prompts, and how they are encoded."""

    config: LanguageConfig

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the documents."""

    @property
    def chat(self) -> ChatTemplate | None:
        """Of conversations."""


class PromptSamples(Callback):
    """Continues `task.prompts` after each evaluation, on all processes together."""

    def __init__(self, task: Prompted) -> None:
        super().__init__()
        self._task = task

    def on_start(self, run: RunInfo) -> None:
        """Remember the run, and encode the prompts as `generate` does."""
        self._run, tokenizer = run, self._task.tokenizer
        chat: ChatTemplate | None = self._task.chat
        template = chat if chat is not None and chat.source else None
        texts = chat if template is None else None
        self._prompts = [
            np.array(encode_prompt(prompt, tokenizer, template, None, texts), dtype=np.int64)
            for prompt in self._task.config.prompts
        ]

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Publish a table with what the model writes after each prompt."""
        written: list[NDArray[np.int64]] = list(self._prompts)
        for _ in range(self._task.config.prompt_tokens):  # on every process as many: they compute together
            # A row predicts all tokens but its first, so that the token after its end needs one more at its place.
            rows = [np.append(ids[-self._task.config.sequence :], 0) for ids in written]
            likeliest = self._run.read_outputs(rows, _likeliest_next)
            written = [np.append(ids, token) for ids, token in zip(written, likeliest, strict=True)]
        tokenizer = self._task.tokenizer
        table = []
        for prompt, before, ids in zip(self._task.config.prompts, self._prompts, written, strict=True):
            own = ids[len(before) :].tolist()
            end = own.index(tokenizer.last) if tokenizer.last in own else len(own)
            table.append({"prompt": prompt, "text": tokenizer.decode(own[:end])})
        self._run.publish(step, NAME, table)


def _likeliest_next(outputs: dict[str, Any], batch: Batch) -> list[int]:
    """The likeliest token after the last real one of each row."""
    import torch

    from unisono_language.chat import IGNORED

    ends = (batch["targets"] != IGNORED).sum(1) - 1
    rows = torch.arange(len(ends), device=ends.device)
    if "logits" in outputs:
        logits = outputs["logits"][rows, ends]
    else:
        logits = torch.nn.functional.linear(outputs["hidden"][rows, ends], outputs["weight"], outputs["bias"])
    likeliest: list[int] = logits.float().argmax(-1).tolist()
    return likeliest
