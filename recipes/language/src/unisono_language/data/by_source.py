"""What an evaluation reports of several held-out sources: the loss and metrics of each, and of all together.

A row knows which source it is of, so the sums of a source are metrics like any others: exact on every layout.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono import Batch, ConfigError, Context, Joined, Loss, Mapped, Source, Task

if TYPE_CHECKING:
    from torch import Tensor

SOURCE = "source"  # in a batch: the number of each row's source, (rows,)
SINGLE = "held_out"  # what is held out of the only corpus, beside other sources
_LOSS, _NOTHING = "loss", (0.0, 0.0)
_PER_ROW = ("hidden", "logits")
_RESERVED = ("ema", SINGLE)  # names that events and other sources have


@dataclass(frozen=True)
class SourceRow:
    """A held-out record, or the sample made of it.

    Attributes:
        content: as it would be without other sources.
        source: the number of its source.
    """

    content: Any
    source: int


def join_sources(parts: Mapping[str, Source]) -> Source | None:
    """The rows of all sources, one source after the other; each knows its own if there are several."""
    if len(parts) < 2:
        return next(iter(parts.values()), None)
    return Joined(
        {name: Mapped(part, partial(SourceRow, source=n), name) for n, (name, part) in enumerate(parts.items())}
    )


def check_names(held_out: Sequence[str], training: Sequence[str]) -> None:
    """Refuse names of held-out sources that would stand for two things in an evaluation."""
    for name in held_out:
        if name in (*training, *_RESERVED, "") or "/" in name:
            why = "is in data.sources, too" if name in training else "would be mistaken for another name in events"
            raise ConfigError(f"data.held_out_sources: '{name}' {why}; choose another name")


def check_apart(files: Mapping[str, Iterable[Any]], held_out: Collection[str]) -> None:
    """Refuse files, or prepared folders, that are trained on and held out, too.

    Args:
        files: the paths of each source.
        held_out: names of those that are never trained on.
    """
    places = {name: {os.path.realpath(path): path for path in paths} for name, paths in files.items()}
    trained = {real: name for name, paths in places.items() if name not in held_out for real in paths}
    for name in held_out:
        if both := [real for real in places[name] if real in trained]:
            source = trained[both[0]]
            raise ConfigError(
                f"data.held_out_sources: {places[name][both[0]]} of '{name}' is trained on, too"
                + (f" (source '{source}')" if source else "")
                + (f", and {len(both) - 1} more files" if len(both) > 1 else "")
                + "; an evaluation of it would say what the model remembers, so move it or narrow data.path"
            )


def split_loss(task: Task, outputs: Mapping[str, Any], batch: Batch, context: Context, names: Sequence[str]) -> Loss:
    """The loss of rows of several sources, and as metrics the loss and the metrics of each source.

    Args:
        task: computes the loss of rows of one source, with one term in evaluation, and its counts.
        outputs: of all rows; what has no axis of rows is the same for all.
        batch: of all rows, with the number of each one's source.
        context: of the evaluation.
        names: of the sources, by number.
    """
    import torch

    numbers, rest = batch[SOURCE], {name: values for name, values in batch.items() if name != SOURCE}
    pairs: dict[str, tuple[Any, Any]] = {}  # of metrics, each a sum and its count
    total: dict[str, Any] = {}
    for number in torch.unique(numbers).tolist():
        rows = torch.nonzero(numbers == number)[:, 0]
        part = {name: values[rows] for name, values in rest.items()}
        loss = task.loss(
            {name: _take(value, rows, len(numbers), name) for name, value in outputs.items()}, part, context
        )
        ((term, nats),) = loss.sums.items()
        total[term] = total.get(term, 0.0) + nats
        for name, pair in loss.metrics.items():
            _add(pairs, name, pair)
            for other, source in enumerate(names):
                _add(pairs, f"{source}/{name}", pair if other == number else _NOTHING)
        for other, source in enumerate(names):
            _add(pairs, f"{source}/{_LOSS}", (nats, task.counts(part)[term]) if other == number else _NOTHING)
    return Loss(total, metrics=pairs)


def summarise(values: Mapping[str, float], in_pairs: bool) -> dict[str, float]:
    """The values of an evaluation with the perplexity beside each loss in nats per token, source after source.

    A source of which no row was drawn (`eval.rows`) has no values: they are not numbers.
    """
    found = dict(values)
    for name in [name for name in values if name.endswith(f"/{_LOSS}")]:
        source = name.removesuffix(_LOSS)
        if not any(values[other] for other in values if other.startswith(source)):
            found |= {other: math.nan for other in values if other.startswith(source)}
    if not in_pairs:
        losses = {name: value for name, value in found.items() if name.rpartition("/")[2] == _LOSS}
        found |= {f"{name.removesuffix(_LOSS)}perplexity": float(np.exp(value)) for name, value in losses.items()}
    sources = list(dict.fromkeys(name.rpartition("/")[0] for name in values))  # those of all rows first

    def place(name: str) -> tuple[int, bool]:
        source, _, kind = name.rpartition("/")
        return sources.index(source), kind not in (_LOSS, "perplexity")

    return {name: found[name] for name in sorted(found, key=place)}


def _add(pairs: dict[str, tuple[Any, Any]], name: str, pair: tuple[Any, Any]) -> None:
    total, count = pairs.get(name, _NOTHING)
    pairs[name] = (total + pair[0], count + pair[1])


def _take(value: Any, rows: Tensor, of: int, name: str) -> Any:
    """The outputs of some rows; a row of a batch may have several, as a pair of answers has."""
    if name not in _PER_ROW:
        return value
    return value.view(of, -1, *value.shape[1:])[rows].flatten(0, 1)
