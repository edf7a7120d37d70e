"""`unisono plan`: a recipe on hardware, from the words of a command to estimates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import Field

from unisono.config.batch_split import resolve_split
from unisono.config.schema import Positive, Settings
from unisono.config.schema.layout import Layout
from unisono.config.schema.run import RunConfig
from unisono.data.loading.micro_batch import MicroBatch
from unisono.launch.model.check import first_micro_batch
from unisono.launch.resolving.layout import resolve_layout
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import ConfigError
from unisono.task import Task, run_setup
from unisono.task_config import build_task
from unisono_plan.estimate import Conditions, Estimate, estimate_traced
from unisono_plan.hardware import Hardware, parse_hardware
from unisono_plan.recording import Trace, extend
from unisono_plan.search import search

# Numbers in the largest array of a micro-batch that is traced in torch, or rows if these are more. Further rows are
# alike, and a loss that goes through its tokens in chunks takes the longer to trace the more there are.
_MOST_NUMBERS, _MOST_ROWS = 1 << 17, 64
_TRIED = 3  # of the best layouts, if what is traced of one does not fit after all


class PlanSettings(Settings):
    """Of `unisono plan`."""

    hardware: str = Field(description="kind and number of devices: h100x64, or h100x64/4 with 4 devices in a node")
    search: bool = Field(True, description="look for the best layout, too")
    memory_gb: Positive | None = Field(None, description="memory of a device in GB; null: the product's")
    inter_gbps: Positive | None = Field(None, description="Gb/s between nodes per device; null: the usual network's")


@dataclass(frozen=True)
class Plan:
    """What is foretold of a recipe.

    Attributes:
        config: With its layout resolved.
        hardware: On which it runs.
        parameters: That are trained.
        configured: The estimate of the configured layout.
        best: That of the best one, traced; None if none fits or it was not looked for.
        considered: Layouts that were looked at.
        loading: Seconds that a row takes the workers of a process to build, on this host.
        shapes: Of a micro-batch's arrays.
    """

    config: RunConfig
    hardware: Hardware
    parameters: int
    configured: Estimate
    best: Estimate | None
    considered: int
    loading: float
    shapes: dict[str, tuple[int, ...]]


def make_plan(config: RunConfig, settings: PlanSettings) -> Plan:
    """Foretell a run.

    Raises:
        ConfigError: For a task that cannot be traced, a layout that the hardware cannot have, or a batch that cannot be
            divided.
    """
    hardware = parse_hardware(settings.hardware, settings.memory_gb, settings.inter_gbps)
    config = _resolve(config, hardware)
    split = resolve_split(config)
    if config.layout.engine == "jax":
        from unisono_plan.jax_trace import start_virtual_devices

        start_virtual_devices(hardware.count)  # before a task of the user's starts JAX
    task = build_task(config)
    rows = _Rows(task, config)
    run_setup(task)
    in_jax = config.layout.engine == "jax"
    most = sys.maxsize if in_jax else _most_rows(rows.micro_batch(min(split.micro_batch, _MOST_ROWS)))
    micro = rows.micro_batch(min(split.micro_batch, most))
    trace_step = _choose_tracer(task, config)
    traced = dict[tuple[str, int], Trace]()  # the search asks for one step several times

    def trace(changes: dict[str, Any], size: int, passes: int = 1) -> Trace:
        if size > most:
            return extend(trace(changes, most // 2, passes), trace(changes, most, passes), size)
        layout = config.layout.model_copy(update={**changes, "micro_batch": size})
        key = layout.model_dump_json(), passes
        if key not in traced:
            own = config.model_copy(update={"layout": layout})
            traced[key] = trace_step(own, rows.micro_batch(size), passes)
        return traced[key]

    seen = trace({}, split.micro_batch, split.passes)
    work = {name: value / micro.size for name, value in micro.work.items()}
    conditions = Conditions(hardware, config.train.precision, rows.seconds, work, in_jax)
    configured = estimate_traced(seen, config.layout, split.passes, conditions)
    best, found = None, list[Estimate]()
    if settings.search:
        found = search(
            trace, config.layout, split.passes * split.micro_batch, split.micro_batch, conditions, seen.parameters
        )
        best = _trace_best(trace, found, configured, conditions)
    shapes = {
        name: tuple(value.shape if value.shape[:1] != (micro.size,) else (split.micro_batch, *value.shape[1:]))
        for name, value in micro.arrays.items()
        if hasattr(value, "shape")
    }
    return Plan(config, hardware, seen.parameters, configured, best, len(found), rows.seconds, shapes)


def _most_rows(micro: MicroBatch) -> int:
    """Rows of the largest micro-batch that is traced, from one of this kind."""
    largest = max((value.size for value in micro.arrays.values() if hasattr(value, "__array_interface__")), default=1)
    return max(_MOST_ROWS, _MOST_NUMBERS * micro.size // max(1, largest))


def _choose_tracer(task: Task, config: RunConfig) -> Callable[[RunConfig, MicroBatch, int], Trace]:
    if config.layout.engine == "jax":
        from unisono_plan import jax_trace

        return jax_trace.JaxTracer(task)
    from unisono_plan import torch_trace

    return partial(torch_trace.trace_torch_step, task)


def _trace_best(trace: Any, found: list[Estimate], configured: Estimate, conditions: Conditions) -> Estimate | None:
    """The best layout that fits when it is traced itself; the configured one if none is faster."""
    traced = [configured] if configured.fits else []
    for one in [one for one in found if one.fits][:_TRIED]:
        if same_layout(one.layout, configured.layout, configured.rows):
            continue
        seen = trace(one.layout.model_dump(), one.rows, one.passes)
        traced.append(estimate_traced(seen, one.layout, one.passes, conditions))
        if traced[-1].fits:
            break
    fitting = [one for one in traced if one.fits]
    return min(fitting, key=lambda one: one.time.total if one.time else one.memory) if fitting else None


def same_layout(one: Layout, other: Layout, rows: int) -> bool:
    """Whether two layouts are the same; the other's micro-batch may be undecided, and is `rows` then."""
    return one == other.model_copy(update={"micro_batch": rows})


