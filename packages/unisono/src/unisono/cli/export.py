"""The verbs `unisono export` and `unisono import`: a run's weights for other libraries, and theirs for a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.cli import arguments
from unisono.runtime.console import say
from unisono.runtime.display.preparing import preparing

if TYPE_CHECKING:
    from torch import nn

EXPORT = "write a checkpoint's weights for transformers or PEFT, or as plain safetensors"
IMPORT = "convert weights of other tools to safetensors, without running code from pickle files (.pt, .bin)"


def add_verbs(verbs: Any) -> None:
    """Put the verbs among the others."""
    verb = verbs.add_parser("export", help=EXPORT, description=EXPORT)
    arguments.add_run(verb)
    arguments.add_task_options(verb)
    arguments.add_overrides(
        verb, "to=hf|safetensors|onnx, step=N, out=DIR, shard_mb=5000, processes=auto, ema=true, dtype=bf16, merge=true"
    )
    verb.set_defaults(run=_export)
    verb = verbs.add_parser("import", help=IMPORT, description=IMPORT)
    verb.add_argument("source", type=Path, metavar="DIR_OR_FILE", help="weights.pt, a model folder of transformers, …")
    arguments.add_overrides(
        verb, "out=FILE.safetensors or out=DIR, key=state_dict, like=DIR, moments=FILE.safetensors, shard_mb=5000"
    )
    verb.set_defaults(run=_import)


def _export(parsed: argparse.Namespace) -> int:
    from unisono.checkpoint.exchange.export import export
    from unisono.config.schema.verbs import Export
    from unisono.launch.trained.run import load_model

    words = arguments.parse_settings(parsed, Export)
    if words.to == "onnx":
        from unisono.launch.trained.onnx_export import export_onnx
        from unisono.launch.trained.run import open_run

        with preparing(f"exporting {parsed.folder}"):
            exported = export_onnx(open_run(parsed.folder, task=parsed.task, trust=parsed.trust), words)
        say("\n".join(exported.lines()))
        return 0

    def build_merged(folder: Path, ema: bool, step: int) -> nn.Module:
        model: nn.Module = load_model(folder, ema=ema, step=step, task=parsed.task, trust=parsed.trust)
        return model

    with preparing(f"exporting {parsed.folder}"):
        made = export(parsed.folder, words, build_merged)
    say(
        f"{made.folder}: {made.description}, step {made.step}; {made.tensors} tensors, {made.size / 1e6:.1f} MB in "
        f"{made.files} file{'s' * (made.files != 1)}"
    )
    return 0


def _import(parsed: argparse.Namespace) -> int:
    from unisono.checkpoint.exchange.pickle_import import import_weights
    from unisono.config.schema.verbs import Import

    words = arguments.parse_settings(parsed, Import)
    made = import_weights(parsed.source, words)
    say(f"{made.out}: {made.tensors} tensors, {made.size / 1e6:.1f} MB")
    if words.moments is not None:
        say(f"{words.moments}: moments of {made.moments} parameter{'s' * (made.moments != 1)}")
    for line in made.left_out:
        say(f"  left out: {line}")
    return 0
