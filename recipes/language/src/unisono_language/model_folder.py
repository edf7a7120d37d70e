"""Local models of Hugging Face without a run: `unisono generate DIR …` and `unisono evaluate DIR data=…`."""

from __future__ import annotations

from pathlib import Path

from unisono.recipe_tools import hf_config

_QUOTED = ("\\", '"')


def open_folder(folder: Path) -> list[str] | None:
    """The overrides with which the recipe begins with the model in a folder; None where that is no causal model."""
    if not (folder / hf_config.CONFIG).is_file():
        return None
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = hf_config.read_settings(folder).get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    path = str(folder.resolve())
    for character in _QUOTED:
        path = path.replace(character, f"\\{character}")
    return ["model=pretrained", f'model.path="{path}"']
