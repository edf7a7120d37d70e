"""Exports a checkpoint for other libraries: streamed from file to file, by up to as many threads as there are files.

Reading, casting and writing leave Python's lock, so threads write as fast as processes would, which would have to
start, and to verify what they read once more. The plan of files depends on the manifest alone, so the ranks of a run
can divide it too. A writer holds one block of one tensor at a time, or a whole tensor if it must be converted, such as
stacked experts. The folder appears atomically, and nothing is overwritten.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.checkpoint.core import assets, commit, placement
from unisono.checkpoint.core.manifest import Checkpoint, folder_name, parse_step
from unisono.checkpoint.exchange import export_formats, hf_shards
from unisono.checkpoint.exchange.export_formats import ExportFormat
from unisono.checkpoint.exchange.hf_shards import TensorEntry, TensorFile
from unisono.checkpoint.remote.description import ASSETS
from unisono.config import CONFIG_FILE, safe_yaml
from unisono.config.schema.run import Lora
from unisono.config.schema.verbs import Export
from unisono.runtime.communication.communicator import usable_cores
from unisono.runtime.errors import CheckpointError, RunError, format_ranges
from unisono.runtime.files import atomic_folder, pickle_hint

if TYPE_CHECKING:
    from torch import nn

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL, _EMA = "model/", "ema/"
_CONVERTING = Lock()  # transformers' functions may keep something with the model that all writers have


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        folder: the new folder.
        description: of the export.
        step: number of updates of the weights.
        files: number of tensor files.
        tensors: number of tensors.
        size: of the tensors in bytes.
    """

    folder: Path
    description: str
    step: int
    files: int
    tensors: int
    size: int


@dataclass(frozen=True)
class Plan:
    """What to write, and from which arrays: their shapes, and what reads a piece of one (name, offset, shape)."""

    form: ExportFormat
    files: list[TensorFile]
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]


def export(folder: Path, words: Export, build_merged: Callable[[Path, bool, int], nn.Module] | None = None) -> Exported:
    """Write a run's weights for other libraries.

    Args:
        folder: of the run.
        words: of the command.
        build_merged: builds the model of a run with its adapters merged, from (folder, ema, step); for `merge`.

    Raises:
        UnisonoError: if the run has no such checkpoint or weights, the checkpoint is damaged, the task has no such
            format, or the folder exists already or cannot be written.
    """
    checkpoint = commit.open_checkpoint(find_checkpoint(folder, words.step))  # every byte is verified here, once
    assets.check(checkpoint, folder)
    out = choose_folder(folder, checkpoint.step, words)
    if words.merge and read_adapter_settings(folder) is None:
        raise RunError(f"{folder} has no adapters to merge; remove merge=true")
    if words.merge:
        assert build_merged is not None
        plan = _plan_model(build_merged(folder, words.ema, checkpoint.step), folder, words)
    else:
        plan = plan_checkpoint(checkpoint, folder, words)
    check_room(out, sum(file.size for file in plan.files))
    try:
        with atomic_folder(out) as temporary:
            shares = assign_files(plan.files, _count_writers(words, plan.files))
            _write_together(plan, temporary, shares)
            finish(plan, temporary)
    except FileExistsError as error:
        raise RunError(
            f"{out} was created by someone else meanwhile and was not changed. Choose another out=DIR"
        ) from error
    except OSError as error:
        raise RunError(
            f"{out} cannot be written: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
            + "; the partial export was removed. Free disk space, or choose another out=DIR"
        ) from error
    size = sum(file.size for file in plan.files)
    return Exported(out, plan.form.description, checkpoint.step, len(plan.files), len(plan.form.outputs), size)


def choose_folder(folder: Path, step: int, words: Export) -> Path:
    """Where an export of a run goes; refused if something is there."""
    out = words.out or default_folder(folder, step, words)
    if os.path.lexists(out):
        raise RunError(f"{out} already exists and is not overwritten; choose another folder: out=DIR")
    if not words.out and out.parent.is_symlink():
        raise RunError(f"{out.parent} is a link, and nothing is written through it; choose another folder: out=DIR")
    return out


def default_folder(folder: Path, step: int, words: Export) -> Path:
    """Where an export of a run goes, if its words do not say it."""
    marks = (words.to, "ema" * words.ema, words.dtype if words.dtype != "kept" else "", "merged" * words.merge)
    return folder / "exports" / "-".join([folder_name(step), *filter(None, marks)])


