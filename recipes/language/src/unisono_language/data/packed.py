"""Several documents in one row that do not attend to each other: the row's content, and the model's extra inputs.

The model gets positions, which begin at 0 with each document. transformers turns them into a mask for its plain
attention, SDPA and flex attention; flash attention is given the documents' borders, since it would find them in
batches of one row only. Whether an architecture respects either is tested on the model itself, with a few tokens.
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
from unisono_language.data.chat import IGNORED
from unisono_language.model import evaluation_mode

_BORDER_KERNEL = "unisono_borders"  # our attention by borders, among the kernels of transformers
_LEAK_TOLERANCE = 1e-2  # of what documents change in each other where nothing keeps them apart: far above rounding


@dataclass(frozen=True)
class PackedRow:
    """Documents in one row, each array (length,) int64.

    Attributes:
        inputs: all tokens of each document but its last.
        targets: all but its first; `IGNORED` where the loss does not count them.
        positions: from 0 on in each document.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]


def pack_row(documents: Sequence[NDArray[np.int64]]) -> PackedRow:
    """A row of documents, each (tokens,); one token more than a document has targets.

    The complements in a conversation are tokens that are no targets (`chat`).
    """
    nothing = [np.zeros(0, dtype=np.int64)]  # a row may have lost all its documents
    inputs = np.concatenate([document[:-1] for document in documents] or nothing)
    targets = np.concatenate([document[1:] for document in documents] or nothing)
    return PackedRow(
        np.where(inputs < 0, ~inputs, inputs),
        np.where(targets < 0, IGNORED, targets),
        np.concatenate([np.arange(len(document) - 1) for document in documents] or nothing),
    )


def pad_rows(rows: Sequence[PackedRow], multiple: int) -> dict[str, NDArray[Any]]:
    """Rows as `inputs`, `targets` and `positions`, each (rows, length), of the longest length rounded up to a multiple.

    Padding is a document of its own, without targets.
    """
    length = max(1, -(-max(len(row.inputs) for row in rows) // multiple)) * multiple
    inputs = np.zeros((len(rows), length), dtype=np.int64)
    targets = np.full((len(rows), length), IGNORED, dtype=np.int64)
    positions = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        end = len(row.inputs)
        inputs[number, :end], targets[number, :end] = row.inputs, row.targets
        positions[number, :end], positions[number, end:] = row.positions, np.arange(length - end)
    return {"inputs": inputs, "targets": targets, "positions": positions}


def flash_borders(positions: Tensor) -> dict[str, Any]:
    """What flash attention has to know: where documents begin in all rows, one row after the other.

    Positions are (rows, length), 0 where a document begins, as at the beginning of each row. Returns keywords of the
    model: `cu_seq_lens_q` and `_k`, (documents + 1,) int32, and the length of the longest one.
    """
    flat = positions.reshape(-1)
    begins = (flat == 0).nonzero().view(-1)
    ends = torch.cat([begins, begins.new_tensor([flat.numel()])]).to(torch.int32)
    longest = int(flat.max()) + 1
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def check_positions(model: nn.Module) -> None:
    """Refuse a model (it may be on `meta`) without position inputs, which cannot know where a document begins."""
    base = getattr(model, "base_model", model)
    if any("position_ids" not in inspect.signature(one.forward).parameters for one in (model, base)):
        raise ConfigError(
            f"data.packing: {type(model).__name__} takes no position_ids, so it cannot know where a document "
            "begins, and documents of a row would mix. Use data.packing=null, or another architecture"
        )


def check_isolation(model: Any, flash: bool) -> None:
    """Refuse a model in which documents of a row attend to each other, or whose positions do not restart.

    The model is on the CPU, with plain kernels; with `flash` it is asked with the documents' borders.
    """
    check_positions(model)
    first, second = torch.arange(1, 5)[None], torch.arange(3, 0, -1)[None]
    both = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(4), torch.arange(3)])[None]
    extra_inputs: dict[str, Any] = {"position_ids": positions}
    was = model.config._attn_implementation
    if flash:
        from transformers import AttentionInterface

        AttentionInterface.register(_BORDER_KERNEL, border_attention)
        extra_inputs |= flash_borders(positions)
    try:
        with evaluation_mode(model):
            alone = model(input_ids=second, use_cache=False).logits
            mixed = model(input_ids=both, use_cache=False).logits[:, 4:]
            if flash:
                model.set_attn_implementation(_BORDER_KERNEL)
            apart = model(input_ids=both, use_cache=False, **extra_inputs).logits[:, 4:]
    finally:
        if flash:
            model.set_attn_implementation(was)
    if (apart - alone).abs().max() > _LEAK_TOLERANCE * (mixed - alone).abs().max():
        how = " with model.attention=flash" if flash else ""
        raise ConfigError(
            f"data.packing: in {type(model).__name__}{how} a document attends to those before it in its row, although "
            "it is given its positions. Use data.packing=null, or another "
            + ("kernel, e.g. model.attention=sdpa" if flash else "architecture")
        )


def border_attention(
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

    Query is (rows, heads, length, size), of which key and value may have fewer heads. Without borders, as in flash
    attention, every row is one document.

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
