"""Imported weights as those of a transformers model: names of torchtitan translated, and all names and shapes checked.

torchtitan computes rotary positions on neighbouring pairs of features, transformers on the two halves of a head. So the
rows of the query and key matrices change places, which changes no attention score.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.checkpoint.exchange import hf_config
from unisono.checkpoint.exchange.hf_shards import ShardedFiles, TensorEntry
from unisono.runtime.errors import CheckpointError, format_examples

if TYPE_CHECKING:
    from torch import Tensor

_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.qkv_linear.wq": "self_attn.q_proj", "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_ROTARY = re.compile(r"\.self_attn\.([qk])_proj\.weight(\.exp_avg|\.exp_avg_sq)?$")
_EMBEDDING = "tok_embeddings.weight"  # by which a checkpoint of torchtitan's Llama is known


class ModelTensors:
    """Tensors under the names of a transformers model.

    Args:
        files: the imported tensors.
        folder: of the model, with its `config.json`.
        source: what they were imported from, for messages.
        moments: they are moments, each under its parameter's name, a point and its own (`norm.weight.exp_avg`).

    Attributes:
        entries: what is written.
        left_out: descriptions of moments that do not fit the model.

    Raises:
        CheckpointError: naming tensors that the model lacks, or that it needs and are not there; of moments, if none
            fits.
    """

    def __init__(self, files: ShardedFiles, folder: Path, source: Path, moments: bool = False) -> None:
        try:
            config = hf_config.read_config(folder)
        except OSError as error:
            raise CheckpointError(f"like={folder}: {hf_config.CONFIG} cannot be read: {error.strerror}") from error
        self._files, self._heads = files, None
        of = {entry.name: entry.name.rpartition(".")[0] if moments else entry.name for entry in files.entries}
        names = {name: name for name in of.values()}
        if _EMBEDDING in names:
            if config.model_type != "llama":
                raise CheckpointError(
                    f"{source} has the names of torchtitan's Llama, and like={folder} is a {config.model_type}"
                )
            names = {name: _translate(name, source) for name in names}
            self._heads = config.num_attention_heads, config.num_key_value_heads
        renamed = [
            replace(entry, name=names[of[entry.name]] + entry.name.removeprefix(of[entry.name]))
            for entry in files.entries
        ]
        self._origin = {new.name: old for new, old in zip(renamed, files.entries, strict=True)}
        expected, tied = _expected(config)
        self.left_out: list[str] = []
        if moments:
            self.entries, self.left_out = _choose_fitting(renamed, expected)
            if not self.entries:
                raise CheckpointError(
                    f"{source} has no moments that fit the model of like={folder}: {format_examples(self.left_out)}"
                )
            return
        _compare(renamed, expected, tied, source, folder)
        self.entries = [entry for entry in renamed if entry.name in expected]

    def content(self, entry: TensorEntry) -> Iterator[Tensor]:
        """A tensor, block by block; queries and keys as a whole, where their rows change places."""
        rotary = _ROTARY.search(entry.name)
        blocks = self._files.content(self._origin[entry.name])
        if self._heads is None or rotary is None:
            yield from blocks
            return
        import torch

        whole = torch.cat(list(blocks))
        yield halves_from_pairs(whole, self._heads[rotary[1] == "k"])


def halves_from_pairs(matrix: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix, (heads · size, width), for rotary positions on halves instead of on pairs."""
    rows, width = matrix.shape
    return matrix.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def _translate(name: str, source: Path) -> str:
    """The name in transformers of a tensor of torchtitan's Llama."""
    layer = _LAYER.fullmatch(name)
    if layer is None and name.removesuffix(".weight") in _TOP:
        return f"{_TOP[name.removesuffix('.weight')]}.weight"
    if layer is None or layer[2] not in _IN_LAYER:
        raise CheckpointError(f"{source}: torchtitan's Llama has no tensor '{name}'")
    return f"model.layers.{layer[1]}.{_IN_LAYER[layer[2]]}.weight"


def _expected(config: Any) -> tuple[dict[str, tuple[int, ...]], Mapping[str, str]]:
    """The names and shapes of a model's tensors, and those that are others under a second name."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    return shapes, dict(getattr(model, "all_tied_weights_keys", None) or {})


def _choose_fitting(
    entries: Sequence[TensorEntry], expected: Mapping[str, tuple[int, ...]]
) -> tuple[list[TensorEntry], list[str]]:
    """The moments whose parameter is there and has their shape, or that go by numbers; and what is wrong with others.

    >>> import torch
    >>> step, moment = TensorEntry("a.step", torch.float32, ()), TensorEntry("a.exp_avg", torch.float32, (2,))
    >>> _choose_fitting([step, moment], {"a": (3,)})
    ([], ['moments of a ([2] instead of [3])'])
    """
    wrong: dict[str, str] = {}
    for entry in entries:
        name, _, what = entry.name.rpartition(".")
        if name.isdigit():
            continue
        if name not in expected:
            wrong[name] = f"moments of {name} (not in the model)"
        elif what != "step" and entry.shape != expected[name]:
            wrong[name] = f"moments of {name} ({list(entry.shape)} instead of {list(expected[name])})"
    return [entry for entry in entries if entry.name.rpartition(".")[0] not in wrong], list(wrong.values())


def _compare(
    entries: Sequence[TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    source: Path,
    folder: Path,
) -> None:
    """Refuse tensors that are missing, too many, or of other shapes, each by its name."""
    there = {entry.name: entry.shape for entry in entries}
    missing = sorted(expected.keys() - there.keys() - tied.keys())
    extra = sorted(there.keys() - expected.keys())
    other = [
        f"{name} ({list(there[name])} instead of {list(shape)})"
        for name, shape in expected.items()
        if there.get(name, shape) != shape
    ]
    wrong = [
        f"{what}: {format_examples(names)}"
        for what, names in (("missing", missing), ("not in the model", extra), ("of another shape", other))
        if names
    ]
    if wrong:
        raise CheckpointError(f"{source} does not fit the model of like={folder}: {'; '.join(wrong)}")
