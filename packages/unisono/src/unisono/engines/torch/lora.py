"""LoRA with the PEFT library: a frozen base, and small trained matrices next to its linear layers.

The task's `build` creates the base at every start, so checkpoints contain only the adapters, and a digest to detect a
different base. Each adapter's initial weights are keyed by its layer's name, so they do not depend on the layout or on
other layers.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config.schema.run import Lora
from unisono.engines.state import ArrayShard, StateReader
from unisono.engines.torch import four_bit
from unisono.engines.torch.content import has_content
from unisono.engines.torch.guards import replicas
from unisono.runtime.code.entry_points import require_extra
from unisono.runtime.errors import CheckpointError, ConfigError, nearest
from unisono.runtime.rng import key

_BASE_DIGESTS = "adapter/base"  # in a checkpoint: digests of the base's parameters, in the order of their names


class Adapter:
    """The adapters of a model, inserted in place. Without a config, the model is unchanged.

    Args:
        config: the group `adapter`.
        model: as `build` returns it, in its initial dtype; its own parameters are frozen afterwards.
        seed: of the run.

    Raises:
        ConfigError: if PEFT is not installed, or `targets` does not match linear layers that can have an adapter.
    """

    def __init__(self, config: Lora | None, model: nn.Module, seed: int) -> None:
        self._base: list[int] | None = None
        self._config = config
        if config is None:
            return
        check_peft_installed(config)
        self._base = _digests(model) if has_content(model) else []
        self._trained_before = {parameter for parameter in model.parameters() if parameter.requires_grad}
        self._tuner = _inject_adapters(config, model, seed)

    def narrow_base(self, model: nn.Module, precision: str) -> None:
        """Keep the base's frozen matrices in bf16, if that is asked for or changes no value of them; or in 4 bits.

        Values that are not there, in a plan, are taken to change.
        Under autocast a linear layer computes with its weight in bf16, so the results have the same bits. Other
        parameters (norms, embeddings) are computed with in fp32 and stay as they are.
        """
        if self._config is not None and self._config.base_dtype == "nf4":
            four_bit.quantise(model, precision)
            return
        if self._config is None or precision != "bf16" or self._config.base_dtype == "kept":
            return
        owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        for layer in model.modules():
            if not isinstance(layer, nn.Linear):
                continue
            weight = layer.weight
            if weight.requires_grad or owners[id(weight)] > 1 or weight.dtype != torch.float32:
                continue
            narrow = weight.detach().to(torch.bfloat16)
            if self._config.base_dtype == "bf16" or (has_content(weight) and torch.equal(narrow.float(), weight)):
                weight.data = narrow

    def select_saved(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters and buffers to save in a checkpoint: all but the base's parameters."""
        whole = self._base is None
        return {n: t for n, t in named.items() if whole or not isinstance(t, nn.Parameter) or t.requires_grad}

    def shards(self) -> list[ArrayShard]:
        """The digest of the base, for one process to save."""
        if self._base is None:
            return []
        return [ArrayShard(_BASE_DIGESTS, (len(self._base),), (0,), torch.tensor(self._base, dtype=torch.int64))]

    def check_base(self, reader: StateReader) -> None:
        """Raise if a checkpoint's adapters were trained on another base; see `check_same_base`."""
        if self._base is not None:
            _check_digests(self._base, reader)

    def merge(self) -> None:
        """Merge the adapters into the weights of their layers, and restore the original layers."""
        if self._base is None:
            return
        model = self._tuner.merge_and_unload(safe_merge=True)
        for parameter in self._trained_before:
            parameter.requires_grad_(True)
        vars(model).pop("peft_config", None)


def check_peft_installed(config: Lora | None) -> None:
    """Raise if a run has adapters but PEFT is not installed, or a base in 4 bits without what reads it."""
    if config is not None:
        require_extra("peft", "lora", "adapter=lora")
    if config is not None and config.base_dtype == "nf4":
        require_extra("bitsandbytes", "qlora", "adapter.base_dtype=nf4")


