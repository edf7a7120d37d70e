"""Exports a checkpoint for other libraries: streamed from file to file, by up to as many processes as there are files.

The plan of files depends on the manifest alone, so every process can compute it, and is sent only the names of its own
files. A process holds one block of one tensor at a time, or a whole tensor if it must be converted, such as stacked
experts. The folder appears atomically, and nothing is overwritten.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from unisono.checkpoint.core import assets, commit
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.exchange import export_formats, hf_shards
from unisono.checkpoint.exchange.export_formats import ExportFormat, Output
from unisono.checkpoint.exchange.hf_shards import CODES, DTYPES, TensorEntry, TensorFile
from unisono.config import safe_yaml
from unisono.config.schema.run import Lora
from unisono.config.schema.verbs import Export
from unisono.engines.state import StateReader
from unisono.runtime.communicator import usable_cores
from unisono.runtime.errors import CheckpointError, RunError, format_ranges
from unisono.runtime.files import atomic_folder, pickle_hint

if TYPE_CHECKING:
    from torch import nn

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL, _EMA = "model/", "ema/"
_BYTES_PER_PROCESS = 1 << 30  # bytes that take one process longer to write than a second one takes to start


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


class TensorReader(Protocol):
    """A source of tensors to export."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every array by name."""
        ...

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A piece of an array."""
        ...


@dataclass(frozen=True)
class _Plan:
    """What to write, and from which arrays."""

    form: ExportFormat
    files: list[TensorFile]
    reader: TensorReader


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
    out = words.out or folder / "exports" / _folder_name(checkpoint.step, words)
    if os.path.lexists(out):
        raise RunError(f"{out} already exists and is not overwritten; choose another folder: out=DIR")
    if words.merge and read_adapter_settings(folder) is None:
        raise RunError(f"{folder} has no adapters to merge; remove merge=true")
    if words.merge:
        assert build_merged is not None
        plan = _plan_model(build_merged(folder, words.ema, checkpoint.step), folder, words)
    else:
        plan = _plan_checkpoint(checkpoint, folder, words)
    _check_room(out, sum(file.size for file in plan.files))
    try:
        with atomic_folder(out) as temporary:
            shares = _assign_files(plan.files, 1 if words.merge else _processes(words, plan.files))
            if len(shares) == 1:
                _write(plan, temporary, {file.name for file in plan.files})
            else:
                _write_together(
                    plan, [str(checkpoint.path), str(folder), words.model_dump_json(), str(temporary)], shares
                )
            if plan.form.indexed or len(plan.files) > 1:
                name = f"{plan.form.stem}.safetensors.index.json"
                (temporary / name).write_text(hf_shards.index_json(plan.files), encoding="utf-8")
            plan.form.finish(temporary)
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


def read_adapter_settings(folder: Path) -> Lora | None:
    """The adapter settings of a run; None if it trains none."""
    values = safe_yaml.read_yaml(folder / "config.yaml").get("adapter")
    return None if values is None else Lora.model_validate(values)


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The newest checkpoint of a run, or that of a step; not yet verified.

    Raises:
        RunError: if there is no run, or no such checkpoint.
    """
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run directory (no config.yaml){pickle_hint(folder)}")
    checkpoints = {int(path.name.rpartition("-")[2]): path for path in commit.find_checkpoints(folder / "checkpoints")}
    if not checkpoints:
        raise RunError(f"{folder} has no checkpoint yet")
    if step is None:
        return checkpoints[max(checkpoints)]
    if step not in checkpoints:
        raise RunError(
            f"{folder} has no checkpoint of step {step}; available steps: {format_ranges(sorted(checkpoints))}"
        )
    return checkpoints[step]


def _folder_name(step: int, words: Export) -> str:
    marks = (words.to, "ema" * words.ema, words.dtype if words.dtype != "kept" else "", "merged" * words.merge)
    return f"step-{step:08d}-" + "-".join(mark for mark in marks if mark)


def _plan_checkpoint(checkpoint: Checkpoint, folder: Path, words: Export) -> _Plan:
    """The plan of a checkpoint, from its manifest alone."""
    arrays = _select_entries(checkpoint.arrays, words.ema, folder)
    arrays = {name: TensorEntry(e.name, _target_dtype(e.dtype, words), e.shape) for name, e in arrays.items()}
    adapter = read_adapter_settings(folder)
    if words.to == "safetensors":
        form = export_formats.safetensors_format(arrays)
    elif adapter is not None:
        base = (safe_yaml.read_yaml(folder / "config.yaml").get("model") or {}).get("path")
        form = export_formats.peft_format(arrays, folder / "assets", adapter, base)
    else:
        form = export_formats.transformers_format(arrays, folder / "assets")
    return _Plan(form, _plan_files(form, words), _SavedTensors(checkpoint.reader()))


def _plan_model(model: nn.Module, folder: Path, words: Export) -> _Plan:
    """The plan of a model that is in memory."""
    from unisono.engines.torch import sharded_tensors

    tensors = {
        name.removeprefix(_MODEL): value.detach() for name, value in sharded_tensors.model_tensors(model).items()
    }
    arrays = {n: TensorEntry(n, _target_dtype(value.dtype, words), tuple(value.shape)) for n, value in tensors.items()}
    form = (
        export_formats.safetensors_format(arrays)
        if words.to == "safetensors"
        else export_formats.transformers_format(arrays, folder / "assets")
    )
    return _Plan(form, _plan_files(form, words), _InMemoryTensors(tensors))


class _SavedTensors:
    """Arrays of a checkpoint, as tensors."""

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._reader.shapes

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        from unisono.engines.torch import saved_tensors

        return saved_tensors.read_tensor(self._reader, name, offset, shape)


