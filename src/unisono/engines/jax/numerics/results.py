"""Combines the devices' reports of all micro-batches into the result of a step or an evaluation.

Sums are added here, in float64 and in the order of the global micro-batches, so no layout changes what is reported
beyond what its devices computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.engines import rules
from unisono.engines.jax.forward import Columns
from unisono.engines.protocol import StepResult
from unisono.runtime.errors import ConfigError

Reports = np.ndarray[Any, Any]


def combine_reports(columns: Columns, reports: Sequence[Reports], grad_norm: float = 0.0) -> StepResult:
    """The result of all micro-batches together.

    Args:
        columns: what the numbers are.
        reports: of each global batch, (micro-batches, numbers).
        grad_norm: of the whole gradient.
    """
    parts = columns.split(np.concatenate([np.asarray(part, dtype=np.float64) for part in reports]))
    sums, counts = parts["sums"].sum(0).tolist(), dict(zip(columns.names.terms, parts["counts"].sum(0), strict=True))
    pairs = parts["metrics"].sum(0).reshape(-1, 2).tolist()
    return rules.build_step_result(
        {name: (total, float(counts[name])) for name, total in zip(columns.terms, sums, strict=True)},
        dict(zip(columns.terms, _weights(columns, parts["weights"]), strict=True)),
        {name: (total, count) for name, (total, count) in zip(columns.metrics, pairs, strict=True)},
        dict(zip(columns.names.work, parts["work"].sum(0).tolist(), strict=True)),
        grad_norm,
    )


def _weights(columns: Columns, weights: Reports) -> list[float]:  # (micro-batches, terms)
    """The weight of each term, which all micro-batches have to give alike."""
    given = weights[(weights != 0).any(axis=1)]  # a loss of all rows together is counted once, with the first of them
    if (given != given[:1]).any() and not np.allclose(given, given[0], rtol=1e-6):
        raise ConfigError(
            f"loss() gives the terms {', '.join(columns.terms)} different weights in different micro-batches; a weight "
            "must be the same for all rows, and what depends on rows belongs in the sums"
        )
    return [float(weight) for weight in (given[0] if len(given) else weights[0])]
