"""Unisono trains a model on one process or many, with exactly the same results.

This module is the public API: everything that a task, a recipe or a script needs. Names are resolved on first use, so
that `unisono --help` imports neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unisono.version import __version__

if TYPE_CHECKING:
    from unisono.callback import Callback, Evaluate, RunInfo, Save, Stop
    from unisono.collation import SampleColumns
    from unisono.config.code.recipes import Recipe
    from unisono.config.schema import Settings
    from unisono.config.schema.data import Data
    from unisono.config.schema.run import RunConfig
    from unisono.data import prepare, sources
    from unisono.data.compute_once import compute_array_once, compute_once
    from unisono.data.holding_out import hold_out
    from unisono.data.order.mixture import Joined
    from unisono.data.order.order import Order
    from unisono.data.scaling import Scaling
    from unisono.data.sources import open_source
    from unisono.data.table_files import read_table, write_table
    from unisono.data.views import Mapped, Subset
    from unisono.engines import choose_kernel
    from unisono.engines.torch.losses.linear_cross_entropy import linear_cross_entropy, logits_cross_entropy
    from unisono.engines.torch.losses.pairwise_distances import pairwise_distances
    from unisono.engines.torch.state.train_state import count_parameters
    from unisono.evaluation.moments import moments, summarise_moments
    from unisono.launch.result import RunResult
    from unisono.launch.train import resume, train
    from unisono.launch.trained.run import Run, load_model, load_weights, open_run, read_asset
    from unisono.proof.prove import prove_task as prove
    from unisono.proof.scripts.function_proof import compare
    from unisono.proof.scripts.recording.script_recorder import World
    from unisono.protocols import (
        Benchmark,
        Benchmarked,
        CrossSample,
        Environments,
        Exportable,
        Illustrated,
        Packable,
        Predictive,
        Prepared,
        Recurrent,
        Totals,
        Vectorised,
        WeightsBenchmark,
    )
    from unisono.runtime.errors import (
        BadSamplesError,
        ConfigError,
        DataError,
        KernelError,
        RunError,
        UnisonoError,
    )
    from unisono.runtime.files import file_hash
    from unisono.runtime.rng import Generators, generator, generators, key
    from unisono.task import (
        Batch,
        Context,
        GlobalBatch,
        Loss,
        SampleContext,
        SampleContexts,
        Source,
        Task,
    )
    from unisono.training.callbacks.early_stopping import EarlyStopping

_HOMES = {
    "callback": ["Callback", "Evaluate", "RunInfo", "Save", "Stop"],
    "collation": ["SampleColumns"],
    "config.code.recipes": ["Recipe"],
    "config.schema": ["Settings"],
    "config.schema.data": ["Data"],
    "config.schema.run": ["RunConfig"],
    "data.compute_once": ["compute_array_once", "compute_once"],
    "data.holding_out": ["hold_out"],
    "data.order.mixture": ["Joined"],
    "data.order.order": ["Order"],
    "data.scaling": ["Scaling"],
    "data.sources": ["open_source"],
    "data.table_files": ["read_table", "write_table"],
    "data.views": ["Mapped", "Subset"],
    "engines": ["choose_kernel"],
    "engines.torch.losses.linear_cross_entropy": ["linear_cross_entropy", "logits_cross_entropy"],
    "engines.torch.losses.pairwise_distances": ["pairwise_distances"],
    "engines.torch.state.train_state": ["count_parameters"],
    "evaluation.moments": ["moments", "summarise_moments"],
    "launch.trained.run": ["Run", "load_model", "load_weights", "open_run", "read_asset"],
    "launch.result": ["RunResult"],
    "launch.train": ["resume", "train"],
    "proof.scripts.function_proof": ["compare"],
    "proof.scripts.recording.script_recorder": ["World"],
    "protocols": [
        "Benchmark",
        "Benchmarked",
        "CrossSample",
        "Environments",
        "Exportable",
        "Illustrated",
        "Packable",
        "Predictive",
        "Prepared",
        "Recurrent",
        "Totals",
        "Vectorised",
        "WeightsBenchmark",
    ],
    "runtime.errors": [
        "BadSamplesError",
        "ConfigError",
        "DataError",
        "KernelError",
        "RunError",
        "UnisonoError",
    ],
    "runtime.files": ["file_hash"],
    "runtime.rng": ["Generators", "generator", "generators", "key"],
    "task": [
        "Batch",
        "Context",
        "GlobalBatch",
        "Loss",
        "SampleContext",
        "SampleContexts",
        "Source",
        "Task",
    ],
    "training.callbacks.early_stopping": ["EarlyStopping"],
}
_HOME = {name: module for module, names in _HOMES.items() for name in names} | {
    # a colon precedes the name in the module, or ends the name of a module that is exported itself
    "prepare": "data.prepare:",
    "prove": "proof.prove:prove_task",
    "sources": "data.sources:",
}

__all__ = [
    "BadSamplesError", "Batch", "Benchmark", "Benchmarked", "Callback", "ConfigError", "Context", "CrossSample", "Data",
    "DataError", "EarlyStopping", "Environments", "Evaluate", "Exportable", "Generators", "GlobalBatch", "Illustrated",
    "Joined", "KernelError", "Loss", "Mapped", "Order", "Packable", "Predictive", "Prepared", "Recipe", "Recurrent",
    "Run", "RunConfig", "RunError", "RunInfo", "RunResult", "SampleColumns", "SampleContext", "SampleContexts", "Save",
    "Scaling", "Settings", "Source", "Stop", "Subset", "Task", "Totals", "UnisonoError", "Vectorised",
    "WeightsBenchmark", "World", "__version__", "choose_kernel", "compare", "compute_array_once", "compute_once",
    "count_parameters", "file_hash", "generator", "generators", "hold_out", "key", "linear_cross_entropy", "load_model",
    "load_weights", "logits_cross_entropy", "moments", "open_run", "open_source", "pairwise_distances", "prepare",
    "prove", "read_asset", "read_table", "resume", "sources", "summarise_moments", "train", "write_table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unisono' has no attribute {name!r}")
    place, colon, inner = _HOME[name].partition(":")
    module = import_module(f"unisono.{place}")
    return module if colon and not inner else getattr(module, inner or name)


def __dir__() -> list[str]:
    return list(__all__)
