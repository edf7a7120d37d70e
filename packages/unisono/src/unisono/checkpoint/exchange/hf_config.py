"""Reads Hugging Face settings (`config.json`, `tokenizer_config.json`) as data, dropping entries that name code.

`auto_map` names Python files by the model's author, and `attn_implementation` may name a repository of compiled code.
transformers would import the former after a prompt that a pipe can answer, and download the latter without one. So both
are dropped with a warning, and the library only gets the remaining settings, never the folder itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unisono.checkpoint.exchange import hf_shards
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import CheckpointError, ConfigError, UnisonoError
from unisono.runtime.files import pickle_hint
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Object

log = logging.getLogger(__name__)
CONFIG = "config.json"
_GENERATION, _ADAPTERS = "generation_config.json", "adapter_config.json"  # which the library reads beside it
LARGEST = 4 << 20  # bytes of such a file
_COUNT = re.compile(r"(?:^|_)(?:n|num)_\w*(?:layers?|experts)$")  # settings for each of which modules are built
_MOST_PARTS = 10_000
# What leads to code of others, or to files and classes that the settings choose instead of the caller.
_CODE_KEYS = frozenset({
    "auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "experts_implementation",
    "configuration_files", "transformers_weights", "auto_mapping", "megatron_core", "_auto_class",
    "_attn_implementation", "_attn_implementation_internal", "_experts_implementation",
    "_experts_implementation_internal", "_commit_hash",
})  # fmt: skip
# What such settings have by default; of `megatron_core` any adapter that PEFT writes.
_HARMLESS_VALUES = frozenset({
    "eager", "sdpa", "flash_attention_2", "flex_attention", "grouped_mm", "megatron.core", None
})  # fmt: skip


def read_settings(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The settings in a file of an untrusted folder, without entries that name code.

    Raises:
        OSError: where it is missing, or no regular file of that folder.
        CheckpointError: where it is no JSON object.
    """
    kept, dropped = without_code(_read_object(folder, name))
    if dropped:
        _warn_dropped(str(folder / name), tuple(dropped))
    return kept


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    try:
        settings: dict[str, Any] = safe_paths.read_json(folder, name, Object, LARGEST)
        return settings
    except ValueError as error:
        if isinstance(error, OSError):
            raise
        raise CheckpointError(f"{folder / name} is not a JSON object with settings: {one_line(error)}") from error


def read_config(folder: Path) -> Any:
    """The transformers configuration of a folder, of a class that the installed library has.

    Raises:
        OSError: where `config.json` is missing, or no regular file of that folder.
        CheckpointError: where it describes no architecture of the library.
        Exception: whatever the architecture's own checks raise.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = read_settings(folder)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise CheckpointError(
            f"{folder / CONFIG}: the installed transformers has no architecture model_type='{one_line(kind)}'"
        )
    made = CONFIG_MAPPING[kind]
    if large := [name for name, value in values.items() if _COUNT.search(name) and _is_huge(value)]:
        raise CheckpointError(f"{folder / CONFIG}: {large[0]}={values[large[0]]} is more than any model has")
    hidden = [name for name in values if callable(getattr(made, name, None))]  # a value in place of a method
    if hidden:
        raise CheckpointError(f"{folder / CONFIG}: {kind} has no setting '{one_line(hidden[0])}'")
    with tempfile.TemporaryDirectory(prefix="unisono-config-") as clean:
        (Path(clean) / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        config = AutoConfig.from_pretrained(clean, local_files_only=True, trust_remote_code=False)
    config._name_or_path = str(folder)
    return config


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and value > _MOST_PARTS


def open_folder(folder: Path, key: str) -> Any:
    """The configuration of a local model, whose weights may be loaded; see `read_config` and `check_weights`.

    Raises:
        ConfigError: for whatever these refuse, naming the setting `key`; for adapters, with which the library would
            load the model that their file names in place of this one.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{key}: {folder} is not a directory; give a local model with config.json and safetensors"
            + pickle_hint(folder)
        )
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{key}: {folder} has no {CONFIG}")
    if os.path.lexists(folder / _ADAPTERS):
        raise ConfigError(
            f"{key}: {folder} has adapters next to its model ({_ADAPTERS}), which transformers would load too; merge "
            "them, or move that file away"
        )
    try:
        if os.path.lexists(folder / _GENERATION):
            _read_object(folder, _GENERATION)  # as it is, since the library reads it itself
        check_weights(folder)
    except (OSError, UnisonoError) as error:
        raise ConfigError(f"{key}: {error}") from error
    try:
        return read_config(folder)
    except Exception as error:  # each architecture validates in its own way
        raise ConfigError(f"{key}: {folder / CONFIG} cannot be read: {error}") from error