def finish(plan: Plan, folder: Path) -> None:
    """Write what stands beside the files of tensors: their index, the configuration, the tokenizer."""
    if plan.form.indexed or len(plan.files) > 1:
        name = f"{plan.form.stem}.safetensors.index.json"
        (folder / name).write_text(hf_shards.index_json(plan.files), encoding="utf-8")
    plan.form.finish(folder)


def read_adapter_settings(folder: Path) -> Lora | None:
    """The adapter settings of a run; None if it trains none."""
    values = safe_yaml.read_yaml(folder / CONFIG_FILE).get("adapter")
    return None if values is None else Lora.model_validate(values)


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The newest checkpoint of a run, or that of a step; not yet verified.

    Raises:
        RunError: if there is no run, or no such checkpoint, or only a part of the newest, or if all have gone.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise RunError(f"{folder} is not a run directory (no config.yaml){pickle_hint(folder)}")
    checkpoints = {parse_step(path.name): path for path in commit.find_checkpoints(folder / placement.NAME)}
    known = commit.find_newest_step(folder / placement.NAME)
    if step is None and known is not None and known > max(checkpoints, default=-1):
        older = f", or choose an older one: step={max(checkpoints)}" if checkpoints else ""
        raise RunError(
            f"{folder} has only a part of the newest checkpoint, of step {known}; start the run again to fetch the "
            f"rest from its store{older}"
        )
    if not checkpoints:
        placement.refuse_lost(folder)
        raise RunError(f"{folder} has no checkpoint yet")
    if step is None:
        return checkpoints[max(checkpoints)]
    if step not in checkpoints:
        raise RunError(
            f"{folder} has no checkpoint of step {step}; available steps: {format_ranges(sorted(checkpoints))}"
        )
    return checkpoints[step]


def plan_checkpoint(checkpoint: Checkpoint, folder: Path, words: Export) -> Plan:
    """The plan of a checkpoint, from its manifest alone."""
    from unisono.engines.torch.state import saved_tensors

    form, reader = choose_format(checkpoint.arrays, folder, words), checkpoint.reader()
    return Plan(form, _plan_files(form, words), reader.shapes, partial(saved_tensors.read_tensor, reader))


def choose_format(saved: Mapping[str, Any], folder: Path, words: Export) -> ExportFormat:
    """What a run's arrays become.

    Args:
        saved: by name, each with `shape` and `dtype`, as in a manifest.
        folder: of the run.
        words: of the command.

    Raises:
        UnisonoError: where the arrays are not those of the format.
    """
    arrays = _select_entries(saved, words.ema, folder)
    arrays = {name: TensorEntry(e.name, _target_dtype(e.dtype, words), e.shape) for name, e in arrays.items()}
    if words.to == "safetensors":
        return export_formats.safetensors_format(arrays)
    adapter = read_adapter_settings(folder)
    if adapter is None:
        return export_formats.transformers_format(arrays, folder / ASSETS)
    base = (safe_yaml.read_yaml(folder / CONFIG_FILE).get("model") or {}).get("path")
    return export_formats.peft_format(arrays, folder / ASSETS, adapter, base)