def _resolve(config: RunConfig, hardware: Hardware) -> RunConfig:
    """The configuration with the layout of one process per device.

    Raises:
        ConfigError: If it asks for another number of processes, or for a layout of a single host.
    """
    layout, count = config.layout, hardware.count
    if layout.world_size not in ("auto", count):
        raise ConfigError(
            f"layout.world_size={layout.world_size}, but hardware names {count} device{'s' * (count != 1)}; leave it "
            "out: a run has one process per device"
        )
    if layout.offload:
        raise ConfigError(
            "layout.offload is not planned: how fast a host moves and updates shards is not known; leave it out"
        )
    if config.adapter is not None and config.adapter.base_dtype == "nf4":
        raise ConfigError(
            "adapter.base_dtype=nf4 is not planned: bitsandbytes makes 4 bits of weights that are there; leave it out"
        )
    if layout.strategy == "dp":
        raise ConfigError("layout.strategy=dp is for one process with several devices, and is not planned; use ddp")
    update: dict[str, Any] = {"device": "cpu", "max_memory_gb": None, "world_size": count}
    if layout.micro_batch == "auto":
        update["micro_batch"] = None
    if layout.strategy == "auto":
        update["strategy"] = "single" if count == 1 else "ddp"
    config = config.model_copy(
        update={"layout": layout.model_copy(update=update), "launch": type(config.launch)(), "callbacks": []}
    )
    return resolve_layout(config, ProcessInfo(0, count, 0, hardware.node, "unisono") if count > 1 else None)


class _Rows:
    """Micro-batches of any number of rows, built from the run's data.

    Attributes:
        seconds: That a row takes the workers of a process to build, here; 0 before any was built.
    """

    def __init__(self, task: Task, config: RunConfig) -> None:
        self._task, self._config = task, config
        self._built: dict[int, MicroBatch] = {}
        self.seconds = 0.0

    def micro_batch(self, size: int) -> MicroBatch:
        """A micro-batch of some rows."""
        if size not in self._built:
            layout = self._config.layout.model_copy(
                update={"world_size": 1, "strategy": "single", "shards": None, "micro_batch": size}
            )
            train = self._config.train.model_copy(update={"global_batch": size})
            alone = self._config.model_copy(update={"layout": layout, "train": train})
            self._built[size] = micro = first_micro_batch(self._task, alone)
            if micro.info is not None:
                workers = self._config.data.workers
                self.seconds = sum(micro.info.seconds) / size / (max(1, workers) if isinstance(workers, int) else 1)
        return self._built[size]
