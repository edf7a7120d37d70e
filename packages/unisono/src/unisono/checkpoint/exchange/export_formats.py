"""Export formats: names and shapes of a checkpoint's arrays, unchanged, for transformers, or for PEFT.

A format is derived from names and shapes alone, so all processes that write files derive the same one. It does not need
the model's memory: the transformers model is created on the meta device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import TypedDict

from unisono.checkpoint.exchange import hf_config
from unisono.checkpoint.exchange.hf_shards import TensorEntry
from unisono.config.schema.run import Lora
from unisono.runtime.code.entry_points import require_extra
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import CheckpointError, RunError
from unisono.runtime.untrusted import safe_paths
from unisono.runtime.untrusted.shapes import Count, Object

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
_NAMED = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Output:
    """A tensor of the export, and the array it is made of.

    Attributes:
        entry: its name, dtype and shape.
        source: the array's name.
        convert: converts the whole array to this and other tensors by name; None if it is the array itself.
    """

    entry: TensorEntry
    source: str
    convert: Callable[[Tensor], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class ExportFormat:
    """An export: its tensors, and the other files.

    Attributes:
        description: what it is, for people.
        outputs: its tensors, those of one array one after the other.
        stem: what the names of its files begin with.
        indexed: whether even a single file has an index.
        finish: writes the other files into a folder.
    """

    description: str
    outputs: tuple[Output, ...]
    stem: str
    indexed: bool
    finish: Callable[[Path], None]


def safetensors_format(arrays: Mapping[str, TensorEntry]) -> ExportFormat:
    """Every array as it is, under its own name; each entry has the name of the array in the checkpoint."""
    outputs = tuple(Output(TensorEntry(name, array.dtype, array.shape), array.name) for name, array in arrays.items())
    return ExportFormat("safetensors", outputs, "model", True, lambda folder: None)


def transformers_format(arrays: Mapping[str, TensorEntry], assets: Path) -> ExportFormat:
    """A folder that `from_pretrained` takes: names, ties and cuts as in files that transformers itself has written.

    Args:
        arrays: as for `safetensors_format`.
        assets: of the run, with the model's `config.json`.

    Raises:
        ConfigError: where transformers is not installed.
        RunError: where the assets are not those of a transformers model.
        CheckpointError: where the arrays are not those of the model that the assets describe.
    """
    if not (assets / "config.json").is_file():
        raise RunError(
            f"{assets.parent}: the task has no Hugging Face format: it saved no config.json of a transformers model "
            "among the assets. Define save_assets(folder), which saves it and the tokenizer, before training (see "
            "docs/tutorial-transformers.md). to=safetensors writes the arrays under their own names, for torch or any "
            "other reader"
        )
    require_extra("transformers", "language", "to=hf")
    from transformers.core_model_loading import revert_weight_conversion

    model = _skeleton(assets)
    name = type(model).__name__
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    firsts: dict[int, str] = {}  # tied parameters are saved once in a commit, by the first of their names
    state: dict[str, tuple[str, Tensor]] = {}
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, value in model.state_dict().items():
        first = firsts.setdefault(id(parameters[key]), key) if key in parameters else key
        if key not in tied and not any(pattern.search(key) for pattern in ignored):
            state[key] = (first, value)
    extra = _optional_heads(arrays, model)
    _check({key: array for key, array in arrays.items() if key not in extra}, dict(state.values()), model, name)
    outputs = []
    for key, (first, _) in state.items():
        array = arrays[first]
        meta = torch.empty(array.shape, dtype=array.dtype, device="meta")
        made = revert_weight_conversion(model, {key: meta})
        alone = len(made) == 1 and next(iter(made.values())) is meta
        convert = None if alone else (lambda tensor, key=key: revert_weight_conversion(model, {key: tensor}))
        for written, part in made.items():
            outputs.append(Output(TensorEntry(written, array.dtype, tuple(part.shape)), array.name, convert))
    whole = {key: torch.empty(arrays[first].shape, device="meta") for key, (first, _) in state.items()}
    expected = {key: tuple(value.shape) for key, value in revert_weight_conversion(model, whole).items()}
    if expected != {output.entry.name: output.entry.shape for output in outputs}:
        raise RunError(
            f"transformers combines several of the model's tensors into one for {name}, which is not supported. "
            "Export the arrays under their own names: to=safetensors"
        )
    outputs += [Output(TensorEntry(key, array.dtype, array.shape), array.name) for key, array in extra.items()]

    def finish(folder: Path) -> None:
        _write_config(model, assets, folder, _dtype(outputs))
        _write_tokenizer(assets, folder)

    return ExportFormat(f"{name} of transformers", tuple(outputs), "model", False, finish)


def peft_format(arrays: Mapping[str, TensorEntry], assets: Path, adapter: Lora, base: str | None) -> ExportFormat:
    """A folder that `PeftModel.from_pretrained` takes: the adapters alone.

    Args:
        arrays: as for `safetensors_format`.
        assets: of the run.
        adapter: the run's group `adapter`.
        base: folder of the pretrained model, where there is one.

    Raises:
        ConfigError: where PEFT is not installed.
        CheckpointError: where there is more than adapters, which the base alone would not have.
    """
    require_extra("peft", "lora", "an export of adapters")
    pattern = re.compile(r"(.+)\.(lora_[AB])\.default\.weight")
    matched = {name: pattern.fullmatch(name) for name in arrays}
    others = [name for name, match in matched.items() if match is None]
    if others:
        raise CheckpointError(
            f"besides adapters the run saved {len(others)} buffers of the model, first '{others[0]}', for which "
            "PEFT's format has no place: export the merged model (merge=true), or plain arrays (to=safetensors)"
        )
    layers = sorted({match[1] for match in matched.values() if match})
    outputs = tuple(
        Output(
            TensorEntry(f"base_model.model.{match[1]}.{match[2]}.weight", arrays[name].dtype, arrays[name].shape),
            array.name,
        )
        for name, array in arrays.items()
        if (match := matched[name])
    )

    def finish(folder: Path) -> None:
        from peft import LoraConfig

        LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            lora_dropout=adapter.dropout,
            target_modules="|".join(map(re.escape, layers)),  # a text is matched whole, a list by endings too
            base_model_name_or_path=base,
            task_type="CAUSAL_LM" if _is_causal(assets) else None,
            inference_mode=True,
        ).save_pretrained(folder)
        _write_tokenizer(assets, folder)

    return ExportFormat(f"adapters of {len(layers)} layers, for PEFT", outputs, "adapter_model", False, finish)


def _skeleton(assets: Path) -> Any:
    """The transformers model of a run, without numbers."""
    import transformers as library

    try:
        config = hf_config.read_config(assets)
        named = getattr(library, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            if isinstance(named, type) and issubclass(named, library.PreTrainedModel):
                return named._from_config(config, dtype=torch.float32)  # type: ignore[attr-defined]
            return library.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # each architecture validates in its own way
        raise RunError(
            f"{assets / 'config.json'} does not describe a model that transformers can build: {error}. to=safetensors "
            "writes the arrays under their own names"
        ) from error


def _optional_heads(arrays: Mapping[str, TensorEntry], model: Any) -> dict[str, TensorEntry]:
    """Arrays that the class reads only on request, such as a text head; transformers keeps their own names."""
    declared = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    known = model.state_dict()
    return {
        key: array
        for key, array in arrays.items()
        if key not in known and any(pattern.search(key) for pattern in declared)
    }


def _check(arrays: Mapping[str, TensorEntry], model: Mapping[str, Tensor], made: Any, name: str) -> None:
    optional = {key for key, _ in made.named_buffers()}  # such as statistics that files leave out
    missing = [key for key in model if key not in arrays]
    unexpected = [key for key in arrays if key not in model and key not in optional]
    if missing or unexpected:
        raise CheckpointError(
            f"the run's arrays do not match {name}, which its assets describe: missing {missing[:4] or 'nothing'}, "
            f"unexpected {unexpected[:4] or 'nothing'} ({len(missing)} and {len(unexpected)} in all). to=safetensors "
            "writes them under their own names"
        )
    for key, value in model.items():
        if arrays[key].shape != tuple(value.shape):
            raise CheckpointError(
                f"'{key}' has shape {arrays[key].shape} in the run, but {tuple(value.shape)} in {name}, which its "
                "assets describe. to=safetensors writes it unchanged"
            )


def _write_config(model: Any, assets: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """The model's and the generation's configuration, as transformers has them for a model that is used."""
    from transformers import GenerationConfig

    config = model.config
    text = config.get_text_config()
    config.architectures = [type(model).__name__]
    if dtype is not None:
        config.dtype = _NAMED[dtype]
    if getattr(text, "use_cache", None) is False:  # while it is trained, there is nothing to keep
        text.use_cache = True
    special = assets / "special_tokens.json"
    if (assets / "generation_config.json").is_file():
        hf_config.copy_settings(assets, "generation_config.json", folder)
    else:
        if special.is_file():
            ids = _read(assets, special.name, _SpecialTokens)
            text.bos_token_id, text.eos_token_id = ids["first"], ids["last"]
        if model.can_generate():
            generation = GenerationConfig.from_model_config(config)
            if generation.pad_token_id is None:
                generation.pad_token_id = text.eos_token_id
            generation.save_pretrained(folder)
    config.save_pretrained(folder)


class _SpecialTokens(TypedDict):
    first: Count | None
    last: Count | None


class _Architecture(TypedDict):
    model_type: str


def _read(assets: Path, name: str, shape: Any) -> Any:
    """A record among the assets of a run, which may be anybody's.

    Raises:
        CheckpointError: If it is damaged.
    """
    try:
        return safe_paths.read_json(assets, name, shape)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{assets / name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _write_tokenizer(assets: Path, folder: Path) -> None:
    """The tokenizer's files as they came; or, of one that the run has trained, as transformers writes them.

    A prompt gets the token with which every document of the training began, whatever the file asked for: without it, a
    model continues a text of a kind that it never saw.
    """
    if not (assets / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer

    with wrap_native_errors(f"{assets / 'tokenizer.json'} cannot be read as a tokenizer", CheckpointError):
        engine = Tokenizer.from_str(safe_paths.read_text(assets, "tokenizer.json"))
    special = assets / "special_tokens.json"
    ids = _read(assets, special.name, _SpecialTokens) if special.is_file() else {}
    begins = not ids or _begins_prompts(engine, ids["first"])
    if not begins:
        _begin_prompts(engine, ids["first"])
    if (assets / "tokenizer_config.json").is_file() or find_spec("transformers") is None:
        for name in _TOKENIZER:
            if (assets / name).exists():
                hf_config.copy_settings(assets, name, folder)
        if not begins:
            engine.save(str(folder / "tokenizer.json"))
            _ask_for_first_token(folder / "tokenizer_config.json")
        return
    from transformers import PreTrainedTokenizerFast

    tokens = {"bos_token": ids.get("first"), "eos_token": ids.get("last"), "pad_token": ids.get("last")}
    named = {name: engine.id_to_token(number) for name, number in tokens.items() if number is not None}
    PreTrainedTokenizerFast(tokenizer_object=engine, **named).save_pretrained(folder)


def _begins_prompts(engine: Any, first: int | None) -> bool:
    """Whether a tokenizer puts this token before a text, and nothing else around it."""
    return bool(engine.encode("").ids == ([] if first is None else [first]))


def _begin_prompts(engine: Any, first: int | None) -> None:
    """Make a tokenizer put this token before every text, and nothing else around it."""
    from tokenizers.processors import TemplateProcessing

    if first is None:
        engine.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
        return
    token = engine.id_to_token(first)
    engine.post_processor = TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, first)]
    )


def _ask_for_first_token(path: Path) -> None:
    """Correct a `tokenizer_config.json` that says that no token is put before a text."""
    values = _read(path.parent, path.name, Object) if path.is_file() else {}
    if values.get("add_bos_token") is False:
        path.write_text(json.dumps({**values, "add_bos_token": True}, indent=2) + "\n", encoding="utf-8")


def _is_causal(assets: Path) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        kind = safe_paths.read_json(assets, "config.json", _Architecture, hf_config.LARGEST)["model_type"]
    except (OSError, ValueError):
        return False
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _dtype(outputs: list[Output]) -> torch.dtype | None:
    """The floating-point dtype of most bytes."""
    sizes: dict[torch.dtype, int] = {}
    for output in outputs:
        if output.entry.dtype in _NAMED:
            sizes[output.entry.dtype] = sizes.get(output.entry.dtype, 0) + output.entry.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)
