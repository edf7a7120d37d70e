"""A commit, written for other libraries: streamed from file to file, by as many processes as there are files.

Which file holds what follows from the manifest alone, so every process plans for itself, and nothing is sent but the
names of the files that are its own. A process holds one block of one tensor at a time (of a tensor that is cut
otherwise elsewhere, such as stacked experts: all of it). The folder appears by one rename, and nothing is replaced.
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

from unisono.checkpoint.core import commit
from unisono.checkpoint.core.commit import Checkpoint
from unisono.checkpoint.exchange import export_formats, hf_shards
from unisono.checkpoint.exchange.export_formats import Form, Output
from unisono.checkpoint.exchange.hf_shards import CODES, DTYPES, Entry, File
from unisono.config import safe_yaml
from unisono.config.schema.export_verb import Export
from unisono.config.schema.run import Lora
from unisono.engines.state import Reader
from unisono.runtime.communicator import cores
from unisono.runtime.errors import CheckpointError, RunError, ranges
from unisono.runtime.files import of_pickles, whole_folder

if TYPE_CHECKING:
    from torch import nn

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_MODEL, _EMA = "model/", "ema/"
_WORTH = 1 << 30  # bytes that take one process longer to write than a second one takes to start


@dataclass(frozen=True)
class Exported:
    """What an export came to.

    Attributes:
        folder: that was made.
        told: what it is.
        step: updates that made the weights.
        files: of tensors.
        tensors: in them.
        size: of them in bytes.
    """

    folder: Path
    told: str
    step: int
    files: int
    tensors: int
    size: int


class Arrays(Protocol):
    """Where the numbers come from."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every array by name."""
        ...

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A piece of an array."""
        ...


@dataclass(frozen=True)
class _Plan:
    """What is written, and from what."""

    form: Form
    files: list[File]
    reader: Arrays


def export(folder: Path, words: Export, merged: Callable[[Path, bool, int], nn.Module] | None = None) -> Exported:
    """Write a run's weights for other libraries.

    Args:
        folder: of the run.
        words: of the command.
        merged: makes the model of a run with adapters, with the weights of a step (folder, ema, step); for `merge`.

    Raises:
        UnisonoError: for a run without such a commit or such weights, a damaged commit, a task that has no such form,
            or a folder that is there already or cannot be written.
    """
    checkpoint = commit.open_(newest(folder, words.step))  # every byte is verified here, once
    out = words.out or folder / "exports" / _name(checkpoint.step, words)
    if os.path.lexists(out):
        raise RunError(f"{out} is there already, and nothing is overwritten; choose another folder by out=DIR")
    if words.merge and adapter_of(folder) is None:
        raise RunError(f"{folder} has no adapters that could be merged; leave merge=true out")
    if words.merge:
        assert merged is not None
        plan = _plan_of_model(merged(folder, words.ema, checkpoint.step), folder, words)
    else:
        plan = _plan_of(checkpoint, folder, words)
    _check_room(out, sum(file.size for file in plan.files))
    try:
        with whole_folder(out) as temporary:
            shares = _shares(plan.files, 1 if words.merge else _processes(words, plan.files))
            if len(shares) == 1:
                _write(plan, temporary, {file.name for file in plan.files})
            else:
                _write_together(
                    plan, [str(checkpoint.path), str(folder), words.model_dump_json(), str(temporary)], shares
                )
            if plan.form.indexed or len(plan.files) > 1:
                name = f"{plan.form.stem}.safetensors.index.json"
                (temporary / name).write_text(hf_shards.index(plan.files), encoding="utf-8")
            plan.form.finish(temporary)
    except FileExistsError as error:
        raise RunError(f"{out} has come into being meanwhile; it is as it was. Choose another out=DIR") from error
    except OSError as error:
        raise RunError(
            f"{out} cannot be written: {error.strerror or error}"
            + (f" ({error.filename})" if error.filename else "")
            + "; nothing is left of it. Make room, or choose another out=DIR"
        ) from error
    size = sum(file.size for file in plan.files)
    return Exported(out, plan.form.told, checkpoint.step, len(plan.files), len(plan.form.outputs), size)


def adapter_of(folder: Path) -> Lora | None:
    """The adapters that a run trains, if it does."""
    values = safe_yaml.read(folder / "config.yaml").get("adapter")
    return None if values is None else Lora.model_validate(values)


def newest(folder: Path, step: int | None = None) -> Path:
    """The newest checkpoint of a run, or that of a step; not yet verified.

    Raises:
        RunError: if there is no run, or no such checkpoint.
    """
    if not (folder / "config.yaml").is_file():
        raise RunError(f"{folder} is not a run: it has no config.yaml{of_pickles(folder)}")
    found = {int(path.name.rpartition("-")[2]): path for path in commit.find(folder / "checkpoints")}
    if not found:
        raise RunError(f"{folder} has no checkpoint yet")
    if step is None:
        return found[max(found)]
    if step not in found:
        raise RunError(f"{folder} has no checkpoint of step {step}; there are those of steps {ranges(sorted(found))}")
    return found[step]


def _name(step: int, words: Export) -> str:
    marks = (words.to, "ema" * words.ema, words.dtype if words.dtype != "kept" else "", "merged" * words.merge)
    return f"step-{step:08d}-" + "-".join(mark for mark in marks if mark)


def _plan_of(checkpoint: Checkpoint, folder: Path, words: Export) -> _Plan:
    """The plan of a commit, from its manifest alone."""
    arrays = _chosen(checkpoint.arrays, words.ema, folder)
    arrays = {name: Entry(e.name, _target(e.dtype, words), e.shape) for name, e in arrays.items()}
    adapter = adapter_of(folder)
    if words.to == "safetensors":
        form = export_formats.plain(arrays)
    elif adapter is not None:
        base = (safe_yaml.read(folder / "config.yaml").get("model") or {}).get("path")
        form = export_formats.peft(arrays, folder / "assets", adapter, base)
    else:
        form = export_formats.transformers(arrays, folder / "assets")
    return _Plan(form, _files(form, words), _Saved(checkpoint.reader()))


def _plan_of_model(model: nn.Module, folder: Path, words: Export) -> _Plan:
    """The plan of a model that is in memory."""
    from unisono.engines.torch import sharded_tensors

    held = {name.removeprefix(_MODEL): value.detach() for name, value in sharded_tensors.model_tensors(model).items()}
    arrays = {n: Entry(n, _target(value.dtype, words), tuple(value.shape)) for n, value in held.items()}
    form = (
        export_formats.plain(arrays)
        if words.to == "safetensors"
        else export_formats.transformers(arrays, folder / "assets")
    )
    return _Plan(form, _files(form, words), _Held(held))


class _Saved:
    """Arrays of a checkpoint, as tensors."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._reader.shapes

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        from unisono.engines.torch import saved_tensors

        return saved_tensors.read(self._reader, name, offset, shape)