def load_pretrained(
    kind: Any, folder: Path, config: Any, *, advice: Mapping[str, str] = MappingProxyType({}), **options: Any
) -> Any:
    """A model of transformers with the weights in a folder, in fp32 on the CPU; nothing is downloaded.

    On the device `meta` it has their shapes as its settings have them, and the weights are not looked at.

    Args:
        kind: its class, or one of the library's `AutoModel…`.
        folder: with safetensors.
        config: of the model, as `read_config` reads it.
        advice: by the name of a weight, what to do where it alone is missing.
        options: others of its `from_pretrained`.

    Raises:
        ConfigError: for weights that cannot be read, or are not all there.
    """
    import torch

    if torch.get_default_device().type == "meta":  # from_pretrained refuses it
        make = getattr(kind, "from_config", None) or kind._from_config
        return make(config, dtype=torch.float32, **options)
    reading = wrap_native_errors(f"model.path: the weights in {folder} cannot be read", ConfigError)
    with reading, _bar_on_terminals():
        model, report = kind.from_pretrained(
            folder, config=config, dtype=torch.float32, local_files_only=True, use_safetensors=True,
            output_loading_info=True, **options,
        )  # fmt: skip
    if missing := sorted(report["missing_keys"]):  # the library would make them up
        raise ConfigError(
            f"model.path: {folder} lacks {len(missing)} of the model's weights, first '{missing[0]}'; they would be "
            f"random{advice.get(missing[0], '') if len(missing) == 1 else ''}"
        )
    return model


@contextmanager
def _bar_on_terminals() -> Iterator[None]:
    """The library draws a bar for any weights, however few; in a file or a pipe it is noise in the output."""
    from transformers.utils import logging as theirs

    if not theirs.is_progress_bar_enabled() or (sys.stderr is not None and sys.stderr.isatty()):
        yield
        return
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.enable_progress_bar()


def check_weights(folder: Path) -> None:
    """Raise if an index or a link would make the library read weights from outside the folder.

    Raises:
        CheckpointError: naming the index and what it names.
        OSError: naming the file.
    """
    for file in sorted(folder.glob("*.safetensors.index.json")):
        hf_shards.read_index(folder, file.name)
    for file in sorted(folder.glob("*.safetensors")):
        safe_paths.open_inside(folder, file.name).close()


def copy_settings(folder: Path, name: str, target: Path) -> None:
    """Copy a file from an untrusted folder; JSON settings are copied without entries that name code.

    Raises:
        OSError: where it is no regular file of that folder, or cannot be written.
        CheckpointError: where it is no JSON object.
    """
    if not name.endswith("config.json"):  # a vocabulary may well have a token of such a name
        safe_paths.copy_inside(folder, name, target / Path(name).name)
        return
    values = read_settings(folder, name)
    with (target / Path(name).name).open("x", encoding="utf-8") as file:
        file.write(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def without_code(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same settings at any depth without what names code, and the names of what was dropped.

    >>> without_code({"auto_map": {"AutoModel": "evil.py"}, "text_config": {"auto_map": {}, "heads": 2}})
    ({'text_config': {'heads': 2}}, ['auto_map', 'text_config.auto_map'])
    """
    kept: dict[str, Any] = {}
    dropped: list[str] = []
    for name, value in values.items():
        if name in _CODE_KEYS:
            if not (isinstance(value, str | None) and value in _HARMLESS_VALUES) and name != "_commit_hash":
                dropped.append(one_line(name))
        elif isinstance(value, dict):
            kept[name], inner = without_code(value)
            dropped += [f"{one_line(name)}.{each}" for each in inner]
        else:
            kept[name] = value
    return kept, dropped


@cache
def _warn_dropped(path: str, dropped: tuple[str, ...]) -> None:
    """Warn once per file."""
    log.warning("%s: dropped %s, which names code of its author; such code is never run", path, ", ".join(dropped))
