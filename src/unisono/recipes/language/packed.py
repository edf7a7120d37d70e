"""Several documents in one row, none of which sees another: what a row holds, and what a model is told of it.

A model is told by positions, which begin at 0 with each document. transformers makes of them a mask for its plain
attention, SDPA and flex attention; flash attention is given the documents' borders, since it would look for them in
batches of one row only. Whether an architecture heeds either is asked of the model itself, on a few tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from unisono import ConfigError

_BORDERS = "unisono_borders"  # our attention by borders, among the kernels of transformers
_HEEDED = 1e-2  # of what documents change in each other where nothing keeps them apart: far above rounding


@dataclass(frozen=True)
class PackedRow:
    """Documents in one row, each array (length,) int64.

    Attributes:
        inputs: all tokens of each document but its last.
        targets: all but its first.
        positions: from 0 on in each document.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]


def row_of(documents: Sequence[NDArray[np.int64]]) -> PackedRow:
    """A row of documents, each (tokens,); one token more than a document has targets."""
    nothing = [np.zeros(0, dtype=np.int64)]  # a row may have lost all its documents
    return PackedRow(
        np.concatenate([document[:-1] for document in documents] or nothing),
        np.concatenate([document[1:] for document in documents] or nothing),
        np.concatenate([np.arange(len(document) - 1) for document in documents] or nothing),
    )


def borders(positions: Tensor) -> dict[str, Any]:
    """What flash attention has to know: where documents begin in all rows, one row after the other.

    Args:
        positions: (rows, length), 0 where a document begins; each row begins with one.

    Returns:
        Keywords of the model: `cu_seq_lens_q` and `_k`, (documents + 1,) int32, and the length of the longest one.
    """
    flat = positions.reshape(-1)
    begins = (flat == 0).nonzero().view(-1)
    ends = torch.cat([begins, begins.new_tensor([flat.numel()])]).to(torch.int32)
    longest = int(flat.max()) + 1
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def check(model: nn.Module) -> None:
    """Refuse a model that is told no positions, and so cannot know where a document begins; it may be without memory.

    Raises:
        ConfigError: naming it.
    """
    base = getattr(model, "base_model", model)
    if any("position_ids" not in inspect.signature(one.forward).parameters for one in (model, base)):
        raise ConfigError(
            f"data.packing: {type(model).__name__} takes no position_ids, so it cannot be told where a document "
            "begins, and documents of a row would mix. Leave data.packing=null, or choose another architecture"
        )


def check_apart(model: Any, flash: bool) -> None:
    """Refuse a model in which documents of a row see each other, or that goes on counting positions.

    Args:
        model: on the CPU, with plain kernels.
        flash: whether it will compute with flash attention, and so is told borders.

    Raises:
        ConfigError: naming it.
    """
    check(model)
    first, second = torch.arange(1, 5)[None], torch.arange(3, 0, -1)[None]
    both = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(4), torch.arange(3)])[None]
    told: dict[str, Any] = {"position_ids": positions}
    was = model.config._attn_implementation
    if flash:
        from transformers import AttentionInterface

        AttentionInterface.register(_BORDERS, by_borders)
        told |= borders(positions)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            alone = model(input_ids=second, use_cache=False).logits
            mixed = model(input_ids=both, use_cache=False).logits[:, 4:]
            if flash:
                model.set_attn_implementation(_BORDERS)
            apart = model(input_ids=both, use_cache=False, **told).logits[:, 4:]
    finally:
        model.train(training)
        if flash:
            model.set_attn_implementation(was)
    if (apart - alone).abs().max() > _HEEDED * (mixed - alone).abs().max():
        how = " with model.attention=flash" if flash else ""
        raise ConfigError(
            f"data.packing: in {type(model).__name__}{how} a document sees those before it in its row, although it is "
            "told its positions. Leave data.packing=null, or choose another "
            + ("kernel, e.g. model.attention=sdpa" if flash else "architecture")
        )


def by_borders(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside the borders that flash attention would be given, in plain torch, for asking models.

    Args:
        module: that attends.
        query: (rows, heads, length, size); key and value may have fewer heads.
        key: as `query`.
        value: as `query`.
        attention_mask: none; there are borders.
        scaling: of the scores; None for 1 / √size.
        dropout: of attention weights.
        cu_seq_lens_q: borders; without them, as flash attention would, every row is one document.
        others: what other kernels want to know.

    Returns:
        (rows, length, heads, size), and no attention weights.
    """
    rows, heads, length, _ = query.shape
    index = torch.arange(rows * length, device=query.device)
    ends = torch.arange(1, rows, device=query.device) * length if cu_seq_lens_q is None else cu_seq_lens_q[1:-1]
    document = torch.bucketize(index, ends.to(index.dtype), right=True)
    seen = (document[:, None] == document) & (index[:, None] >= index)
    query, key, value = (one.transpose(0, 1).flatten(1, 2)[None] for one in (query, key, value))
    made = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, dropout_p=dropout, scale=scaling, enable_gqa=heads != key.shape[1]
    )
    return made.reshape(heads, rows, length, -1).permute(1, 2, 0, 3), None
