"""One process of a search for the largest micro-batch: runs steps of several sizes and reports their memory use.

All ranks decide together, comparing the largest peak of any rank with the smallest limit. A process that runs out of
memory ends, and the others with it; the run itself has not started yet.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from unisono.config import CONFIG_FILE
from unisono.config.batch_split import BatchSplit
from unisono.config.schema.run import RunConfig
from unisono.data.loading import checksum
from unisono.data.loading.loader import Loader
from unisono.data.order.planning import build_plan, build_source
from unisono.engines import create_engine
from unisono.engines.protocol import EngineJob
from unisono.launch import cluster
from unisono.launch.autobatch import memory, memory_fit
from unisono.launch.autobatch.search import CURRENT_SIZE_FILE, REQUEST_FILE, RESULT_FILE
from unisono.launch.processes import rank_process
from unisono.optim import schedules
from unisono.protocols import resolve_features
from unisono.runtime.communication.communicator import Communicator, ProcessInfo
from unisono.runtime.files import write_whole
from unisono.task import Task
from unisono.task_config import build_task, read_config

_BATCHES_COMPARED = 16  # micro-batches, the largest of which is computed


class Probe:
    """Runs trial steps in one process, of a run whose configuration is concrete except for the micro-batch."""

    def __init__(self, task: Task, config: RunConfig, place: ProcessInfo, group: Communicator) -> None:
        self._task, self._config, self._place, self._group = task, config, place, group
        self._source = build_source(task, config, place.world_size)

    def peak(self, size: int, kind: str) -> int:
        """Return the peak memory in bytes of a step with micro-batches of `size` rows, on this process.

        The step has two micro-batches if the run's would have several, since gradients of the first are still there
        during the second, and it is measured with optimizer state. A loss over pairs of rows keeps the outputs of the
        whole global batch, and with `data.group_by_length=balanced` the first micro-batches have few long rows and the
        last ones many short ones, so such a step is measured whole.
        """
        config, world = self._config, self._place.world_size
        passes, balanced = config.train.global_batch // (world * size), config.data.group_by_length == "balanced"
        if resolve_features(self._task).cross_sample is None and not balanced:
            passes = min(2, passes)
        count = max(1, _BATCHES_COMPARED // (min(2, passes) if balanced else passes))
        split = BatchSplit(world * size * passes, world, size)
        plan = build_plan(self._task, self._source, config, world)
        scalars = schedules.ScheduledScalars(config, plan.steps)
        loader = Loader.from_config(self._task, self._source, plan, split, self._place, config)
        engine = create_engine(EngineJob(self._task, config, self._place, self._group, split))
        try:
            steps = list(islice(loader.steps(), count))
            engine.setup(steps[0], scalars(0))
            sizes = [[max(checksum.byte_size(micro.arrays) for micro in batches)] for batches in steps]
            everyone = self._group.gather(sizes, "the sizes of micro-batches")
            largest = max(range(len(steps)), key=lambda step: max(rank[step] for rank in everyone))
            for step in range(2):
                memory.reset_peak(kind)
                engine.step(steps[largest], step, scalars(step))
            return memory.read_peak(kind)
        finally:
            loader.close()
            engine.close()


def search(probe: Probe, group: Communicator, request: dict[str, Any], limit: memory.MemoryLimit, folder: Path) -> None:
    """Measure sizes until the largest that fits is known, and write the result."""
    everyone = group.gather([limit.amount, limit.source, limit.kind], "the limits of all ranks")
    amount, source, kind = min(everyone)
    peaks = {int(size): peak for size, peak in request["peaks"].items()} if request["kind"] in ("", kind) else {}
    while True:
        size = memory_fit.next_size(
            request["sizes"], peaks, memory_fit.usable_bytes(amount), request["failed"] or float("inf")
        )
        if group.rank == 0:
            write_whole(folder / CURRENT_SIZE_FILE, json.dumps(size))
            found = {"limit": amount, "source": source, "kind": kind, "peaks": peaks}
            write_whole(folder / RESULT_FILE, json.dumps(found))
        if size is None:
            return
        peaks[size] = max(group.gather(probe.peak(size, kind), "the peaks of all ranks"))


def main(folder: Path, task: str) -> NoReturn:
    """Run a process that `unisono.launch.processes.local_processes` started for a search."""
    rank_process.die_with_parent()
    place = cluster.process_info()
    assert place is not None

    def work() -> None:
        config = read_config(folder / CONFIG_FILE, task)
        request = json.loads((folder / REQUEST_FILE).read_text(encoding="utf-8"))
        group = rank_process.join_processes(config, place)
        limit = memory.memory_limit(config, config.layout.device, place.local_world_size)
        search(Probe(build_task(config), config, place, group), group, request, limit, folder)

    rank_process.run_and_exit(work, place, report=folder / "logs" / f"rank-{place.rank:05d}.fault.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