def check_same_base(model: nn.Module, reader: StateReader) -> None:
    """Raise if adapters were trained on a base with different weights from this model.

    Args:
        model: as `build` returns it, without adapters.
        reader: of a checkpoint with adapters.

    Raises:
        CheckpointError: naming a parameter that differs.
    """
    _check_digests(_digests(model), reader, [name for name, _ in _sorted_parameters(model)])


def _check_digests(base: list[int], reader: StateReader, names: list[str] | None = None) -> None:
    if _BASE_DIGESTS not in reader.shapes:
        raise CheckpointError("the checkpoint has no adapters: it was saved by a run without adapter=lora")
    saved = reader.read(_BASE_DIGESTS, (0,), reader.shapes[_BASE_DIGESTS]).tolist()
    differing = [number for number, (a, b) in enumerate(zip(base, saved, strict=False)) if a != b]
    if len(base) != len(saved) or differing:
        what = f"{len(differing)} of {len(base)} parameters differ"
        if len(base) != len(saved):
            what = f"it has {len(saved)} parameters, this one {len(base)}"
        elif names is not None:
            what += f", first '{names[differing[0]]}'"
        raise CheckpointError(
            f"the adapters were trained on another base: {what}. They fit only the base that the task's build() made "
            "for their run: the same pretrained files, or random weights from the same seed, versions and settings "
            "(unisono.load_model rebuilds it)"
        )


def _digests(model: nn.Module) -> list[int]:
    return [replicas.digest(parameter) for _, parameter in _sorted_parameters(model)]


def _sorted_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return sorted(model.named_parameters())


def _inject_adapters(config: Lora, model: nn.Module, seed: int) -> Any:
    """Replace the targeted layers by PEFT's own; returns the tuner, which can merge them."""
    from peft import LoraConfig, LoraModel

    chosen = resolve_targets(config, model)
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules="|".join(re.escape(name) for name in chosen),  # a string is a full match, a list also suffixes
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # expected, for Conv1D layers
        tuner = LoraModel(model, settings, "default")
        for name in chosen:
            torch.manual_seed(key(seed, "init", "adapter", name))
            model.get_submodule(name).reset_lora_parameters("default", True)  # type: ignore[operator]
    return tuner


def resolve_targets(config: Lora, model: nn.Module) -> list[str]:
    """Names of the linear layers that get an adapter.

    Raises:
        ConfigError: naming the pattern or the layer that does not work.
    """
    from transformers.pytorch_utils import Conv1D

    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    without = _unsupported_layers(model, layers)
    if not config.targets:
        head = getattr(model, "get_output_embeddings", lambda: None)()
        # A model may have several heads, of which transformers names one or none.
        heads = {name for name, layer in layers.items() if layer is head or name.endswith("lm_head")}
        chosen = [name for name in layers if name not in without and name not in heads]
        if not chosen:
            raise ConfigError("adapter=lora: the model has no linear layer that can have an adapter")
        return chosen
    matched = {
        pattern: [pattern] if pattern in layers else [name for name in layers if _matches(name, pattern)]
        for pattern in config.targets
    }
    for pattern, names in matched.items():
        if not names:
            known = {*layers, *(name.rpartition(".")[2] for name in layers)}
            raise ConfigError(
                f"adapter.targets: '{pattern}' matches no linear layer, {nearest(pattern, known)} (a layer's name, its "
                "last part, or a glob over names)"
            )
    chosen = [name for name in layers if any(name in names for names in matched.values())]
    for name in chosen:
        if name in without:
            raise ConfigError(f"adapter.targets: '{name}' cannot have an adapter: {without[name]}; leave it out")
    return chosen


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _unsupported_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Layers where an adapter would be bypassed or could not be merged, each with the reason."""
    owners: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    reasons = {}
    for name, layer in layers.items():
        if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
            reasons[name] = "torch's MultiheadAttention multiplies with its weights itself"
        for shared in (owners[parameter] for parameter in layer.parameters(recurse=False)):
            if len(shared) > 1:
                reasons[name] = (
                    f"its weights are shared ({' and '.join(shared[:2])}), so merging would change the other layer too"
                )
    return reasons
