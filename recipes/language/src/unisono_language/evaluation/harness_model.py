"""A model of lm-eval that answers through whoever computes rows of tokens. Imports lm-eval, which may be missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from unisono import ConfigError
from unisono_language.data.tokenizer import Tokenizer

_WRITTEN_TOGETHER = 8  # tokens that are written before anybody looks whether an answer is finished
_TOKENS = 256  # of an answer whose task gives no bound, as in lm-eval's own models


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """The model of a run.

    Args:
        tokenizer: of the model.
        sequence: targets that a row can have.
        ask: answers rows; see `Harness.answer`.
    """

    def __init__(self, tokenizer: Tokenizer, sequence: int, ask: Callable[[Sequence[Any]], list[Any]]) -> None:
        super().__init__()
        self._tokenizer, self._sequence, self._ask = tokenizer, sequence, ask

    @property
    def eot_token_id(self) -> int | None:
        """The end of a document."""
        return self._tokenizer.last

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: what began documents in training."""
        first, last = self._tokenizer.first, self._tokenizer.last
        found = first if first is not None else last
        assert found is not None  # checked before the run
        return found

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, begun as a document is unless that is forbidden."""
        ids: list[int] = self._tokenizer.encode([string])[0].tolist()
        if self._tokenizer.last is not None:
            ids.pop()
        return ids[1:] if self._tokenizer.first is not None and add_special_tokens is False else ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self._sequence:
                raise ConfigError(
                    f"eval.harness: an answer of {len(continuation)} tokens is longer than a row of the run; increase "
                    f"task.sequence={self._sequence}"
                )
            rows.append({"ids": [*context, *continuation][-self._sequence - 1 :], "scored": len(continuation)})
        return [(total, likeliest) for total, likeliest in self._ask_sorted(rows)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts; those longer than a row in windows."""
        rows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self._sequence, 1)
            for context, continuation in map(make_disjoint_window, windows):
                rows.append({"ids": [*context, *continuation], "scored": len(continuation)})
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._ask_sorted(rows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after contexts, by the likeliest tokens, up to a text at which to stop."""
        answers = [_Answer(self.tok_encode(request.args[0]), dict(request.args[1])) for request in requests]
        while waiting := [one for one in answers if not one.finished]:
            rows = [{"ids": one.ids[-self._sequence :], "written": _WRITTEN_TOGETHER} for one in waiting]
            for one, written in zip(waiting, self._ask_sorted(rows), strict=True):
                one.extend(written, self._tokenizer)
        return [one.text for one in answers]

    def _ask_sorted(self, rows: list[dict[str, Any]]) -> list[Any]:
        """The answers to rows, which are asked for by length, so that little is padding."""
        order = sorted(range(len(rows)), key=lambda number: -len(rows[number]["ids"]))
        answers: list[Any] = [None] * len(rows)
        for number, answer in zip(order, self._ask([rows[number] for number in order]), strict=True):
            answers[number] = answer
        return answers


class _Answer:
    """An answer that is being written.

    Args:
        ids: of its context.
        settings: of its task: `until`, `max_gen_toks`, and of sampling, which is refused.
    """

    def __init__(self, ids: list[int], settings: dict[str, Any]) -> None:
        if settings.get("do_sample") or settings.get("temperature"):
            raise ConfigError(
                "eval.harness: a task samples its answers (do_sample or temperature), and runs write the likeliest "
                "tokens; use `unisono export` and lm-eval's own command for this one"
            )
        until = settings.get("until") or []
        self._until = [until] if isinstance(until, str) else list(until)
        self._begin, self._most = len(ids), int(settings.get("max_gen_toks", _TOKENS))
        self.ids, self.text, self.finished = list(ids), "", False

    def extend(self, written: Sequence[int], tokenizer: Tokenizer) -> None:
        """Take more tokens, up to the end of the document or of the answer."""
        room = self._most - (len(self.ids) - self._begin)
        more = list(written[:room])
        self.finished = len(more) == room
        if tokenizer.last in more:
            more, self.finished = more[: more.index(tokenizer.last)], True
        self.ids += more
        text = tokenizer.decode(self.ids[self._begin :])
        places = [place for stop in self._until if stop and (place := text.find(stop)) >= 0]
        self.finished |= bool(places)
        self.text = text[: min(places, default=len(text))]