class _Held:
    """Arrays in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return self._tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]


def _chosen(arrays: Mapping[str, Any], ema: bool, folder: Path) -> dict[str, Entry]:
    """The model's arrays by their names in the model: parameters, or their average, and buffers."""

    def entry(name: str) -> Entry:
        dtype = getattr(torch, arrays[name]["dtype"])
        if dtype not in hf_shards.CODES:
            raise RunError(f"'{name}' is of dtype {dtype}, which safetensors files do not have")
        return Entry(name, dtype, tuple(arrays[name]["shape"]))

    averaged = {name.removeprefix(_EMA) for name in arrays if name.startswith(_EMA)}
    if ema and not averaged:
        raise RunError(f"{folder} keeps no moving average of its weights; it was trained without ema.decay")
    found = {}
    for name in arrays:
        own = name.removeprefix(_MODEL)
        if name.startswith(_MODEL):
            found[own] = entry(_EMA + own if ema and own in averaged else name)
    if not found:
        raise CheckpointError(f"{folder}: the checkpoint holds no weights of a model")
    return found


def _target(dtype: torch.dtype, words: Export) -> torch.dtype:
    return _DTYPES.get(words.dtype, dtype) if dtype.is_floating_point else dtype


def _files(form: Form, words: Export) -> list[File]:
    return hf_shards.planned([output.entry for output in form.outputs], words.shard_mb * 1e6, form.stem)


def _processes(words: Export, files: Sequence[File]) -> int:
    if words.processes != "auto":
        return min(len(files), words.processes)
    return min(len(files), cores(), 1 + sum(file.size for file in files) // _WORTH)


def _shares(files: Sequence[File], count: int) -> list[list[str]]:
    """The files of each process, the largest dealt out first, each to the one that has the least to write."""
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(count)]
    for file in sorted(files, key=lambda file: -file.size):
        least = min(range(count), key=lambda number: shares[number][0])
        shares[least] = (shares[least][0] + file.size, [*shares[least][1], file.name])
    return [names for _, names in shares]


def _check_room(out: Path, size: int) -> None:
    there = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(there).free
    if free < size:
        raise RunError(
            f"{out} would take {size / 1e6:.1f} MB, and {there} has {free / 1e6:.1f} MB left; make room, choose "
            "another out=DIR, or a smaller dtype=bf16"
        )


def _write(plan: _Plan, folder: Path, names: set[str]) -> None:
    """Write these files of a plan."""
    outputs = {output.entry.name: output for output in plan.form.outputs}
    content = _Content(plan.reader, outputs)
    for file in plan.files:
        if file.name in names:
            with (folder / file.name).open("wb") as opened:
                hf_shards.write(opened, file.entries, content)


