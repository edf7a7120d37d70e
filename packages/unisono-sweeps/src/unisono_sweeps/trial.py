"""Tries models before a sweep starts: each is built, and one micro-batch goes through a few steps of it.

A process of its own does this, so that what a model leaves on a device is gone when the runs start:

    python -m unisono_sweeps.trial RECIPE RESULTS

It imports the recipe's libraries at once, while the sweep is still being checked, and then reads requests, one JSON
object a line, until its input ends. RESULTS is a file of JSON lines. A shape that does not fit, a kernel that is
missing or a sample that cannot be built is found here, and so are the parameters and the time of a step.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from unisono.config.batch_split import BatchSplit, resolve_split
from unisono.config.schema.run import RunConfig
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan, build_source
from unisono.engines import create_engine
from unisono.engines.protocol import EngineJob
from unisono.launch.processes import preloading, rank_process
from unisono.launch.resolving import layout
from unisono.optim import schedules
from unisono.runtime.code.user_code import format_user_error
from unisono.runtime.communication.communicator import ProcessInfo
from unisono.runtime.errors import UnisonoError
from unisono.task_config import build_task, load_config

_STEPS = 3  # of which the fastest counts; the engine has warmed up before
_ENOUGH = 1.0  # seconds, after which what was measured says enough
_LARGEST = 4  # rows of a micro-batch that is not given


def try_run(config: RunConfig) -> dict[str, float]:
    """A few steps of a run's model on one process, of one micro-batch.

    Returns:
        `parameters`; `seconds` of a step and its `flops` (where the task counts them), for a global batch.

    Raises:
        UnisonoError: for what the user can fix.
    """
    given = config.layout.micro_batch
    device = "cpu" if config.layout.device == "cpu" else "auto"  # what the run asks for may be on other hosts alone
    config = layout.on_one_process(config, device=device, micro_batch=None)
    size = given if isinstance(given, int) else min(_LARGEST, config.train.global_batch)
    process, task = ProcessInfo(), build_task(config)
    source = build_source(task, config, 1)
    plan = build_plan(task, source, config, 1)
    scalars = schedules.ScheduledScalars(config, plan.steps)
    communicator = rank_process.join_processes(config, process)
    whole = resolve_split(config).global_batch
    size = min(size, whole)
    split = BatchSplit(size, 1, size)
    loader = Loader.from_config(task, source, plan, split, process, config)
    engine = create_engine(EngineJob(task, config, process, communicator, split))
    try:
        batches = next(islice(loader.steps(), 1))
        facts = engine.setup(batches, scalars(0))
        seconds, start = math.inf, perf_counter()
        for _ in range(_STEPS):
            began = perf_counter()
            result = engine.step(batches, 0, scalars(0))
            seconds = min(seconds, perf_counter() - began)
            if perf_counter() - start > _ENOUGH:
                break
    finally:
        loader.close()
        engine.close()
    found = {"parameters": float(facts.parameters), "seconds": seconds * whole / size}
    if flops := result.flops(adapters=config.adapter is not None):
        found["flops"] = flops * whole / size
    return found


def main(recipe: str, results: Path) -> None:
    """Try the runs that the standard input asks for, one JSON object a line, and write what came of each."""
    for name in preloading.find_libraries(recipe):
        with suppress(Exception):  # the trial that needs it reports it
            import_module(name)
    with results.open("a", encoding="utf-8") as file:
        for line in sys.stdin:
            request = json.loads(line)
            outcome: dict[str, Any]
            try:
                folder = Path(request["config_dir"]) if request["config_dir"] else None
                outcome = try_run(load_config(request["recipe"], request["words"], folder)[0])
            except UnisonoError as error:
                outcome = {"error": str(error)}
            except Exception as error:  # of the user's code
                outcome = {"error": format_user_error(error) or f"{type(error).__name__}: {error}"}
            file.write(json.dumps({**outcome, "number": request["number"]}) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
