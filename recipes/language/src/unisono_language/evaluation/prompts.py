"""Prompts that a run continues after each evaluation, so that somebody can read how it learns.

The likeliest token is taken each time, so that samples of different steps can be compared. Every token is a pass over
the whole text: a few prompts cost little beside an evaluation, and no layout needs a cache of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from unisono import Batch, Callback, RunInfo
from unisono_language.data.chat import IGNORED, ChatTemplate
from unisono_language.data.tokenizer import Tokenizer
from unisono_language.generate import cut_at_end, encode_prompt, end_tokens
from unisono_language.settings import LanguageConfig

if TYPE_CHECKING:
    from torch import Tensor

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
        self._ends = end_tokens(run.directory / "assets", tokenizer, template)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Publish a table with what the model writes after each prompt."""
        settings = self._task.config
        written = write_likeliest(self._prompts, settings.prompt_tokens, settings.sequence, self._run.read_outputs)
        tokenizer = self._task.tokenizer
        table = []
        for prompt, own in zip(self._task.config.prompts, written, strict=True):
            table.append({"prompt": prompt, "text": tokenizer.decode(cut_at_end(own, self._ends))})
        self._run.publish(step, NAME, table)


def write_likeliest(
    texts: Sequence[NDArray[np.int64]], tokens: int, sequence: int, read_outputs: Any
) -> list[list[int]]:
    """The tokens that a model writes after texts, the likeliest each time; collective, with as many passes as tokens.

    Args:
        texts: ids, (length,) each; at least one.
        tokens: how many to write after each.
        sequence: ids of a text that are looked at: its last ones.
        read_outputs: of the run.
    """
    written = list(texts)
    for _ in range(tokens):
        # A row predicts all tokens but its first, so that the token after its end needs one more at its place.
        rows = [np.append(ids[-sequence:], 0) for ids in written]
        likeliest = read_outputs(rows, _likeliest_next)
        written = [np.append(ids, token) for ids, token in zip(written, likeliest, strict=True)]
    return [ids[len(before) :].tolist() for before, ids in zip(texts, written, strict=True)]


def row_ends(batch: Batch) -> list[int]:
    """The number of targets of each row."""
    ends: list[int] = (batch["targets"] != IGNORED).sum(1).tolist()
    return ends


def logits_at(outputs: Mapping[str, Any], row: int, places: slice) -> Tensor:
    """The logits of some targets of a row, (places, vocabulary), in fp32 or fp64."""
    import torch

    logits: Tensor
    if "logits" in outputs:
        logits = outputs["logits"][row, places]
    else:
        logits = torch.nn.functional.linear(outputs["hidden"][row, places], outputs["weight"], outputs["bias"])
    return logits if logits.dtype == torch.float64 else logits.float()


def _likeliest_next(outputs: Mapping[str, Any], batch: Batch) -> list[int]:
    """The likeliest token after the last real one of each row."""
    ends = enumerate(row_ends(batch))
    return [int(logits_at(outputs, row, slice(end - 1, end)).argmax()) for row, end in ends]
