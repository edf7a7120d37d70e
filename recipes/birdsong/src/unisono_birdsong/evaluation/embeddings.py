"""Embeddings of recordings by a frozen encoder, and the metadata of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import numpy as np
from numpy.typing import NDArray

from unisono import BadSamplesError
from unisono_audio import CENTRE
from unisono_birdsong.data.library import LabelledSource
from unisono_birdsong.model.encoder import Encoder

_THREADS = 2  # that decode


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the rows whose classes are known.

    Attributes:
        embeddings: (rows, width) float64.
        truth: (rows, classes), whether the row has the class.
        groups: (rows,) recording or recordist.
    """

    embeddings: NDArray[np.float64]
    truth: NDArray[np.bool_]
    groups: list[str]


def embed(encoder: Encoder, source: LabelledSource, *, micro_batch: int = 32, most: int | None = None) -> Embedded:
    """Embed the rows of a source whose classes are known: a window as it is, the centre of a recording that has none.

    Rows are computed one by one and are independent of each other, so no size of micro-batches changes them. No more
    than the first `most` rows are looked at.

    Raises:
        BadSamplesError: naming the first recording that cannot be used.
    """
    pipeline = encoder.settings.pipeline()
    compute = eqx.filter_jit(lambda encoder, clips: jax.vmap(encoder.embedding)(clips))

    def spectrograms(rows: list[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], NDArray[np.float32]]:
        windows = [row.get("window", CENTRE) for row in rows]
        try:
            batch = pipeline(
                [row["audio"] for row in rows], windows, names=[row["name"] for row in rows], threads=_THREADS
            )
        except BadSamplesError as error:
            raise BadSamplesError({rows[row]["row"]: reason for row, reason in error.reasons.items()}) from error
        padding = np.zeros((micro_batch - len(rows), *batch.values.shape[1:]), dtype=np.float32)
        return rows, np.concatenate([batch.values, padding])  # one shape, so one program

    found: list[NDArray[np.float64]] = []
    known: list[Mapping[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:  # the next micro-batch is decoded while this one is computed
        waiting = None
        for rows in [*_micro_batches(source, micro_batch, most), None]:
            following = None if rows is None else pool.submit(spectrograms, rows)
            if waiting is not None:
                done, clips = waiting.result()
                found.append(np.asarray(compute(encoder, clips), dtype=np.float64)[: len(done)])
                known += [{name: row[name] for name in ("labels", "group")} for row in done]
            waiting = following
    truth = np.zeros((len(known), len(source.classes)), dtype=bool)
    for number, row in enumerate(known):
        truth[number, list(row["labels"])] = True
    width = encoder.settings.width
    return Embedded(np.concatenate([np.zeros((0, width)), *found]), truth, [str(row["group"]) for row in known])


def _micro_batches(source: LabelledSource, size: int, most: int | None) -> Iterator[list[Mapping[str, Any]]]:
    rows: list[Mapping[str, Any]] = []
    for number in range(len(source))[:most]:
        record = source[number]
        if record.get("known", bool(record["labels"])):
            rows.append({"name": "a recording", "row": number, **record})
        if len(rows) == size:
            yield rows
            rows = []
    if rows:
        yield rows
