"""Digests of the rows that a model is given."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def digest_rows(inputs: Any) -> tuple[list[str], str]:
    """A digest of every row of the tensors among a model's inputs, and the shape of one row.

    Double precision is rounded to single: what another model has made (a generator) differs by rounding between runs.
    """
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not _made_by_parameters(leaf)]
    tensors = [tensor for tensor in given if tensor.dim() and tensor.numel()]
    if not tensors:
        return [], ""
    count = len(tensors[0])
    arrays = [t.detach().cpu() for t in tensors if len(t) == count]
    plain = [
        (a.float() if a.dtype in (torch.bfloat16, torch.float64) else a).reshape(count, -1).numpy() for a in arrays
    ]
    rows = (b"".join(array[row].tobytes() for array in plain) for row in range(count))
    shape = " ".join(f"{a.dtype} {tuple(a.shape[1:])}" for a in arrays)
    return [hashlib.blake2b(row, digest_size=8).hexdigest() for row in rows], shape


def _made_by_parameters(tensor: Tensor) -> bool:
    """Whether a model has made it, with parameters that are trained; data may need a gradient, too."""
    if tensor.grad_fn is None:
        return isinstance(tensor, nn.Parameter)
    left, seen = [tensor.grad_fn], {tensor.grad_fn}
    while left:
        node = left.pop()
        if isinstance(getattr(node, "variable", None), nn.Parameter):
            return True
        new = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= new
        left += new
    return False
