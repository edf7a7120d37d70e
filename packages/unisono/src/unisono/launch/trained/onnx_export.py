"""Exports a run's model as ONNX, by torch's exporter, and runs it on real rows before anything is written.

What the graph computes is the task's `infer` (the protocol `Exportable`), by default its `outputs`. Every axis that the
model allows is dynamic. onnxruntime computes rows of the run's data in micro-batches of several sizes; an export that
differs from torch there is refused.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unisono.checkpoint.core import commit
from unisono.checkpoint.exchange.export import choose_folder, find_checkpoint
from unisono.checkpoint.remote.description import ASSETS
from unisono.config.schema.verbs import Export
from unisono.data.order.mixture import Joined
from unisono.data.views import Subset
from unisono.engines.nested import leaves
from unisono.engines.torch.transfer import Transfer
from unisono.launch.trained import predict
from unisono.launch.trained.run import Run
from unisono.optim import schedules
from unisono.protocols import Exportable, resolve_features
from unisono.runtime.code.native_errors import wrap_native_errors
from unisono.runtime.errors import ConfigError, DataError, RunError, UnisonoError
from unisono.runtime.files import atomic_folder
from unisono.runtime.text import one_line
from unisono.runtime.untrusted import safe_writing
from unisono.task import Batch, Context, Source, run_setup

Compute = Callable[[dict[str, Tensor]], dict[str, Tensor]]
MODEL_FILE = "model.onnx"
_SIZES = 5, 3, 1  # rows of the micro-batches that are compared; the graph is traced with the first
# Of the largest number of an output: fp32 kernels of two libraries add in other orders.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class OnnxExport:
    """The result of an export.

    Attributes:
        folder: The new folder.
        step: Number of updates of the weights.
        size: Of the model in bytes.
        inputs: Names and axes; those in words are dynamic.
        outputs: The same.
        rows: Real rows that were compared.
        difference: The largest difference from torch, as a part of the largest number of an output.
    """

    folder: Path
    step: int
    size: int
    inputs: Mapping[str, list[Any]]
    outputs: Mapping[str, list[Any]]
    rows: int
    difference: float

    def lines(self) -> Iterator[str]:
        """Format the result for the console."""
        yield f"{self.folder}: ONNX, step {self.step}, {self.size / 1e6:.1f} MB"
        for what, each in (("input", self.inputs), ("output", self.outputs)):
            for name, axes in each.items():
                yield f"  {what} {name}: ({', '.join(map(str, axes))})"
        yield f"  equal to torch on {self.rows} real rows, up to {self.difference:.1e} of an output's largest number"


def export_onnx(run: Run, words: Export) -> OnnxExport:
    """Write a run's model as ONNX.

    Raises:
        ConfigError: If a package is missing, or a setting or the task has no meaning here.
        RunError: If the model cannot be exported, or computes other numbers in onnxruntime.
    """
    _refuse(run)
    checkpoint = commit.open_checkpoint(find_checkpoint(run.folder, words.step))
    out = choose_folder(run.folder, checkpoint.step, words)
    scalars = schedules.ScheduledScalars(run.config, int(checkpoint.state["total"]))(checkpoint.step)
    batches, rows = _real_batches(run)
    run.task.kernels("cpu", "fp32")
    model = run.load_model(ema=words.ema, step=checkpoint.step, precision="fp32")
    context = Context(checkpoint.step, training=False, scalars=scalars)

    def compute(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(run.task, Exportable):
            return dict(run.task.infer(model, inputs))
        return {name or "output": value for name, value in leaves(run.task.outputs(model, inputs, context))}

    with torch.no_grad(), _quietly():
        program = _trace(model, compute, batches[0])
    with atomic_folder(out) as temporary:
        program.save(temporary / MODEL_FILE)
        session = _open_session(temporary / MODEL_FILE)
        difference = _largest_difference(session, compute, batches)
        if (run.folder / ASSETS).is_dir():  # what a reader needs besides: a tokenizer, or the names of taxa
            safe_writing.copy_folder(run.folder / ASSETS, temporary / ASSETS)
        size = sum(path.stat().st_size for path in temporary.glob(f"{MODEL_FILE}*"))
    inputs, outputs = (
        {one.name: list(one.shape) for one in given} for given in (session.get_inputs(), session.get_outputs())
    )
    return OnnxExport(out, checkpoint.step, size, inputs, outputs, rows, difference)


def _refuse(run: Run) -> None:
    if missing := [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]:
        raise ConfigError(f"to=onnx needs {' and '.join(missing)}: pip install 'unisono[onnx]'")
    if run.task.engine != "torch":
        raise ConfigError("to=onnx is for models in torch; of JAX, to=safetensors writes the arrays")
    if resolve_features(run.task).recurrent is not None and not isinstance(run.task, Exportable):
        raise ConfigError(
            f"to=onnx: {type(run.task).__name__} keeps a state of its rows from step to step, and an ONNX model has "
            "none; define infer() and inference_inputs() (docs/export.md), which may take the state as an input"
        )


class _Graph(nn.Module):
    """What is exported: from inputs to outputs, both in the order of their names."""

    def __init__(self, model: nn.Module, compute: Compute, inputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self.inputs, self._compute = model, list(inputs), compute

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The outputs."""
        return tuple(self._compute(dict(zip(self.inputs, values, strict=True))).values())


