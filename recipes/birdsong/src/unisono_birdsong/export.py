"""An encoder as two files that need no trainer: `encoder.json` says what it is, `encoder.safetensors` has its weights.

`load_encoder` builds it from them and nothing else. Weights are never put into an encoder of other settings: that is
refused with the settings that differ, since shapes alone would let many through (the rate of the sound, how it is
normalised, where patches stand).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NotRequired, cast

import equinox as eqx
import jax
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.numpy import load, save
from typing_extensions import TypedDict

from unisono import ConfigError, DataError, Run, RunError, __version__
from unisono.recipe_tools import safe_paths, wrap_native_errors
from unisono_birdsong.data.library import TaskOfRecordings
from unisono_birdsong.model.encoder import Encoder
from unisono_birdsong.settings import EncoderSettings

SETTINGS, WEIGHTS, FORMAT = "encoder.json", "encoder.safetensors", "unisono birdsong encoder 1"


def export(run: Run, out: Path | None = None, ema: bool = False, step: int | None = None) -> Iterator[str]:
    """Write a run's encoder: encoder.safetensors and encoder.json, for `load_encoder(DIR)` and task.weights=DIR.

    Args:
        run: its folder.
        out: folder to write, by default RUN/encoder-STEP.
        ema: use the moving average of the weights.
        step: use the checkpoint after this step, in place of the newest.
    """
    task = cast("TaskOfRecordings", run.task)
    encoder = run.load_model(ema=ema, step=step).encoder
    updates = run.newest_step if step is None else step
    out = out or run.folder / f"encoder-{updates:08d}{'-ema' * ema}"
    size = write_encoder(encoder, out, {"run": run.folder.name, "step": updates, "classes": list(task.classes)})
    yield f"{out}: encoder of {size:,} parameters after {updates} steps, {digest(encoder)}"


def write_encoder(encoder: Encoder, out: Path, about: Mapping[str, Any]) -> int:
    """Write an encoder, and where it comes from, to a folder that is not there yet; it appears whole or not at all.

    Returns:
        How many parameters it has.

    Raises:
        RunError: where the folder is there already, or cannot be written.
    """
    if out.exists():
        raise RunError(f"{out} is there already, and nothing is overwritten; choose another folder by out=DIR")
    arrays = named_arrays(encoder)
    described = {
        "format": FORMAT,
        "settings": encoder.settings.model_dump(mode="json"),
        "digest": digest(encoder),
        "unisono": __version__,
        "about": dict(about),
    }
    temporary = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / WEIGHTS).write_bytes(save(arrays, {"format": FORMAT}))
        (temporary / SETTINGS).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
        temporary.rename(out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"{out} cannot be written: {error.strerror or error}; choose another out=DIR") from error
    return sum(array.size for array in arrays.values())


def load_encoder(directory: Path | str, expected: EncoderSettings | None = None) -> Encoder:
    """An exported encoder: `encoder.embedding(spectrogram)`, of pictures by `encoder.settings.pipeline()`.

    Args:
        directory: that `unisono export` wrote.
        expected: settings that it must have; None for any.

    Raises:
        ConfigError: for an encoder of other settings, naming those that differ.
        DataError: for a folder that holds no whole encoder.
    """
    directory = Path(directory)
    settings = _read_settings(directory)
    if expected is not None:
        _check_same(settings, expected, str(directory))
    with (
        wrap_native_errors(f"{directory / WEIGHTS} cannot be read", advice="export the encoder again"),
        safe_paths.open_inside(directory, WEIGHTS) as file,
    ):
        arrays = load(file.read())
    empty = eqx.filter_eval_shape(Encoder, settings, jax.random.key(0))
    encoder = fill(empty, arrays, str(directory))
    if (found := digest(encoder)) != (described := _read_description(directory).get("digest")):
        raise DataError(
            f"{directory}: the weights have the digest {found}, and {SETTINGS} says {described}; export them again"
        )
    return encoder


def _read_settings(directory: Path) -> EncoderSettings:
    """What an exported encoder is."""
    described = _read_description(directory)
    if described["format"] != FORMAT:
        raise DataError(f"{directory} has the format '{described['format']}', and this is '{FORMAT}'; export it again")
    try:
        return EncoderSettings.model_validate(described["settings"])
    except ValidationError as error:
        raise DataError(f"{directory / SETTINGS} does not describe an encoder: {error}") from error


class _Description(TypedDict):
    format: Any
    settings: dict[str, Any]
    digest: NotRequired[str]


def _read_description(directory: Path) -> dict[str, Any]:
    try:
        return dict(safe_paths.read_json(directory, SETTINGS, _Description))
    except FileNotFoundError as error:
        hint = f"; it is a run: unisono export {directory} out=DIR" if (directory / "config.yaml").is_file() else ""
        raise DataError(f"{directory} is not an exported encoder (no {SETTINGS}){hint}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{directory / SETTINGS} does not describe an encoder: {error}") from error


def _check_same(found: EncoderSettings, expected: EncoderSettings, where: str) -> None:
    """Refuse an encoder of other settings than expected, naming every setting that differs, there and here."""
    theirs, ours = _flat(found.model_dump()), _flat(expected.model_dump())
    other = [name for name in ours if ours[name] != theirs.get(name)]
    if other:
        listed = ", ".join(f"model.{n}={_shown(theirs.get(n))} there and {_shown(ours[n])} here" for n in other)
        words = " ".join(f"model.{name}={_shown(theirs.get(name))}" for name in other)
        raise ConfigError(f"{where} holds another encoder: {listed}. Set {words}, or train one of these settings")


def named_arrays(encoder: Encoder) -> dict[str, NDArray[Any]]:
    """Its arrays by their paths: `blocks.0.attention.output.weight`."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(encoder, eqx.is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def fill(encoder: Encoder, arrays: Mapping[str, NDArray[Any]], where: str) -> Encoder:
    """The same encoder, whose arrays may be shapes alone, with these arrays by name.

    Raises:
        DataError: naming an array that is missing, too many, or of another shape, and where it comes from.
    """
    left = dict(arrays)

    def array(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name not in left:
            raise DataError(f"{where} lacks '{name}'; export the encoder again")
        if (found := left.pop(name)).shape != leaf.shape:
            raise DataError(f"{where}: '{name}' has shape {found.shape}, not {leaf.shape}; export the encoder again")
        return jax.numpy.asarray(found, leaf.dtype)

    filled: Encoder = jax.tree_util.tree_map_with_path(array, encoder)
    if left:
        raise DataError(f"{where} has '{min(left)}', which the encoder has not; export it again")
    return filled


def digest(encoder: Encoder) -> str:
    """Of settings and weights, in hex: what results of an encoder are filed under.

    Weights count as fp32, since a process that trains in fp64 loads the same checkpoint in fp64.
    """
    found = hashlib.sha256(json.dumps(encoder.settings.model_dump(mode="json"), sort_keys=True).encode())
    for name, array in sorted(named_arrays(encoder).items()):
        array = array.astype(np.float32)
        found.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()[:32]


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