class _InMemoryTensors:
    """Arrays in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


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


def _processes(words: Export, files: Sequence[TensorFile]) -> int:
    if words.processes != "auto":
        return min(len(files), words.processes)
    return min(len(files), usable_cores(), 1 + sum(file.size for file in files) // _BYTES_PER_PROCESS)


def _assign_files(files: Sequence[TensorFile], count: int) -> list[list[str]]:
    """Assign files to processes, largest first, each to the one with the least to write."""
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for file in sorted(files, key=lambda file: -file.size):
        least = min(range(count), key=lambda number: shares[number][0])
        shares[least] = (shares[least][0] + file.size, [*shares[least][1], file.name])
    return [names for _, names in shares]


def _check_room(out: Path, size: int) -> None:
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        raise RunError(
            f"{out} needs {size / 1e6:.1f} MB, but {existing} has {free / 1e6:.1f} MB left; free disk space, choose "
            "another out=DIR, or a smaller dtype=bf16"
        )


def _write(plan: _Plan, folder: Path, names: set[str]) -> None:
    """Write these files of a plan."""
    outputs = {output.entry.name: output for output in plan.form.outputs}
    content = _Content(plan.reader, outputs)
    for file in plan.files:
        if file.name in names:
            with (folder / file.name).open("wb") as stream:
                hf_shards.write(stream, file.entries, content)


class _Content:
    """The blocks of the tensors to write; the converted tensors of the last array are cached."""

    def __init__(self, reader: TensorReader, outputs: Mapping[str, Output]) -> None:
        self._reader, self._outputs = reader, outputs
        self._last_conversion: tuple[str, Mapping[str, Tensor]] = ("", {})

    def __call__(self, entry: TensorEntry) -> Iterator[Tensor]:
        output = self._outputs[entry.name]
        if output.convert is not None:
            yield self._convert(output)
            return
        for offset, shape in hf_shards.blocks(entry.shape, max(4, entry.dtype.itemsize)):  # it is saved in fp32, mostly
            yield _cast(self._reader.read(output.source, offset, shape), entry)

    def _convert(self, output: Output) -> Tensor:
        assert output.convert is not None
        if self._last_conversion[0] != output.source:
            self._last_conversion = ("", {})
            shape = self._reader.shapes[output.source]
            whole = _cast(self._reader.read(output.source, (0,) * len(shape), shape), output.entry)
            self._last_conversion = (output.source, output.convert(whole))
        return self._last_conversion[1][output.entry.name]


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


# several processes --------------------------------------------------------------------------------------------------


def _write_together(plan: _Plan, job: list[str], shares: Sequence[list[str]]) -> None:
    """Write the files of a plan, each process its own; the first that fails ends the others.

    If no tensor needs conversion, each process receives its part of the plan, and need not import what computes it.
    """
    sources = {output.entry.name: output.source for output in plan.form.outputs if output.convert is None}
    is_plain = len(sources) == len(plan.form.outputs)
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, Any] = {}
    try:
        for names in shares:
            receiver, sender = context.Pipe(duplex=False)
            share = [file for file in plan.files if file.name in names]
            message = [
                [f.name, [[e.name, CODES[e.dtype], e.shape, sources[e.name]] for e in f.entries]]
                for f in share
                if is_plain
            ]
            process = context.Process(
                target=_write_share, args=(json.dumps([*job, names, message]), sender), daemon=True
            )
            process.start()
            sender.close()
            running[receiver] = process
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                _read_reply(ready, running[ready])
                running.pop(ready).join()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()


def _read_reply(connection: Connection, process: Any) -> None:
    """Read a process's reply when it ends; raises the error that occurred in it."""
    try:
        fault = json.loads(connection.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode
        reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise RunError(
            f"a process that wrote part of the export {reason}; the partial export was removed. If memory ran "
            "out, processes=1 needs the least"
        ) from None
    if fault is None:
        return
    kind, number, text, file = fault
    if kind == "os":
        raise OSError(number, text, file)
    if kind == "user":
        raise CheckpointError(text)
    raise RuntimeError(f"a process that wrote part of the export failed:\n{text}")


def _write_share(job: str, connection: Connection) -> None:
    """Run in each process: compute the same plan as the others and write this process's files."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    path, folder, words, temporary, names, message = json.loads(job)
    torch.set_num_threads(1)
    fault: list[Any] | None = None
    try:
        plan = (
            _plan_from_message(Path(path), message)
            if message
            else _plan_checkpoint(commit.read_manifest(Path(path)), Path(folder), Export.model_validate_json(words))
        )
        _write(plan, Path(temporary), set(names))
    except OSError as error:
        fault = ["os", error.errno, error.strerror, error.filename]
    except CheckpointError as error:
        fault = ["user", 0, str(error), None]
    except Exception:
        fault = ["bug", 0, traceback.format_exc(), None]
    connection.send_bytes(json.dumps(fault).encode())


def _plan_from_message(path: Path, message: list[Any]) -> _Plan:
    """Rebuild a process's part of a plan."""
    files, outputs = [], []
    for name, entries in message:
        file_outputs = [
            Output(TensorEntry(n, DTYPES[code], tuple(shape)), source) for n, code, shape, source in entries
        ]
        files.append(TensorFile(name, tuple(output.entry for output in file_outputs)))
        outputs += file_outputs
    form = ExportFormat("", tuple(outputs), "", False, lambda folder: None)
    return _Plan(form, files, _SavedTensors(commit.read_manifest(path).reader()))


def _exit_with_parent() -> None:
    """End this process with its parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