class _Content:
    """The blocks of the tensors that are written; what is made of an array is kept until another array is asked for."""

    def __init__(self, reader: Arrays, outputs: Mapping[str, Output]) -> None:
        self._reader, self._outputs = reader, outputs
        self._made: tuple[str, Mapping[str, Tensor]] = ("", {})

    def __call__(self, entry: Entry) -> Iterator[Tensor]:
        output = self._outputs[entry.name]
        if output.made is not None:
            yield self._converted(output)
            return
        for offset, shape in hf_shards.blocks(entry.shape, max(4, entry.dtype.itemsize)):  # it is saved in fp32, mostly
            yield _cast(self._reader.read(output.source, offset, shape), entry)

    def _converted(self, output: Output) -> Tensor:
        assert output.made is not None
        if self._made[0] != output.source:
            self._made = ("", {})
            shape = self._reader.shapes[output.source]
            whole = _cast(self._reader.read(output.source, (0,) * len(shape), shape), output.entry)
            self._made = (output.source, output.made(whole))
        return self._made[1][output.entry.name]


def _cast(block: Tensor, entry: Entry) -> Tensor:
    """A block in another dtype, if it can be had in it."""
    made = block.to(entry.dtype)
    if made.dtype == block.dtype or bool(made.isfinite().all()):
        return made
    if not torch.equal(made.isfinite(), block.isfinite()):
        raise CheckpointError(
            f"'{entry.name}' has values up to {float(block[block.isfinite()].abs().max()):.3g}, which "
            f"{str(entry.dtype).removeprefix('torch.')} cannot hold; choose another dtype"
        )
    return made


# several processes --------------------------------------------------------------------------------------------------


def _write_together(plan: _Plan, job: list[str], shares: Sequence[list[str]]) -> None:
    """Write the files of a plan, each process its own; the first that fails ends the others.

    Where every tensor is an array as it is, a process is told its part of the plan, and imports nothing to make one.
    """
    sources = {output.entry.name: output.source for output in plan.form.outputs if output.made is None}
    alike = len(sources) == len(plan.form.outputs)
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, Any] = {}
    try:
        for names in shares:
            mine, theirs = context.Pipe(duplex=False)
            own = [file for file in plan.files if file.name in names]
            told = [
                [f.name, [[e.name, CODES[e.dtype], e.shape, sources[e.name]] for e in f.entries]] for f in own if alike
            ]
            process = context.Process(target=_share, args=(json.dumps([*job, names, told]), theirs), daemon=True)
            process.start()
            theirs.close()
            running[mine] = process
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                _hear(ready, running[ready])
                running.pop(ready).join()
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()


def _hear(connection: Connection, process: Any) -> None:
    """What a process has to say when it ends; raises what went wrong in it."""
    try:
        fault = json.loads(connection.recv_bytes())
    except EOFError:
        process.join()
        code = process.exitcode
        why = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RunError(
            f"a process that wrote a part of the export {why}; nothing is left of the export. If it was short of "
            "memory, processes=1 needs the least"
        ) from None
    if fault is None:
        return
    kind, number, text, file = fault
    if kind == "os":
        raise OSError(number, text, file)
    if kind == "user":
        raise CheckpointError(text)
    raise RuntimeError(f"a process that wrote a part of the export failed:\n{text}")


def _share(job: str, connection: Connection) -> None:
    """One process's part: it plans as the others do, and writes the files that are its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    path, folder, words, temporary, names, told = json.loads(job)
    torch.set_num_threads(1)
    fault: list[Any] | None = None
    try:
        plan = (
            _plan_told(Path(path), told)
            if told
            else _plan_of(commit.read(Path(path)), Path(folder), Export.model_validate_json(words))
        )
        _write(plan, Path(temporary), set(names))
    except OSError as error:
        fault = ["os", error.errno, error.strerror, error.filename]
    except CheckpointError as error:
        fault = ["user", 0, str(error), None]
    except Exception:
        fault = ["bug", 0, traceback.format_exc(), None]
    connection.send_bytes(json.dumps(fault).encode())


def _plan_told(path: Path, told: list[Any]) -> _Plan:
    """The part of a plan that is a process's own."""
    files, outputs = [], []
    for name, entries in told:
        made = [Output(Entry(n, DTYPES[code], tuple(shape)), source) for n, code, shape, source in entries]
        files.append(File(name, tuple(output.entry for output in made)))
        outputs += made
    form = Form("", tuple(outputs), "", False, lambda folder: None)
    return _Plan(form, files, _Saved(commit.read(path).reader()))


def _end_with_parent() -> None:
    """A process whose parent is gone has nobody to write for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