def _real_batches(run: Run) -> tuple[list[dict[str, Tensor]], int]:
    """A few micro-batches of the run's data, as its evaluation builds them, and their rows; the last is one row."""
    run_setup(run.task)
    held_out = run.task.held_out()
    if held_out is None or not len(held_out):
        rows: Source = Joined(predict.select_sources(run.task, "training"))
    else:
        rows = Joined({"held_out": held_out})
    if len(rows) < 2:
        raise DataError("to=onnx compares real rows, and this run's data have fewer than 2")
    transfer, found, first = Transfer(torch.device("cpu"), "fp32"), list[dict[str, Tensor]](), 0
    for size in (min(size, len(rows)) for size in _SIZES):
        chosen = Subset(rows, np.arange(first, first + size) % len(rows))
        (micro,) = islice(predict.read_batches(run, chosen, size), 1)
        batch: Batch = micro.arrays
        if isinstance(run.task, Exportable):
            batch = dict(run.task.inference_inputs(batch))
        tensors = {name: value for name, value in transfer.to_device(batch).items() if isinstance(value, Tensor)}
        found.append(tensors)
        first += size
    return found, min(first, len(rows))


def _trace(model: nn.Module, compute: Compute, batch: dict[str, Tensor]) -> Any:
    graph = _Graph(model, compute, list(batch)).eval()
    try:
        exported = _export(graph, batch)
        read = _names_read(exported, batch)
        if len(read) < len(batch):  # such as targets
            graph = _Graph(model, compute, read).eval()
            exported = _export(graph, batch)
        program = torch.onnx.export(exported, verbose=False)
        _name(program.model.graph, read, list(compute(batch)))
        return program
    except UnisonoError:
        raise
    except Exception as error:  # of any kind, from inside of the exporter
        cause: BaseException = error
        while cause.__cause__ is not None:  # which is what the last one says, below advice to the exporter's authors
            cause = cause.__cause__
        raise RunError(
            f"torch cannot export {type(model).__name__} as ONNX: {one_line(cause, 400)}. A task can give a "
            "forward pass that exports by infer() and inference_inputs() (docs/export.md)"
        ) from error


def _export(graph: _Graph, batch: dict[str, Tensor]) -> torch.export.ExportedProgram:
    given = tuple(batch[name] for name in graph.inputs)
    dynamic = tuple(dict.fromkeys(range(value.ndim), torch.export.Dim.AUTO) for value in given)
    return torch.export.export(graph, given, dynamic_shapes=(dynamic,))


def _names_read(exported: torch.export.ExportedProgram, batch: Mapping[str, Tensor]) -> list[str]:
    given = set(exported.graph_signature.user_inputs)
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder" and node.name in given]
    return [name for name, node in zip(batch, nodes, strict=True) if node.users]


def _name(graph: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name what goes in and out; a value inside of the graph that has such a name gets another."""
    if both := sorted({*inputs} & {*outputs}):
        raise RunError(
            f"to=onnx: '{both[0]}' is the name of an input and of an output, which a graph cannot have; give it two "
            "names, in infer() and inference_inputs() (docs/export.md)"
        )
    for node in graph:
        for value in node.outputs:
            if value.name in {*inputs, *outputs}:
                value.name = f"{value.name}_inside"
    for values, names in ((graph.inputs, inputs), (graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name


def _open_session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    with wrap_native_errors("onnxruntime cannot open the exported model, so it was not written", RunError):
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _largest_difference(session: Any, compute: Compute, batches: list[dict[str, Tensor]]) -> float:
    """Of all outputs, as a part of the largest number of each; refuses more than the tolerance."""
    inputs, outputs = ([one.name for one in given] for given in (session.get_inputs(), session.get_outputs()))
    largest = 0.0
    for batch in batches:
        with torch.no_grad():
            expected = compute(batch)
        what = f"onnxruntime cannot compute real rows ({_describe(batch)}) with the exported model"
        with wrap_native_errors(f"{what}, so it was not written", RunError):
            found = session.run(None, {name: batch[name].numpy() for name in inputs})
        for name, value in zip(outputs, found, strict=True):
            wanted = expected[name].numpy()
            part = _difference(value, wanted)
            if not part <= _TOLERANCE:
                raise RunError(
                    f"the exported model computes other numbers than torch, so it was not written: '{name}' of real "
                    f"rows ({_describe(batch)}) differs by {part:.1e} of its largest number (at most {_TOLERANCE:g} is "
                    "rounding)"
                )
            largest = max(largest, part)
    return largest


def _difference(found: Any, wanted: Any) -> float:
    """Of two arrays, as a part of the largest number; infinite for other shapes, and where only one is no number."""
    if found.shape != wanted.shape or not np.array_equal(np.isfinite(found), np.isfinite(wanted)):
        return float("inf")
    finite = np.isfinite(wanted)
    largest = max(1e-6, np.abs(wanted[finite]).max(initial=0.0))
    return float(np.abs(found[finite].astype(np.float64) - wanted[finite]).max(initial=0.0) / largest)


def _describe(batch: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in batch.items())


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter says of packages that nobody uses, and of its own code."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