def _plan_model(model: nn.Module, folder: Path, words: Export) -> Plan:
    from unisono.engines.torch.state import sharded_tensors

    tensors = {
        name.removeprefix(_MODEL): value.detach() for name, value in sharded_tensors.model_tensors(model).items()
    }
    arrays = {n: TensorEntry(n, _target_dtype(value.dtype, words), tuple(value.shape)) for n, value in tensors.items()}
    form = (
        export_formats.safetensors_format(arrays)
        if words.to == "safetensors"
        else export_formats.transformers_format(arrays, folder / ASSETS)
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read(name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

    return Plan(form, _plan_files(form, words), shapes, read)


def _select_entries(arrays: Mapping[str, Any], ema: bool, folder: Path) -> dict[str, TensorEntry]:
    """The model's arrays by their names in the model: parameters, or their average, and buffers."""

    def entry(name: str) -> TensorEntry:
        dtype = getattr(torch, arrays[name]["dtype"])
        if dtype not in hf_shards.CODES:
            raise RunError(f"'{name}' has dtype {dtype}, which safetensors files do not support")
        return TensorEntry(name, dtype, tuple(arrays[name]["shape"]))

    average_names = {name.removeprefix(_EMA) for name in arrays if name.startswith(_EMA)}
    if ema and not average_names:
        raise RunError(f"{folder} has no moving average of its weights; it was trained without ema.decay")
    entries = {}
    for name in arrays:
        model_name = name.removeprefix(_MODEL)
        if name.startswith(_MODEL):
            entries[model_name] = entry(_EMA + model_name if ema and model_name in average_names else name)
    if not entries:
        raise CheckpointError(f"{folder}: the checkpoint holds no model weights")
    return entries


def _target_dtype(dtype: torch.dtype, words: Export) -> torch.dtype:
    return _DTYPES.get(words.dtype, dtype) if dtype.is_floating_point else dtype


def _plan_files(form: ExportFormat, words: Export) -> list[TensorFile]:
    return hf_shards.plan_files([output.entry for output in form.outputs], words.shard_mb * 1e6, form.stem)


def _count_writers(words: Export, files: Sequence[TensorFile]) -> int:
    return min(len(files), usable_cores() if words.processes == "auto" else words.processes)


def assign_files(files: Sequence[TensorFile], count: int) -> list[list[str]]:
    """Assign files to so many writers, largest first, each to the one with the least to write."""
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for file in sorted(files, key=lambda file: -file.size):
        least = min(range(count), key=lambda number: shares[number][0])
        shares[least] = (shares[least][0] + file.size, [*shares[least][1], file.name])
    return [names for _, names in shares]


def check_room(out: Path, size: int, advice: str = "choose another out=DIR, or a smaller dtype=bf16") -> None:
    """Refuse an export for which the disk has no room.

    Args:
        out: its folder.
        size: in bytes.
        advice: what else can be done than to free disk space.
    """
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise RunError(
            f"{out} needs {size / 1e6:.1f} MB, but {existing} has {free / 1e6:.1f} MB left; free disk space, {advice}"
        )


def _write_together(plan: Plan, folder: Path, shares: Sequence[list[str]]) -> None:
    stopped = Event()
    with ThreadPoolExecutor(len(shares)) as threads:
        jobs = [threads.submit(write, plan, folder, set(names), stopped) for names in shares]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            stopped.set()  # the first that fails, or Ctrl-C, ends the others


def write(plan: Plan, folder: Path, names: set[str], stopped: Event | None = None) -> None:
    """Write these files of a plan; once `stopped` is set, raise before the next block or tensor."""
    outputs = {output.entry.name: output for output in plan.form.outputs}
    converted: dict[str, Mapping[str, Tensor]] = {}  # the tensors that the last array was converted to

    def go_on() -> None:
        if stopped is not None and stopped.is_set():
            raise CancelledError

    def content(entry: TensorEntry) -> Iterator[Tensor]:
        go_on()
        output = outputs[entry.name]
        if output.convert is None:
            for piece in hf_shards.blocks(entry.shape, max(4, entry.dtype.itemsize)):  # it is saved in fp32, mostly
                go_on()
                yield _cast(plan.read(output.source, *piece), entry)
            return
        if output.source not in converted:
            converted.clear()
            shape = plan.shapes[output.source]
            whole = _cast(plan.read(output.source, (0,) * len(shape), shape), entry)
            with _CONVERTING:
                go_on()  # it may have waited for the others' conversions
                converted[output.source] = output.convert(whole)
        yield converted[output.source][entry.name]

    for file in plan.files:
        if file.name in names:
            with (folder / file.name).open("wb") as stream:
                hf_shards.write(stream, file.entries, content)


def _cast(block: Tensor, entry: TensorEntry) -> Tensor:
    """Convert a block to the dtype of an entry; refuses values that this dtype cannot represent."""
    converted = block.to(entry.dtype)
    if converted.dtype == block.dtype or bool(converted.isfinite().all()):
        return converted
    if not torch.equal(converted.isfinite(), block.isfinite()):
        raise CheckpointError(
            f"'{entry.name}' has values up to {float(block[block.isfinite()].abs().max()):.3g}, which "
            f"{str(entry.dtype).removeprefix('torch.')} cannot hold; choose another dtype"
        )
    return converted
